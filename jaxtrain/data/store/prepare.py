"""From the data configuration to token stores on disk, skipping what the cache holds.

One process reads the files and cuts them into blocks, processes of their own turn blocks into
tokens, and this one writes those in the order of the blocks: the bytes of a store are a function of
the text, whatever the number of processes and however often the work was interrupted.
"""

import fcntl
import hashlib
import io
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.data.chat.template import read_template
from jaxtrain.data.config import DataConfig
from jaxtrain.data.files.reading import (
    CUTS,
    START,
    Position,
    TextBlock,
    blocks,
    cut_stream,
    read_documents,
)
from jaxtrain.data.files.remote import File
from jaxtrain.data.files.sources import (
    ChatTemplateSource,
    Source,
    content_hash,
    find_files,
    source_path,
)
from jaxtrain.data.pool import Map, cores, process_pool
from jaxtrain.data.preference.preferences import RecordKind, same_kind
from jaxtrain.data.store import store as stores
from jaxtrain.data.store.encode import (
    DROP_REASONS,
    EncodeJob,
    SampledPiece,
    batch_blocks,
    beginnings,
    chat_of_source,
    encode_blocks,
    sample_pieces,
    token_type,
)
from jaxtrain.data.store.store import TokenStore, Writer, open_store, publish, sync
from jaxtrain.data.tokenizer.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from jaxtrain.settings import UserError

# (stage, UTF-8 bytes done, an estimate of the bytes in all or None if unknown)
Progress = Callable[[str, int, int | None], None]
ALONE = 1 << 24  # stored bytes; less text is tokenized before other processes would have started
COMMIT_SECONDS = 10  # the batch in hand and those behind it add less than 5 to what a kill loses
RULES = 2  # goes up when conversations are read in another way: stores of before are not theirs
IDS = 2  # goes up when sentencepiece models read text in another way
NOUNS = {"chat": "conversations", "preference": "preferences"}  # of other sources: documents
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # to hold out; HELD_OUT documents, if there are
HELD_OUT = 5
LOOK_THROUGH = 64  # times the text that a tokenizer trains on, at most, to draw it from


@dataclass(frozen=True)
class Prepared:
    """What training needs; `directory` holds the stores and the tokenizer."""

    train: TokenStore | dict[str, TokenStore]  # of a mixture: by the name of the source
    validation: TokenStore | None
    tokenizer: Tokenizer
    directory: Path
    filters: dict[str, dict[str, Any]] = field(default_factory=dict)  # reports by source


class SplitText(NamedTuple):
    """Text to be tokenized into the stores of `splits`."""

    source: Source
    splits: tuple[str, ...]
    held_out: float  # the fraction of the documents that the second split takes
    files: list[File]
    blocks: Callable[[Position], Iterator[TextBlock]]

    @property
    def stored(self) -> int:
        return sum(file.size or 0 for file in self.files)


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


def training_texts(
    config: DataConfig, size: int, mapped: Map = map, progress: Progress = lambda *_: None
) -> list[str]:
    """`size` bytes of the training split, drawn at random by the hash of the text, in its order.

    All of it, if there is no more. Of very much text only a part is looked through, of some files.
    """
    order, text = _in_drawn_order(_texts(config)[0])
    job = EncodeJob(text.source, None, _limit(text))
    limit, kept, held, seen = 1 << 64, [], 0, 0
    tasks = ((limit, group) for group in batch_blocks(text.blocks(START)))
    for found, looked, after in mapped(partial(sample_pieces, job), tasks):
        kept += found
        held += sum(len(piece.text.encode()) for piece in found)
        seen += looked
        if held > 2 * size:
            kept = _lowest(kept, size)
            limit, held = kept[-1].hash, size
        progress("tokenizer", seen, _estimate(seen, after, text))
        if seen >= LOOK_THROUGH * size:
            break
    kept = _lowest(kept, size)
    return [p.text for p in sorted(kept, key=lambda p: (order[p.place[0]], *p.place[1:]))]


def first_texts(
    config: DataConfig,
    size: int,
    each: int,
    mapped: Map = map,
    progress: Progress = lambda *_: None,
) -> Iterator[str]:
    """Beginnings of training documents, of `each` characters at most, until there are `size`.

    Files come in an order drawn at random, their documents as they stand; none is kept.
    """
    _, text = _in_drawn_order(_texts(config)[0])
    job = EncodeJob(text.source, None, _limit(text))
    taken = seen = 0
    for found, looked, after in mapped(
        partial(beginnings, each, job), batch_blocks(text.blocks(START))
    ):
        seen += looked
        progress("tokenizer", seen, _estimate(seen, after, text))
        for one in found:
            yield one
            taken += len(one)
            if taken >= size:
                return


def tokenizer_texts(
    config: DataConfig, mapped: Map, progress: Progress, sources: int = 1
) -> Iterable[str]:
    """What a tokenizer is trained on, of one of several sources."""
    c = config.tokenizer
    assert c.name != "bytes"
    if c.name == "nanochat":
        return first_texts(config, c.max_chars // sources, c.document_chars, mapped, progress)
    return training_texts(config, c.train_bytes // sources, mapped, progress)


def _in_drawn_order(text: SplitText) -> tuple[list[int], SplitText]:
    """A text with its files in an order drawn at random, and that order."""
    order = list(range(len(text.files)))
    if len(order) > 1:
        random.Random(0).shuffle(order)
        shuffled = [text.files[number] for number in order]
        text = text._replace(files=shuffled, blocks=partial(blocks, text.source, shuffled))
    return order, text


def _lowest(pieces: list[SampledPiece], size: int) -> list[SampledPiece]:
    """The pieces of the lowest hash that have `size` bytes together."""
    ordered = sorted(pieces, key=lambda piece: (piece.hash, piece.place))
    for count, piece in enumerate(ordered, 1):
        size -= len(piece.text.encode())
        if size <= 0:
            return ordered[:count]
    return ordered


def _fill(config: DataConfig, directory: Path, progress: Progress) -> None:
    """Makes what `directory` lacks."""
    texts = _texts(config)
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
            Writer(partial_stores / split, dtype, state["shards"], read_documents)
            for split, read_documents in zip(text.splits, state["documents"])
        ]
        counts = [Counter(some) for some in state["counts"]]
        size, after = state["size"], Position(*state["after"])
        job = EncodeJob(text.source, directory / "tokenizer", _limit(text))
        committed = time.monotonic()
        for answer in mapped(partial(encode_blocks, job), batch_blocks(text.blocks(after))):
            for writer, count, found in zip(writers, counts, (answer.train, answer.validation)):
                writer.add(found)
                count.update(found.counts)
            size, after = size + answer.size, answer.after
            progress("tokens", size, _estimate(size, after, text))
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


def _estimate(done: int, after: Position, text: SplitText) -> int | None:
    """Bytes of text in all, if the rest of the files is like what has been read of them."""
    return done * max(text.stored, after.stored) // after.stored if after.stored else None


def _limit(text: SplitText) -> int:
    return int(text.held_out * 2**64)


def _texts(config: DataConfig) -> list[SplitText]:
    """What there is to tokenize. Raises UserError if the source cannot be split that way."""
    assert config.train.name != "mixture", "corpus.prepare takes a mixture apart"
    how = config.validation
    if how.name == "tail":
        return _tail_split(config.train, how.fraction)
    if how.name == "documents":
        return [_text(config.train, ("train", "validation"), how.fraction)]
    texts = [_text(config.train, ("train",))]
    if how.name == "source":
        texts.append(_text(how.source, ("validation",)))
    return texts


def _text(source: Source, splits: tuple[str, ...], held_out: float = 0.0) -> SplitText:
    files = find_files(source)
    return SplitText(source, splits, held_out, files, partial(blocks, source, files))


def _tail_split(source: Source, fraction: float) -> list[SplitText]:
    if source.name != "text":
        raise UserError(
            f"data.validation tail needs a text source, not {source.name}; use "
            "data.validation.name=documents"
        )
    files = list(islice(read_documents(source.model_copy(update={"document": "file"})), 2))
    if len(files) != 1:
        raise UserError(
            f"data.validation tail needs a single file, but {source.path} has more; "
            "use data.validation.name=documents"
        )
    cut = int(len(files[0]) * (1 - fraction))
    ends = {"train": files[0][:cut], "validation": files[0][cut:]}
    return [_end_of_file(source, split, text.encode()) for split, text in ends.items()]


def _end_of_file(source: Any, split: str, data: bytes) -> SplitText:
    file = File(source.path, len(data), "", source.path)

    def cut(begin: Position) -> Iterator[TextBlock]:
        stream = io.BytesIO(data)
        stream.seek(begin.at)
        return cut_stream(stream, file, begin, CUTS[source.document], stream.tell)

    return SplitText(source, (split,), 0.0, [file], cut)


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
    """Of all processes one at a time; says so if it is another's turn."""
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
