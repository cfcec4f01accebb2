"""Which tokens make up each training row, decided from document lengths alone.

A row of T+1 tokens is a list of `Piece`s. Since no token is read to plan, every process plans the
same rows and then reads only its own: the stream depends on the seed and the row, not on workers.
"""

import bisect
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from grain.experimental import index_shuffle
from pydantic import Field

from jaxtrain.data.store import TokenStore
from jaxtrain.settings import Settings, UserError

LISTED = 1 << 16  # below, a list is faster than grain's cipher, which slows down as 1 / count
PART_BITS = 40
PART_MASK = (1 << PART_BITS) - 1
MOST_CUT = 0.75  # of all tokens; more means that the documents do not suit the packing


class ConcatConfig(Settings):
    """All documents as one stream, cut into rows that may start inside a document."""

    name: Literal["concat"] = "concat"


class BestFitConfig(Settings):
    """Every row starts with BOS and is full: best fit, then the shortest document is cropped."""

    name: Literal["best_fit"] = "best_fit"
    buffer: int = Field(default=1000, gt=0, description="Documents to choose the best fit from")
    long_documents: Literal["split", "crop"] = Field(
        default="split",
        description="A document longer than a row becomes several, or loses its end",
    )


class PaddedConfig(Settings):
    """Best fit of whole documents, cropped to a row; what stays free is padding of weight 0."""

    name: Literal["padded"] = "padded"
    buffer: int = Field(default=1000, gt=0, description="Documents to choose the best fit from")


PackingConfig = Annotated[ConcatConfig | BestFitConfig | PaddedConfig, Field(discriminator="name")]


class Piece(NamedTuple):
    """Tokens start..stop of a document, after BOS if `bos`."""

    document: int
    bos: bool
    start: int
    stop: int


class Batch(NamedTuple):
    """One process's part of a batch, as numpy arrays [B, T]; no weight: no label at that place."""

    tokens_BT: np.ndarray  # int32
    targets_BT: np.ndarray  # int32, the token that follows
    weights_BT: np.ndarray  # float32, 1 for a target that counts, else 0
    segments_BT: np.ndarray | None  # int32, documents of the row from 1; 0 is padding
    positions_BT: np.ndarray | None  # int32, from 0 in every segment


@lru_cache(maxsize=64)
def draw(*key: int) -> int:
    """32 random bits that are a function of `key`."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def permute(index: int, count: int, *key: int) -> int:
    """Element `index` of a permutation of range(count) that is a function of `key`."""
    if count <= LISTED:
        return _permutation(count, *key)[index]
    return index_shuffle(index, count - 1, draw(*key), 4)


@lru_cache(maxsize=4)
def _permutation(count: int, *key: int) -> list[int]:
    return np.argsort(np.random.SeedSequence(key).generate_state(count, np.uint64)).tolist()


class Stream:
    """All documents in stored order, each after its BOS, as one circular sequence of tokens."""

    def __init__(self, store: TokenStore):
        self.ends = np.cumsum(store.lengths.astype(np.int64) + 1)
        self.size = int(self.ends[-1])

    def window(self, start: int, count: int) -> list[Piece]:
        """The pieces of tokens start..start+count, going on at the beginning after the end."""
        start %= self.size
        document = int(np.searchsorted(self.ends, start, side="right"))
        pieces = []
        while count:
            begin = int(self.ends[document - 1]) if document else 0
            stop = min(start + count, int(self.ends[document]))
            first = start - begin  # 0 is the BOS
            pieces.append(Piece(document, first == 0, max(first - 1, 0), stop - begin - 1))
            count -= stop - start
            document = (document + 1) % len(self.ends)
            start = stop if document else 0
        return pieces


class Concat:
    """Row r, for any r: a window of the stream, in an order of its own in every epoch.

    The windows of an epoch overlap by the one token that is only a target; they start at an offset
    drawn for the epoch, so that documents are cut at other places each time.
    """

    def __init__(self, store: TokenStore, config: ConcatConfig, length: int, seed: int):
        self.stream, self.length, self.seed = Stream(store), length, seed
        self.rows_per_epoch = max(1, self.stream.size // length)

    def row(self, index: int) -> list[Piece]:
        epoch, index = divmod(index, self.rows_per_epoch)
        offset = self.stream.size * draw(self.seed, epoch, 1) >> 32
        window = permute(index, self.rows_per_epoch, self.seed, epoch)
        return self.stream.window(offset + window * self.length, self.length + 1)


class BestFit:
    """Plans rows one after the other by best fit over a buffer of shuffled documents.

    The largest that fits is placed again and again. When none fits, the row is closed (`fill`
    off), or the shortest fills it exactly and loses its end, as in nanochat. Unlike there, a
    document longer than a row is split into parts, or cropped, before it enters the buffer:
    nanochat keeps such documents until nothing else is left, and never uses the longest.
    """

    def __init__(
        self, store: TokenStore, buffer: int, length: int, seed: int, *, fill: bool, split: bool
    ):
        self.lengths, self.capacity, self.seed, self.fill = store.lengths, length + 1, seed, fill
        parts = (
            -(-store.lengths.astype(np.int64) // length) if split else np.ones_like(store.lengths)
        )
        self.ends = np.cumsum(np.maximum(parts, 1), dtype=np.int64)  # parts up to each document
        self.buffer_size = min(buffer, int(self.ends[-1]))
        self.buffer: list[int] = []  # sorted keys: tokens with BOS << PART_BITS | part
        self.drawn = self.used = self.dropped = 0

    def next_row(self) -> list[Piece]:
        room, row = self.capacity, []
        while room:
            while len(self.buffer) < self.buffer_size:
                bisect.insort(self.buffer, self._draw())
            at = bisect.bisect_left(self.buffer, (room + 1) << PART_BITS) - 1
            if at < 0 and not self.fill:
                break
            key = self.buffer.pop(max(at, 0))
            piece, rest = self._piece(key & PART_MASK, room)
            row.append(piece)
            size = 1 + piece.stop - piece.start
            room -= size
            self.used += size
            self.dropped += rest
        return row

    def get_state(self) -> dict[str, Any]:
        waiting = [key & PART_MASK for key in self.buffer]
        return {"drawn": self.drawn, "used": self.used, "dropped": self.dropped, "waiting": waiting}

    def set_state(self, state: dict[str, Any]) -> None:
        self.drawn, self.used, self.dropped = state["drawn"], state["used"], state["dropped"]
        self.buffer = sorted(map(self._key, state["waiting"]))

    def _draw(self) -> int:
        count = int(self.ends[-1])
        epoch, index = divmod(self.drawn, count)
        self.drawn += 1
        return self._key(permute(index, count, self.seed, epoch))

    def _key(self, part: int) -> int:
        piece, _ = self._piece(part, self.capacity)
        return (1 + piece.stop - piece.start) << PART_BITS | part

    def _piece(self, part: int, room: int) -> tuple[Piece, int]:
        """The first `room` tokens of a part, BOS included, and how many are dropped for that."""
        document = int(np.searchsorted(self.ends, part, side="right"))
        last = part + 1 == self.ends[document]
        index = part - (int(self.ends[document - 1]) if document else 0)
        start = index * (self.capacity - 1)
        end = int(self.lengths[document]) if last else start + self.capacity - 1
        stop = min(end, start + room - 1)
        return Piece(document, True, start, stop), end - stop


def best_fit(store: TokenStore, config: BestFitConfig, length: int, seed: int) -> BestFit:
    split = config.long_documents == "split"
    if not split:
        _check_documents_fit(store, "best_fit, long_documents crop,", length)
    return BestFit(store, config.buffer, length, seed, fill=True, split=split)


def padded(store: TokenStore, config: PaddedConfig, length: int, seed: int) -> BestFit:
    _check_documents_fit(store, "padded", length)
    return BestFit(store, config.buffer, length, seed, fill=False, split=False)


# One row a packing: (store, its config, T, seed) -> what plans the rows.
PACKINGS: dict[str, Callable[[TokenStore, Any, int, int], Concat | BestFit]] = {
    "concat": Concat,
    "best_fit": best_fit,
    "padded": padded,
}


def assemble(store: TokenStore, rows: list[list[Piece]], length: int, *, segments: bool) -> Batch:
    """Reads the tokens of planned rows of at most T+1 tokens and lays them out as [B, T] arrays."""
    shape = (len(rows), length + 1)
    ids = np.full(shape, store.bos_id, np.int32)
    begins = np.zeros(shape, bool)  # the first token of each piece
    filled = np.zeros((len(rows), 1), np.int64)
    for index, row in enumerate(rows):
        at = 0
        for document, bos, start, stop in row:
            begins[index, at] = True
            at += bos  # ids has BOS already
            ids[index, at : at + stop - start] = store.read(document, start, stop)
            at += stop - start
        filled[index] = at
    place = np.arange(length, dtype=np.int32)
    weights = (place + 1 < filled).astype(np.float32)
    tokens_BT, targets_BT = ids[:, :-1].copy(), ids[:, 1:].copy()
    if not segments:
        return Batch(tokens_BT, targets_BT, weights, None, None)
    starts = begins[:, :-1]
    real = place < filled
    position = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    segment = np.where(real, np.cumsum(starts, axis=1, dtype=np.int32), 0)
    return Batch(tokens_BT, targets_BT, weights, segment, np.where(real, position, 0))


def _check_documents_fit(store: TokenStore, packing: str, length: int) -> None:
    cut = float(np.maximum(store.lengths.astype(np.int64) - length, 0).sum()) / store.tokens
    if cut > MOST_CUT:
        raise UserError(
            f"data.packing {packing} would drop {cut:.0%} of the tokens, because the documents are "
            f"longer than sequence_length {length}; use concat, or cut the text into paragraphs"
        )
