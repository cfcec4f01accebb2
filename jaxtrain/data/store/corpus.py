"""Preparing what `data.train` names: one source, or a mixture with a store for each part."""

import bisect
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path

import numpy as np

from jaxtrain.data.batches.loader import stores_of
from jaxtrain.data.batches.mixture import sources_of
from jaxtrain.data.config import DataConfig, NoValidation
from jaxtrain.data.files.sources import Source, content_hash, revisions_of
from jaxtrain.data.filters.filtered import Reports, filter_sources
from jaxtrain.data.pool import cores, process_pool
from jaxtrain.data.store.prepare import (
    Prepared,
    _locked,
    _save_tokenizer,
    cache_directory,
    cached_tokenizer,
)
from jaxtrain.data.store.prepare import prepare_source as prepare_source
from jaxtrain.data.store.progress import Progress
from jaxtrain.data.store.store import TokenStore
from jaxtrain.data.store.tokenizer_sample import tokenizer_texts
from jaxtrain.data.tokenizer.tokenizer import build_tokenizer
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import full_disk_explained

HISTOGRAM = [2**power for power in range(1, 21)]  # upper ends, in tokens


def revisions(config: DataConfig) -> dict[str, str]:
    """The commit of each repository of huggingface.co that is read, for training or validation."""
    sources = list(sources_of(config.train).values())
    if config.validation.name == "source":
        sources.append(config.validation.source)
    return revisions_of(sources)


def prepare(config: DataConfig, *, progress: Progress = lambda *_: None) -> Prepared:
    """Stores and tokenizer of a configuration, from the cache where it has them.

    Sources that have filters go through them first. Each source of a mixture has a cache entry of
    its own, as if it were the only one with that tokenizer. A tokenizer that is to be trained sees
    as many bytes of each. The validation split is that of all sources, one after the other.
    UserError where the cache's disk is full.
    """
    cache = cache_directory(config)
    explain = lambda said: (
        f"data.cache_dir: {cache}: {said}; free some space, or name another folder. What is "
        "prepared by now stays, and the same command goes on"
    )
    with full_disk_explained(explain):
        return _prepare(config, progress)


def _prepare(config: DataConfig, progress: Progress) -> Prepared:
    config, reports = filter_sources(config, progress)
    train = config.train
    if train.name != "mixture":
        return dataclasses.replace(prepare_source(config, progress=progress), filters=reports)
    directory = None
    if config.tokenizer.name != "bytes" and config.tokenizer.path is None:
        directory = _train_tokenizer(config, progress)
        ready = config.tokenizer.model_copy(update={"path": str(directory / "tokenizer")})
        config = config.model_copy(update={"tokenizer": ready})
    prepared = {}
    for name, part in train.sources.items():
        report = lambda stage, *rest, name=name: progress(f"{name}: {stage}", *rest)
        alone = _alone(config, part.source)
        prepared[name] = prepare_source(alone, progress=report)
    validation = [p.validation for p in prepared.values() if p.validation is not None]
    if config.validation.name == "source":
        alone = _alone(config, config.validation.source)
        validation = [stores_of(prepare_source(alone, progress=progress).train)["train"]]
    first = next(iter(prepared.values()))
    return Prepared(
        {name: stores_of(p.train)["train"] for name, p in prepared.items()},
        join_stores(validation) if validation else None,
        first.tokenizer,
        directory or first.directory,
        reports,
    )


def join_stores(stores: Sequence[TokenStore]) -> TokenStore:
    """The documents of several stores of one tokenizer as one store."""
    if len(stores) == 1:
        return stores[0]
    if len({(store.marked, store.bos_id, store.dtype) for store in stores}) > 1:
        raise UserError(
            "the held-out documents of conversations and of other text cannot be joined; give "
            "data.validation a source of its own"
        )
    counts = [int(store.first_record[-1]) for store in stores]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    firsts = [s.first_record[:-1] + offset for s, offset in zip(stores, offsets)]
    names = "".join(store.fingerprint for store in stores)
    return dataclasses.replace(
        stores[0],
        directory=None,
        lengths=np.concatenate([store.lengths for store in stores]),
        tokens=sum(store.tokens for store in stores),
        bytes=sum(store.bytes for store in stores),
        fingerprint=hashlib.sha256(names.encode()).hexdigest(),
        first_record=np.concatenate([*firsts, offsets[-1:]]),
        weights=None,
        labels=None,
        skipped={path: count for store in stores for path, count in store.skipped.items()},
        records=_Records([store.records for store in stores], offsets.tolist()),
    )


@dataclasses.dataclass(frozen=True)
class _Records:
    """The records of several stores under one numbering."""

    parts: list
    offsets: list[int]

    def read(self, records: Sequence[int]) -> list[bytes]:
        found: list[bytes] = []
        places = ((bisect.bisect_right(self.offsets, r) - 1, r) for r in records)
        for part, some in groupby(places, lambda place: place[0]):
            found += self.parts[part].read([record - self.offsets[part] for _, record in some])
        return found


def describe_stores(
    stores: dict[str, TokenStore], filters: Reports | None = None
) -> dict[str, dict]:
    """Of each source, for people: documents, tokens, bytes, how many documents have at most
    2, 4, 8, ... tokens and more than half of that, the documents of each damaged shard that are
    left out, and what filters removed."""
    return {
        name: {
            "documents": store.documents,
            "tokens": store.tokens,
            "bytes": store.bytes,
            "lengths": _histogram(store.lengths),
            "skipped": {Path(path).name: count for path, count in store.skipped.items()},
            "filters": (filters or {}).get(name),
        }
        for name, store in stores.items()
    }


def damaged_shards(prepared: Prepared) -> list[str]:
    """A line for each damaged shard that `data.skip_damaged` leaves out of a split."""
    splits = [*stores_of(prepared.train).values(), prepared.validation]
    lost = (item for store in splits if store is not None for item in store.skipped.items())
    return [f"{path} is damaged: its {count:,} documents are left out" for path, count in lost]


def _histogram(lengths: np.ndarray) -> dict[str, int]:
    places = np.minimum(np.searchsorted(HISTOGRAM, lengths), len(HISTOGRAM) - 1)
    counts = np.bincount(places, minlength=len(HISTOGRAM)).tolist()
    return {str(end): count for end, count in zip(HISTOGRAM, counts)}


def _alone(config: DataConfig, source: Source) -> DataConfig:
    """The configuration of one source of a mixture."""
    update = {"train": source, "stages": ()}
    if config.validation.name == "source":
        update["validation"] = NoValidation()
    return config.model_copy(update=update)


def _train_tokenizer(config: DataConfig, progress: Progress) -> Path:
    """The directory of the tokenizer of all sources together."""
    assert config.train.name == "mixture" and config.tokenizer.name != "bytes"
    sources = [part.source for part in config.train.sources.values()]
    cache = cache_directory(config)
    settings = config.model_dump(include={"validation", "tokenizer"})
    settings["sources"] = [
        source.model_dump() | {"path": content_hash(source, cache)} for source in sources
    ]
    text = json.dumps(settings, sort_keys=True)
    directory = cache / hashlib.sha256(text.encode()).hexdigest()[:24]
    with _locked(directory, progress):
        if not (directory / "tokenizer").is_dir():
            with process_pool(config.prepare_workers or cores()) as mapped:
                texts = chain.from_iterable(
                    tokenizer_texts(_alone(config, source), mapped, progress, len(sources))
                    for source in sources
                )
                _save_tokenizer(build_tokenizer(config.tokenizer, texts), directory)
    cached_tokenizer(directory)  # whole, or what follows would be made with a damaged one
    return directory
