"""The tokenizer workers of a preparation: blocks of text -> arrays of tokens."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxtrain.cluster.ray_cluster import current_cluster
from jaxtrain.data.chat.chat import Chat, make_chat
from jaxtrain.data.chat.template import TemplateRefused, read_template
from jaxtrain.data.files.reading import Position, TextBlock, chat_records, records_of, texts_of
from jaxtrain.data.files.sources import CHAT_TEMPLATE_SOURCES, ChatTemplateSource, Source
from jaxtrain.data.preference.preferences import RecordKind, encode_preferences, same_kind
from jaxtrain.data.records import Conversation, KTOExample, Preference
from jaxtrain.data.tokenizer.tokenizer import (
    SavedTokenizer,
    Tokenizer,
    load_tokenizer,
    read_tokenizer,
)
from jaxtrain.settings import UserError

BATCH = 3 << 20  # bytes of text of a worker's task: a block, or many short files
# Why a conversation is not in a store: nothing in it is learned, or the template refuses it.
DROP_REASONS = ("unanswered", "refused")
PIECE = 1 << 16  # characters of a sampled piece of a document, a multiple of a training chunk


class EncodeJob(NamedTuple):
    """The settings of a tokenizer worker."""

    source: Source
    tokenizer: Path | SavedTokenizer | None  # or its folder; None: there is none yet
    held_out: int  # documents whose hash is below it are for validation


def encode_job(source: Source, tokenizer: Path, held_out: int = 0) -> EncodeJob:
    """Make a job with the tokenizer of a folder. Nodes of a cluster, which may not share the
    folder, get the tokenizer itself."""
    given = tokenizer if current_cluster() is None else read_tokenizer(tokenizer)
    return EncodeJob(source, given, held_out)


class Encoded(NamedTuple):
    """Tokenized documents."""

    ids: bytes  # their tokens without BOS, in the dtype of the store
    lengths: np.ndarray  # int64 [documents], in tokens
    sizes: np.ndarray  # int64 [documents], in UTF-8 bytes
    weights: np.ndarray | None = None  # float64 [documents], of a source with sample_by
    counts: Mapping[str, int] = MappingProxyType({})  # records read, and records by DROP_REASONS
    labels: np.ndarray | None = None  # uint8 [documents], 1 for desirable; of examples of KTO


class EncodedSplits(NamedTuple):
    """The training and the validation documents of a batch of blocks."""

    train: Encoded
    validation: Encoded
    size: int
    after: Position
    kind: RecordKind | None = None  # of the first preference


class SampledPiece(NamedTuple):
    """A piece of a document, its position, and the hash that it was sampled by."""

    hash: int
    position: tuple[int, int, int, int]  # file, block, document, piece
    text: str


def batch_blocks(blocks: Iterable[TextBlock]) -> Iterator[list[TextBlock]]:
    """Yield blocks in groups of BATCH bytes; the end of a group depends on its blocks alone."""
    group: list[TextBlock] = []
    size = 0
    for block in blocks:
        group.append(block)
        size += block.size
        if size >= BATCH:
            yield group
            group, size = [], 0
    if group:
        yield group


def token_type(vocab_size: int, marked: bool = False) -> np.dtype:
    """dtype of a store's tokens; if `marked`, the highest bit of a token is its loss mask."""
    return np.dtype("<u2" if vocab_size << marked <= 1 << 16 else "<u4")


def pack_loss_mask(ids: np.ndarray, marks: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert ids to a dtype, and set the highest bit of those that are marked."""
    return ids.astype(dtype) | (marks.astype(dtype) << (8 * dtype.itemsize - 1))


def unpack_loss_mask(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of `pack_loss_mask`: returns the ids and the marks (0 or 1)."""
    bit = 8 * tokens.itemsize - 1
    return tokens & tokens.dtype.type((1 << bit) - 1), tokens >> bit


class EncodedRecord(NamedTuple):
    """The stored documents of one text, or of one record of a chat file."""

    key: str  # its hash decides the split
    ids: list[np.ndarray]  # of each document
    sizes: list[int]  # UTF-8 bytes of each
    weight: float = 1.0
    label: bool | None = None  # of an example of KTO
    drop_reason: str | None = None  # one of DROP_REASONS, if it is left out
    kind: RecordKind | None = None  # of a preference


def encode_blocks(job: EncodeJob, group: list[TextBlock]) -> EncodedSplits:
    """Tokenize a group of blocks, and split its documents into training and validation."""
    assert job.tokenizer is not None
    tokenizer, has_chat = _tokenizer(job.tokenizer), job.source.name in CHAT_TEMPLATE_SOURCES
    dtype = token_type(tokenizer.vocab_size, has_chat)
    read = _encode_chat(job, group, dtype) if has_chat else _encode_text(job, group, tokenizer)
    held_out = [_is_held_out(job, one.key) for one in read]
    train, validation = (
        _packed([one for one, h in zip(read, held_out) if h == split], dtype)
        for split in (False, True)
    )
    if job.source.sample_by is None:
        train, validation = train._replace(weights=None), validation._replace(weights=None)
    size = int(train.sizes.sum() + validation.sizes.sum())
    kind = reduce(same_kind, (one.kind for one in read if one.kind is not None), None)
    return EncodedSplits(train, validation, size, group[-1].after, kind)


def _encode_text(
    job: EncodeJob, group: list[TextBlock], tokenizer: Tokenizer
) -> list[EncodedRecord]:
    pairs = [pair for block in group for pair in _weighted(job.source, block)]
    encoded = tokenizer.encode_batch([text for text, _ in pairs])
    return [
        EncodedRecord(text, [ids], [len(text.encode())], weight)
        for ids, (text, weight) in zip(encoded, pairs, strict=True)
    ]


def _encode_chat(job: EncodeJob, group: list[TextBlock], dtype: np.dtype) -> list[EncodedRecord]:
    """Tokenize conversations or preferences. Records that the template refuses raise or are left
    out."""
    source = job.source
    assert job.tokenizer is not None and isinstance(source, ChatTemplateSource)
    pairs = [pair for block in group for pair in chat_records(source, block)]
    chat, records = chat_of_source(source, job.tokenizer), [record for record, _ in pairs]
    refused = set()

    def on_error(number: int, error: UserError) -> None:
        where = pairs[number][1]
        if not isinstance(error, TemplateRefused):
            raise UserError(f"{where}: {error}") from error
        if source.refused == "error":
            raise UserError(
                f"{where}: {error}; data.train.refused=drop leaves such records out"
            ) from error
        refused.add(number)

    if source.name == "preference":
        preferences = [record for record in records if isinstance(record, Preference)]
        found = encode_preferences(chat, preferences, on_error)
    else:
        conversations = [record for record in records if isinstance(record, Conversation)]
        found = chat.documents(conversations, on_error)
    encoded = []
    for number, ((record, where), some) in enumerate(zip(pairs, found, strict=True)):
        label = record.label if isinstance(record, KTOExample) else None
        ids = [pack_loss_mask(one.ids, one.marks, dtype) for one in some]
        sizes = [one.size for one in some]
        reason = None if some else "refused" if number in refused else "unanswered"
        is_preference = bool(some) and isinstance(record, Preference)
        kind = RecordKind(label is not None, where) if is_preference else None
        key = record.canonical_json()
        encoded.append(EncodedRecord(key, ids, sizes, 1.0, label, reason, kind))
    return encoded


def sample_pieces(
    job: EncodeJob, task: tuple[int, list[TextBlock]]
) -> tuple[list[SampledPiece], int, Position]:
    """Return training pieces whose hash is below a limit, the bytes read, and the next position."""
    limit, group = task
    found, size = [], 0
    for position, key, text in _documents(job.source, group):
        size += len(key.encode())
        if _is_held_out(job, key):
            continue
        for index, start in enumerate(range(0, len(text), PIECE)):
            piece = text[start : start + PIECE]
            if (hashed := text_hash(piece)) < limit:
                found.append(SampledPiece(hashed, (*position, index), piece))
    return found, size, group[-1].after


def beginnings(
    characters: int, job: EncodeJob, group: list[TextBlock]
) -> tuple[list[str], int, Position]:
    """Return the first characters of training documents, the bytes read, and the next position."""
    found, size = [], 0
    for _, key, text in _documents(job.source, group):
        size += len(key.encode())
        if not _is_held_out(job, key):
            found.append(text[:characters])
    return found, size, group[-1].after


def _documents(
    source: Source, group: list[TextBlock]
) -> Iterator[tuple[tuple[int, int, int], str, str]]:
    """(place, text whose hash decides the split, text to train on) of each document."""
    for block in group:
        if isinstance(source, ChatTemplateSource):
            records = (record for record, _ in chat_records(source, block))
            pairs = ((record.canonical_json(), record.chat_text()) for record in records)
        else:
            pairs = ((text, text) for text in texts_of(source, block))
        for number, (key, text) in enumerate(pairs):
            yield (block.after.file, block.start, number), key, text


def _is_held_out(job: EncodeJob, key: str) -> bool:
    return bool(job.held_out) and text_hash(key) < job.held_out


def text_hash(text: str) -> int:
    """64 random bits that are a function of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def chat_of_source(source: ChatTemplateSource, tokenizer: Path | SavedTokenizer) -> Chat:
    """Make the `Chat` of a source's template with a tokenizer, or with that of a folder."""
    return _chat(read_template(source.template), tuple(source.special.items()), tokenizer)


@lru_cache(maxsize=8)
def _chat(
    template: str, special: tuple[tuple[str, str], ...], tokenizer: Path | SavedTokenizer
) -> Chat:
    return make_chat(template, dict(special), _tokenizer(tokenizer))


@lru_cache(maxsize=1)
def _tokenizer(given: Path | SavedTokenizer) -> Tokenizer:
    return given.load() if isinstance(given, SavedTokenizer) else load_tokenizer(given)


def _packed(read: list[EncodedRecord], dtype: np.dtype) -> Encoded:
    documents = [ids.astype(dtype) for one in read for ids in one.ids]
    ids = np.concatenate([np.empty(0, dtype), *documents])
    lengths = np.array([len(ids) for ids in documents], np.int64)
    sizes = np.array([size for one in read for size in one.sizes], np.int64)
    weights = np.array([one.weight for one in read for _ in one.ids], np.float64)
    given = [one.label for one in read for _ in one.ids]
    labels = None if None in given or not given else np.array(given, np.uint8)
    counts = Counter({"read": len(read)})
    counts.update(one.drop_reason for one in read if one.drop_reason)
    return Encoded(ids.tobytes(), lengths, sizes, weights, counts, labels)


def _weighted(source: Source, block: TextBlock) -> Iterator[tuple[str, float]]:
    """Yield the documents of a block, each with its sampling weight; 0 if it has none."""
    name = source.sample_by
    if name is None:
        yield from ((text, 1.0) for text in texts_of(source, block))
        return
    for text, record in records_of(source, block, (name,)):
        weight = record.get(name) or 0.0
        if not (isinstance(weight, (int, float)) and 0 <= weight < math.inf):
            raise UserError(
                f"{block.file.url}: data.train.sample_by needs a number from 0 on in '{name}', "
                f"not {weight!r}"
            )
        yield text, float(weight)
