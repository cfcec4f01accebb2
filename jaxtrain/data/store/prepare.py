"""From the data configuration to token stores on disk, skipping what the cache holds.

One process reads the files and cuts them into blocks, processes of their own turn blocks into
tokens, and this one writes those in the order of the blocks: the bytes of a store are a function of
the text, whatever the number of processes and however often the work was interrupted.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from jaxtrain.data.chat.template import read_template
from jaxtrain.data.config import DataConfig
from jaxtrain.data.files.reading import (
    START,
    Position,
)
from jaxtrain.data.files.sources import (
    ChatTemplateSource,
    Source,
    content_hash,
    source_path,
)
from jaxtrain.data.pool import Map, cores, process_pool
from jaxtrain.data.preference.preferences import RecordKind, same_kind
from jaxtrain.data.store import store as stores
from jaxtrain.data.store.encode import (
    DROP_REASONS,
    EncodeJob,
    batch_blocks,
    chat_of_source,
    encode_blocks,
    token_type,
)
from jaxtrain.data.store.progress import Progress
from jaxtrain.data.store.splits import SplitText, estimated_bytes, held_out_limit, split_texts
from jaxtrain.data.store.store import TokenStore, Writer, open_store, publish, sync
from jaxtrain.data.store.tokenizer_sample import tokenizer_texts
from jaxtrain.data.tokenizer.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from jaxtrain.settings import UserError

ALONE = 1 << 24  # stored bytes; less text is tokenized before other processes would have started
COMMIT_SECONDS = 10  # the batch in hand and those behind it add less than 5 to what a kill loses
RULES = 2  # goes up when conversations are read in another way: stores of before are not theirs
IDS = 2  # goes up when sentencepiece models read text in another way
NOUNS = {"chat": "conversations", "preference": "preferences"}  # of other sources: documents
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # to hold out; HELD_OUT documents, if there are
HELD_OUT = 5


@dataclass(frozen=True)
class Prepared:
    """Stores and tokenizer of a configuration; both are in `directory`."""

    train: TokenStore | dict[str, TokenStore]  # of a mixture: by the name of the source
    validation: TokenStore | None
    tokenizer: Tokenizer
    directory: Path
    filters: dict[str, dict[str, Any]] = field(default_factory=dict)  # reports by source


def prepare_source(config: DataConfig, *, progress: Progress = lambda *_: None) -> Prepared:
    """Trains or loads the tokenizer and tokenizes both splits, unless the cache has them.

    The cache is keyed by the content of the files and the settings that matter. A lock lets the
    processes of a machine share the work; an interrupted preparation goes on where it was.
    """
    cache = cache_directory(config)
    directory = cache / _key(config, cache)
    splits = ["train"] if config.validation.name == "none" else ["train", "validation"]
    if not all((directory / name).is_dir() for name in ("tokenizer", *splits)):
        with _locked(directory, progress):
            _fill(config, directory, progress)
    tokenizer = cached_tokenizer(directory)
    found = [
        open_store(
            directory / split, tokenizer=tokenizer.fingerprint, skip_damaged=config.skip_damaged
        )
        for split in splits
    ]
    _check_vocabulary(config, found[0])
    _check_weights(config, found[0])
    return Prepared(found[0], found[1] if len(found) == 2 else None, tokenizer, directory)


def cached_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of an entry of the cache. What was made with a damaged one goes with it."""
    try:
        return load_tokenizer(directory / "tokenizer")
    except UserError as error:
        raise UserError(
            f"{error}; delete {directory} to have the tokenizer and the data prepared again"
        ) from error


def cache_directory(config: DataConfig) -> Path:
    """Where prepared data is kept."""
    default = os.environ.get("JAXTRAIN_CACHE", "~/.cache/jaxtrain")
    return Path(config.cache_dir or default).expanduser() / "data"


def _fill(config: DataConfig, directory: Path, progress: Progress) -> None:
    """Makes what `directory` lacks."""
    texts = split_texts(config)
    small = sum(text.stored for text in texts) < ALONE
    with process_pool(1 if small else config.prepare_workers or cores()) as mapped:
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
    """Writes the stores of a text. Every COMMIT_SECONDS the block that was reached is noted: there
    the work goes on after an interruption. All shards end at the same block."""
    tokenizer = cached_tokenizer(directory)
    partial_stores = directory / f"{'-'.join(text.splits)}.{tokenizer.fingerprint[:12]}.partial"
    note = partial_stores / "done.json"
    state = {"shards": 0, "after": START, "size": 0, "finished": False}
    state |= {"counts": [{} for _ in text.splits], "documents": [0 for _ in text.splits]}
    if note.is_file():
        state |= json.loads(note.read_text())
    start = None
    if isinstance(text.source, ChatTemplateSource):
        start = chat_of_source(text.source, directory / "tokenizer").start
    dtype = token_type(tokenizer.vocab_size, start is not None)
    if not state["finished"]:
        writers = [
            Writer(partial_stores / split, dtype, state["shards"], documents)
            for split, documents in zip(text.splits, state["documents"])
        ]
        counts = [Counter(some) for some in state["counts"]]
        size, after = state["size"], Position(*state["after"])
        job = EncodeJob(text.source, directory / "tokenizer", held_out_limit(text))
        committed = time.monotonic()
        for answer in mapped(partial(encode_blocks, job), batch_blocks(text.blocks(after))):
            for writer, count, found in zip(writers, counts, (answer.train, answer.validation)):
                writer.add(found)
                count.update(found.counts)
            size, after = size + answer.size, answer.after
            progress("tokens", size, estimated_bytes(size, after, text))
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
    """Raises UserError if a split of the documents takes none of them, or all."""
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
    """Notes what was reached, once it is on the disk; if `full`, the next shards begin there."""
    for writer in writers:
        writer.close() if full else writer.commit()
    state |= {"shards": writers[0].shards, "documents": [one.documents for one in writers]}
    unnamed = note.with_suffix(".tmp")
    unnamed.write_text(json.dumps(state))
    sync(unnamed)
    unnamed.rename(note)
    sync(note.parent)
    for writer in writers:
        writer.clean()


def _check_vocabulary(config: DataConfig, train: TokenStore) -> None:
    """A trained vocabulary with more pieces than the text has tokens was learned by heart."""
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


def _key(config: DataConfig, cache: Path) -> str:
    """A hash of all that decides the stores: contents, how they are read, split and tokenized."""
    settings = config.model_dump(include={"train", "validation", "tokenizer"})
    settings["format"] = stores.FORMAT
    if config.tokenizer.name == "sentencepiece":
        settings["ids"] = IDS
    assert config.train.name != "mixture", "corpus.prepare takes a mixture apart"
    settings["train"] |= _contents(config.train, cache)
    if config.validation.name == "source":
        settings["validation"]["source"] |= _contents(config.validation.source, cache)
    if settings["tokenizer"].get("path"):
        settings["tokenizer"] = build_tokenizer(config.tokenizer, ()).fingerprint
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


def _contents(source: Source, cache: Path) -> dict[str, Any]:
    """The fields of a source as what they stand for."""
    fields: dict[str, Any] = {"path": content_hash(source, cache)}
    if isinstance(
        source, ChatTemplateSource
    ):  # how long a row is, is not known when a store is written
        fields |= {"template": read_template(source.template), "rules": RULES}
        fields |= {"too_long": None, "refused": None}
    return fields


def _save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    unnamed = directory / "tokenizer.partial"
    shutil.rmtree(unnamed, ignore_errors=True)
    tokenizer.save(unnamed)
    unnamed.rename(directory / "tokenizer")


@contextmanager
def _locked(directory: Path, progress: Progress = lambda *_: None) -> Iterator[None]:
    """Holds the lock of a folder of the cache; reports that it waits for another process."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise UserError(
            f"data.cache_dir: {directory.parent} cannot be written ({error.strerror}); name a "
            "folder that can"
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waits for another process that prepares the same data", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
