"""Preparation: from the data configuration to token stores on disk, reusing the cache.

The main process cuts files into blocks, worker processes tokenize the blocks, and the main process
writes the tokens in the order of the blocks. The bytes of a store depend only on the text, not on
the number of processes or on interruptions.
"""

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.batches.loader import stores_of
from jaxtrain.data.batches.mixture import sources_of
from jaxtrain.data.config import DataConfig, NoValidation
from jaxtrain.data.files.reading import START, Position
from jaxtrain.data.files.sources import (
    ChatTemplateSource,
    Source,
    content_hash,
    revisions_of,
    source_path,
)
from jaxtrain.data.filters.filtered import Reports, filter_sources
from jaxtrain.data.pool import Map, block_pool
from jaxtrain.data.preference.preferences import RecordKind, same_kind
from jaxtrain.data.store import store as stores
from jaxtrain.data.store.cache import cache_directory, cache_url, locked
from jaxtrain.data.store.encode import (
    DROP_REASONS,
    batch_blocks,
    chat_of_source,
    encode_blocks,
    encode_job,
    token_type,
)
from jaxtrain.data.store.keys import entry_key, request_key
from jaxtrain.data.store.progress import Progress, estimate_bytes, named_progress
from jaxtrain.data.store.published import (
    fetch_tokenizer,
    is_published,
    open_published,
    publish_entry,
    read_note,
    write_note,
)
from jaxtrain.data.store.splits import SplitText, held_out_limit, split_texts, tokenizer_texts
from jaxtrain.data.store.store import TokenStore, Writer, join_records, open_store, publish, sync
from jaxtrain.data.tokenizer.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import full_disk_explained
from jaxtrain.storage.objects import RemoteFolder

ALONE = 1 << 24  # stored bytes; less text is tokenized sooner than worker processes start
COMMIT_SECONDS = 10  # a kill also loses the batches in flight, less than 5 seconds of work
NOUNS = {"chat": "conversations", "preference": "preferences"}  # of other sources: documents
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # suggested to hold out HELD_OUT documents
HELD_OUT = 5


@dataclass(frozen=True)
class Prepared:
    """Stores and tokenizer of a configuration; both are in `directory`."""

    train: TokenStore | dict[str, TokenStore]  # of a mixture: by the name of the source
    validation: TokenStore | None
    tokenizer: Tokenizer
    directory: Path
    filters: Reports = field(default_factory=dict)


def revisions(config: DataConfig) -> dict[str, str]:
    """Commits of the Hugging Face repositories that are read, for training or validation."""
    sources = list(sources_of(config.train).values())
    if config.validation.name == "source":
        sources.append(config.validation.source)
    return revisions_of(sources)


def prepare(config: DataConfig, *, progress: Progress = lambda *_: None) -> Prepared:
    """Prepare the stores and the tokenizer of a configuration, or take them from the cache.

    Sources that have filters go through them first. Each source of a mixture has a cache entry of
    its own, as if it were the only one with that tokenizer. A tokenizer is trained on equally many
    bytes of each source. The validation splits of all sources are joined in their order.
    Raises UserError if the cache's disk is full.
    """
    cache = cache_directory(config)
    explain = lambda error: (
        f"data.cache_dir: {cache}: {error}; free some space, or set another folder. The data "
        "prepared so far is kept, and the same command resumes"
    )
    with full_disk_explained(explain):
        return _prepare(config, progress) if cache_url(config) is None else _at(config, progress)


def _at(config: DataConfig, progress: Progress) -> Prepared:
    """`prepare` for a cache at a URL. With a note of this request nothing is computed again."""
    remote = RemoteFolder(cache_url(config) or "", explained=True)
    request = request_key(config, cache_directory(config))
    note = read_note(remote, request)
    if note is None:
        prepared = _prepare(config, progress)
        train = stores_of(prepared.train)
        write_note(remote, request, train, prepared.validation, prepared.filters)
        return prepared
    entries = {name: store.partition("/")[0] for name, store in note["train"].items()}
    first = next(iter(entries.values()))
    directory = cache_directory(config) / first
    fetch_tokenizer(remote.below(first), directory / "tokenizer")
    tokenizer = cached_tokenizer(directory)

    def opened(name: str) -> TokenStore:
        return open_published(remote.below(name), config, tokenizer.fingerprint)

    train = {name: opened(store) for name, store in note["train"].items()}
    held_out = [opened(store) for store in note["validation"]]
    return Prepared(
        train if config.train.name == "mixture" else train["train"],
        join_stores(held_out) if held_out else None,
        tokenizer,
        directory,
        note["filters"],
    )


def _prepare(config: DataConfig, progress: Progress) -> Prepared:
    config, reports = filter_sources(config, progress)
    train = config.train
    if train.name != "mixture":
        return replace(prepare_source(config, progress=progress), filters=reports)
    directory = None
    if config.tokenizer.name != "bytes" and config.tokenizer.path is None:
        directory = _train_tokenizer(config, progress)
        ready = config.tokenizer.model_copy(update={"path": str(directory / "tokenizer")})
        config = config.model_copy(update={"tokenizer": ready})
    prepared = {}
    for name, part in train.sources.items():
        alone = _alone(config, part.source)
        prepared[name] = prepare_source(alone, progress=named_progress(name, progress))
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


def prepare_source(config: DataConfig, *, progress: Progress = lambda *_: None) -> Prepared:
    """Trains or loads the tokenizer and tokenizes both splits, unless the cache has them.

    The cache is keyed by the content of the files and the settings that matter. A lock lets the
    processes of a machine share the work; an interrupted preparation resumes where it stopped.
    """
    cache = cache_directory(config)
    directory = cache / entry_key(config, cache)
    splits = ["train"] if config.validation.name == "none" else ["train", "validation"]
    url = cache_url(config)
    if url is None:
        if not all((directory / name).is_dir() for name in ("tokenizer", *splits)):
            with locked(directory, progress):
                _fill(config, directory, progress)
        tokenizer = cached_tokenizer(directory)
        options: dict[str, Any] = {"tokenizer": tokenizer.fingerprint}
        options["skip_damaged"] = config.skip_damaged
        found = [open_store(directory / split, **options) for split in splits]
    else:
        remote = RemoteFolder(f"{url}/{directory.name}", explained=True)
        if not is_published(remote):
            with locked(directory, progress):
                if not is_published(remote):  # another process may have done it meanwhile
                    _publish(config, directory, splits, remote, progress)
        fetch_tokenizer(remote, directory / "tokenizer")
        tokenizer = cached_tokenizer(directory)
        found = [open_published(remote.below(s), config, tokenizer.fingerprint) for s in splits]
    _check_vocabulary(config, found[0])
    _check_weights(config, found[0])
    return Prepared(found[0], found[1] if len(found) == 2 else None, tokenizer, directory)


def _publish(
    config: DataConfig,
    directory: Path,
    splits: Sequence[str],
    remote: RemoteFolder,
    progress: Progress,
) -> None:
    """Prepares an entry on this machine and moves its stores to a URL; the tokenizer stays."""
    _fill(config, directory, progress)
    made = {split: open_store(directory / split) for split in splits}
    _check_vocabulary(config, made["train"])
    _check_weights(config, made["train"])
    publish_entry(remote, directory / "tokenizer", made, progress)
    for split in splits:
        shutil.rmtree(directory / split)


def cached_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a cache entry. If it is damaged, the whole entry has to be deleted."""
    try:
        return load_tokenizer(directory / "tokenizer")
    except UserError as error:
        raise UserError(
            f"{error}; delete {directory} to have the tokenizer and the data prepared again"
        ) from error


def _fill(config: DataConfig, directory: Path, progress: Progress) -> None:
    """Makes the tokenizer and the stores that `directory` lacks."""
    texts = split_texts(config)
    small = sum(text.stored for text in texts) < ALONE
    with block_pool(config.prepare_workers, small) as mapped:
        if not (directory / "tokenizer").is_dir():
            sample: Iterable[str] = []
            if config.tokenizer.name != "bytes" and config.tokenizer.path is None:
                found = iter(tokenizer_texts(config, mapped, progress))
                first = list(islice(found, 1))
                if not first:
                    raise UserError(f"{source_path(texts[0].source)} holds no text")
                sample = chain(first, found)
            progress("tokenizer", 0, None)
            _save_tokenizer(build_tokenizer(config.tokenizer, sample), directory)
        for text in texts:
            if not all((directory / split).is_dir() for split in text.splits):
                _tokenize(text, directory, mapped, progress)


def _tokenize(text: SplitText, directory: Path, mapped: Map, progress: Progress) -> None:
    """Writes the stores of a text. Progress is committed every COMMIT_SECONDS, and an interrupted
    call resumes there. The shards of all splits end at the same block."""
    tokenizer = cached_tokenizer(directory)
    partial_stores = directory / f"{'-'.join(text.splits)}.{tokenizer.fingerprint[:12]}.parts"
    note = partial_stores / "done.json"
    state = {"shards": 0, "after": START, "size": 0, "finished": False}
    state |= {"counts": [{} for _ in text.splits], "parts": [0 for _ in text.splits]}
    if note.is_file():
        state |= json.loads(note.read_text())
    start = None
    if isinstance(text.source, ChatTemplateSource):
        start = chat_of_source(text.source, directory / "tokenizer").start
    dtype = token_type(tokenizer.vocab_size, start is not None)
    if not state["finished"]:
        writers = [
            Writer(partial_stores / split, dtype, state["shards"], parts)
            for split, parts in zip(text.splits, state["parts"])
        ]
        counts = [Counter(some) for some in state["counts"]]
        size, after = state["size"], Position(*state["after"])
        job = encode_job(text.source, directory / "tokenizer", held_out_limit(text))
        committed = time.monotonic()
        for answer in mapped(partial(encode_blocks, job), batch_blocks(text.blocks(after))):
            for writer, count, found in zip(writers, counts, (answer.train, answer.validation)):
                writer.add(found)
                count.update(found.counts)
            size, after = size + answer.size, answer.after
            progress("tokens", size, estimate_bytes(size, after.stored, text.stored))
            state |= {"after": after, "size": size, "counts": counts}
            if answer.kind is not None:
                first = state.get("kind")
                state["kind"] = same_kind(RecordKind(*first) if first else None, answer.kind)
            full = sum(writer.tokens for writer in writers) >= stores.SHARD_TOKENS
            if full or time.monotonic() - committed >= COMMIT_SECONDS:
                _commit(note, writers, state, full)
                committed = time.monotonic()
        _commit(note, writers, state | {"finished": True}, True)
        if not size:
            shutil.rmtree(partial_stores)
            raise _nothing_left(text.source, sum(counts, Counter()))
    _check_splits(text, state["counts"])
    for split, count in zip(text.splits, state["counts"]):
        if not (directory / split).is_dir():
            left_out = {reason: count.get(reason, 0) for reason in DROP_REASONS}
            publish(partial_stores / split, directory / split, tokenizer, start, left_out)
    shutil.rmtree(partial_stores)


def _nothing_left(source: Source, counts: Counter[str]) -> UserError:
    if not counts["read"]:
        return UserError(f"{source_path(source)} holds no text")
    return UserError(
        f"{source_path(source)}: none of its {counts['read']} conversations is left: "
        f"{counts['unanswered']} have no answer that says something and is to be learned (weight 0 "
        f"and train false leave it out), and the chat template refuses {counts['refused']}"
    )


def _check_splits(text: SplitText, counts: Sequence[Mapping[str, int]]) -> None:
    """Raises UserError if one of the splits would get no documents."""
    kept = [c.get("read", 0) - sum(c.get(reason, 0) for reason in DROP_REASONS) for c in counts]
    total = sum(kept)
    if all(kept) or not total:
        return
    share, noun = f"{100 * text.held_out:g}%", NOUNS.get(text.source.name, "documents")
    fair = next((one for one in FRACTIONS if one * total >= HELD_OUT), FRACTIONS[-1])
    other = f"data.validation.fraction={fair:g}"
    if not kept[0] or fair <= text.held_out:
        other = "a source of its own for data.validation"
    raise UserError(
        f"{source_path(text.source)}: the {text.splits[kept.index(0)]} split has no documents: "
        f"{share} of {total} {noun} is {'none' if kept[0] else 'all'}: set {other}, or "
        "data.validation.name=none"
    )


def _commit(note: Path, writers: Sequence[Writer], state: dict[str, Any], full: bool) -> None:
    """Records the progress once it is on the disk; if `full`, the next shards begin there."""
    for writer in writers:
        writer.close() if full else writer.commit()
    state |= {"shards": writers[0].shards, "parts": [one.parts for one in writers]}
    unnamed = note.with_suffix(".tmp")
    unnamed.write_text(json.dumps(state))
    sync(unnamed)
    unnamed.rename(note)
    sync(note.parent)
    for writer in writers:
        writer.clean()


def _check_vocabulary(config: DataConfig, train: TokenStore) -> None:
    """Raises UserError if a trained vocabulary has more pieces than the text has tokens."""
    c = config.tokenizer
    if c.name != "bytes" and c.path is None and train.tokens < train.vocab_size:
        raise UserError(
            f"data.tokenizer.vocab_size {c.vocab_size} is larger than the training text supports: "
            f"it makes {train.tokens} tokens; use at most {max(266, train.tokens // 10)}"
        )


def _check_weights(config: DataConfig, train: TokenStore) -> None:
    assert config.train.name != "mixture"
    if train.weights is not None and not train.weights.any():
        raise UserError(
            f"data.train.sample_by: no document of {source_path(config.train)} has a number above "
            f"0 in '{config.train.sample_by}'"
        )


def _save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    unnamed = directory / "tokenizer.partial"
    shutil.rmtree(unnamed, ignore_errors=True)
    tokenizer.save(unnamed)
    unnamed.rename(directory / "tokenizer")


def join_stores(stores: Sequence[TokenStore]) -> TokenStore:
    """Join several stores of one tokenizer to one store."""
    if len(stores) == 1:
        return stores[0]
    if len({(store.marked, store.bos_id, store.dtype) for store in stores}) > 1:
        raise UserError(
            "the held-out documents of conversations and of other text cannot be joined; give "
            "data.validation a source of its own"
        )
    offsets = np.cumsum([0, *(store.first_record[-1] for store in stores)])
    firsts = [s.first_record[:-1] + offset for s, offset in zip(stores, offsets)]
    names = "".join(store.fingerprint for store in stores)
    return replace(
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
        records=join_records([store.records for store in stores]),
    )


def damaged_shards(prepared: Prepared) -> list[str]:
    """A line for each damaged shard that `data.skip_damaged` leaves out of a split."""
    splits = [*stores_of(prepared.train).values(), prepared.validation]
    lost = (item for store in splits if store is not None for item in store.skipped.items())
    return [f"{path} is damaged: its {count:,} documents are left out" for path, count in lost]


def _alone(config: DataConfig, source: Source) -> DataConfig:
    """The configuration of one source of a mixture."""
    update = {"train": source, "stages": ()}
    if config.validation.name == "source":
        update["validation"] = NoValidation()
    return config.model_copy(update=update)


def _train_tokenizer(config: DataConfig, progress: Progress) -> Path:
    """Train a tokenizer on all sources together. Returns its directory."""
    assert config.train.name == "mixture" and config.tokenizer.name != "bytes"
    sources = [part.source for part in config.train.sources.values()]
    cache = cache_directory(config)
    settings = config.model_dump(include={"validation", "tokenizer"})
    settings["sources"] = [
        source.model_dump() | {"path": content_hash(source, cache)} for source in sources
    ]
    text = json.dumps(settings, sort_keys=True)
    directory = cache / hashlib.sha256(text.encode()).hexdigest()[:24]
    with locked(directory, progress):
        if not (directory / "tokenizer").is_dir():
            with block_pool(config.prepare_workers) as mapped:
                texts = chain.from_iterable(
                    tokenizer_texts(_alone(config, source), mapped, progress, len(sources))
                    for source in sources
                )
                _save_tokenizer(build_tokenizer(config.tokenizer, texts), directory)
    cached_tokenizer(
        directory
    )  # checks it: a damaged tokenizer would spoil all that is made with it
    return directory
