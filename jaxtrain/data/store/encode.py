"""What each process of a preparation does with some blocks of text."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.chat.chat import Chat, make_chat
from jaxtrain.data.chat.messages import chat_text
from jaxtrain.data.chat.template import TemplateRefused, read_template
from jaxtrain.data.files.reading import Position, TextBlock, chat_records, records_of, texts_of
from jaxtrain.data.files.sources import CHAT_TEMPLATE_SOURCES
from jaxtrain.data.preference.preferences import (
    RecordKind,
    preference_text,
    same_kind,
    texts_of_preferences,
)
from jaxtrain.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.settings import UserError

BATCH = 3 << 20  # bytes of text that a process takes at a time: a block, or many short files
SAID = {"chat": chat_text, "preference": preference_text}  # the text of what is stored as JSON
# Why a conversation is not in a store: nothing in it is learned, or the template refuses it.
DROP_REASONS = ("unanswered", "refused")
PIECE = 1 << 16  # characters of a document that are drawn together, a multiple of a training chunk


class EncodeJob(NamedTuple):
    """How blocks become tokens."""

    source: Any
    tokenizer: Path | None  # the folder it is in; None: there is none yet
    held_out: int  # documents whose hash is below are for validation


class Encoded(NamedTuple):
    """Some documents."""

    ids: bytes  # their tokens without BOS, in the dtype of the store
    lengths: np.ndarray  # int64 [documents], in tokens
    sizes: np.ndarray  # int64 [documents], in UTF-8 bytes
    weights: np.ndarray | None = None  # float64 [documents], of a source with sample_by
    counts: Mapping[str, int] = MappingProxyType({})  # texts read, and of LEFT_OUT


class EncodedSplits(NamedTuple):
    """The training and the validation documents of a batch of blocks."""

    train: Encoded
    validation: Encoded
    size: int
    after: Position
    kind: RecordKind | None = None  # of the first preference


class SampledPiece(NamedTuple):
    """A piece of a document, where it stands, and the hash that it was drawn by."""

    hash: int
    place: tuple[int, int, int, int]  # file, block, document, piece
    text: str


def batch_blocks(blocks: Iterable[TextBlock]) -> Iterator[list[TextBlock]]:
    """Blocks in groups of BATCH bytes; where a group ends depends on its blocks alone."""
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
    """The dtype of a store's tokens; with marks the highest bit is one."""
    return np.dtype("<u2" if vocab_size << marked <= 1 << 16 else "<u4")


def pack_loss_mask(ids: np.ndarray, marks: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Tokens of a dtype, the highest bit of those that are marked set."""
    return ids.astype(dtype) | (marks.astype(dtype) << (8 * dtype.itemsize - 1))


def unpack_loss_mask(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids and the marks (0 or 1) of what `pack_loss_mask` made."""
    bit = 8 * tokens.itemsize - 1
    return tokens & tokens.dtype.type((1 << bit) - 1), tokens >> bit


class EncodedText(NamedTuple):
    """A text, what it is stored as, and why it is left out, if it is (one of LEFT_OUT)."""

    text: str
    documents: list[tuple[np.ndarray, int, float]]  # tokens, UTF-8 bytes, weight
    left_out: str | None = None
    kind: RecordKind | None = None  # of a preference


def encode_blocks(job: EncodeJob, group: list[TextBlock]) -> EncodedSplits:
    """The tokens of a group of blocks."""
    assert job.tokenizer is not None
    tokenizer, talk = _tokenizer(job.tokenizer), job.source.name in CHAT_TEMPLATE_SOURCES
    dtype = token_type(tokenizer.vocab_size, talk)
    read = _read_talk(job, group, dtype) if talk else _read(job, group, tokenizer)
    held = [bool(job.held_out) and text_hash(one.text) < job.held_out for one in read]
    train, validation = (
        _packed([one for one, h in zip(read, held) if h == split], dtype) for split in (False, True)
    )
    if job.source.sample_by is None:
        train, validation = train._replace(weights=None), validation._replace(weights=None)
    size = int(train.sizes.sum() + validation.sizes.sum())
    kind = reduce(same_kind, (one.kind for one in read if one.kind is not None), None)
    return EncodedSplits(train, validation, size, group[-1].after, kind)


def _read(job: EncodeJob, group: list[TextBlock], tokenizer: Tokenizer) -> list[EncodedText]:
    pairs = [pair for block in group for pair in _weighted(job.source, block)]
    encoded = tokenizer.encode_batch([text for text, _ in pairs])
    return [
        EncodedText(text, [(ids, len(text.encode()), weight)])
        for ids, (text, weight) in zip(encoded, pairs, strict=True)
    ]


def _read_talk(job: EncodeJob, group: list[TextBlock], dtype: np.dtype) -> list[EncodedText]:
    """Conversations or preferences; those that the template refuses stop it, or are left out."""
    assert job.tokenizer is not None
    pairs = [pair for block in group for pair in chat_records(job.source, block)]
    chat, texts = chat_of_source(job.source, job.tokenizer), [text for text, _ in pairs]
    refused = set()

    def on_error(number: int, error: UserError) -> None:
        place = pairs[number][1]
        if not isinstance(error, TemplateRefused):
            raise UserError(f"{place}: {error}") from error
        if job.source.refused == "error":
            raise UserError(
                f"{place}: {error}; data.train.refused=drop leaves such records out"
            ) from error
        refused.add(number)

    if job.source.name == "preference":
        found = texts_of_preferences(chat, texts, on_error)
    else:
        found = chat.documents(texts, on_error)
    read = []
    for number, (text, some) in enumerate(zip(texts, found, strict=True)):
        rows = [(pack_loss_mask(d.ids, d.marks, dtype), d.size, 1.0) for d in some]
        reason = None if some else "refused" if number in refused else "unanswered"
        pair = some if job.source.name == "preference" else []
        kind = RecordKind(len(pair[2].ids) > 0, pairs[number][1]) if pair else None
        read.append(EncodedText(text, rows, reason, kind))
    return read


def sample_pieces(
    job: EncodeJob, task: tuple[int, list[TextBlock]]
) -> tuple[list[SampledPiece], int, Position]:
    """Pieces of training documents whose hash is below a limit, and the bytes looked through."""
    limit, group = task
    found, size = [], 0
    for block in group:
        for number, text in enumerate(texts_of(job.source, block)):
            size += len(text.encode())
            if job.held_out and text_hash(text) < job.held_out:
                continue
            text = SAID.get(job.source.name, str)(text)
            for index, start in enumerate(range(0, len(text), PIECE)):
                piece = text[start : start + PIECE]
                place = (block.after.file, block.start, number, index)
                if (key := text_hash(piece)) < limit:
                    found.append(SampledPiece(key, place, piece))
    return found, size, group[-1].after


def beginnings(
    characters: int, job: EncodeJob, group: list[TextBlock]
) -> tuple[list[str], int, Position]:
    """The first characters of training documents, and the bytes looked through."""
    found, size = [], 0
    for block in group:
        for text in texts_of(job.source, block):
            size += len(text.encode())
            if not (job.held_out and text_hash(text) < job.held_out):
                found.append(SAID.get(job.source.name, str)(text)[:characters])
    return found, size, group[-1].after


def text_hash(text: str) -> int:
    """64 random bits that are a function of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def chat_of_source(source: Any, tokenizer: Path) -> Chat:
    """How a source of conversations is read with the tokenizer of a folder."""
    return _chat(read_template(source.template), tuple(source.special.items()), tokenizer)


@lru_cache(maxsize=8)
def _chat(template: str, special: tuple[tuple[str, str], ...], tokenizer: Path) -> Chat:
    return make_chat(template, dict(special), _tokenizer(tokenizer))


@lru_cache(maxsize=1)
def _tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


def _packed(read: list[EncodedText], dtype: np.dtype) -> Encoded:
    documents = [document for one in read for document in one.documents]
    ids = np.concatenate([np.empty(0, dtype), *(one.astype(dtype) for one, _, _ in documents)])
    lengths = np.array([len(one) for one, _, _ in documents], np.int64)
    sizes = np.array([size for _, size, _ in documents], np.int64)
    weights = np.array([weight for _, _, weight in documents], np.float64)
    counts = Counter({"read": len(read)})
    counts.update(one.left_out for one in read if one.left_out)
    return Encoded(ids.tobytes(), lengths, sizes, weights, counts)


def _weighted(source: Any, block: TextBlock) -> Iterator[tuple[str, float]]:
    """The documents of a block, each with what it weighs; 0 without a number."""
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
