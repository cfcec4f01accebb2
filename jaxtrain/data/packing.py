"""Which tokens make up each training row, decided from document lengths alone.

A row of T+1 tokens is a list of `Piece`s. Since no token is read to plan, every process plans the
same rows and then reads only its own: the stream depends on the seed and the row, not on workers.
Rows are planned in units of T tokens: one row, or `cut` rows of T/cut while the sequence length of
a run warms up; what has been seen of a corpus does not depend on how the units were cut.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from grain.experimental import index_shuffle
from pydantic import Field

from jaxtrain.data import augment
from jaxtrain.data.encode import without_marks
from jaxtrain.data.store import TokenStore
from jaxtrain.settings import Settings, UserError

LISTED = 1 << 16  # below, a list is faster than grain's cipher, which slows down as 1 / count
DRAWN_AT_ONCE = 1024  # parts whose place in the corpus is looked up together
MOST_CUT = 0.75  # of all tokens; more means that the documents do not suit the packing
BUFFER = "Documents to choose the best fit from"


class ConcatConfig(Settings):
    """All documents as one stream, cut into rows that may start inside a document."""

    name: Literal["concat"] = "concat"


class BestFitConfig(Settings):
    """Every row starts with BOS and is full: best fit, then the shortest document is cropped."""

    name: Literal["best_fit"] = "best_fit"
    buffer: int = Field(default=1000, gt=0, description=BUFFER)
    long_documents: Literal["split", "crop"] = Field(
        default="split",
        description="A document longer than a row becomes several, or loses its end",
    )
    carry_tails: bool = Field(
        default=False,
        description="What is cropped waits, after a BOS of its own, for a later row; else it is "
        "lost for this epoch",
    )


class PaddedConfig(Settings):
    """Best fit of whole documents, cropped to a row; what stays free is padding of weight 0."""

    name: Literal["padded"] = "padded"
    buffer: int = Field(default=1000, gt=0, description=BUFFER)


PackingConfig = Annotated[ConcatConfig | BestFitConfig | PaddedConfig, Field(discriminator="name")]


class Piece(NamedTuple):
    """Tokens start..stop of a document, after BOS if `bos`."""

    document: int
    bos: bool
    start: int
    stop: int


class Fragment(NamedTuple):
    """Tokens start..stop of a document that wait for a row; `lost` of them were left out before."""

    document: int
    start: int
    stop: int
    lost: int


Row = list[Piece]


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
        return int(_permutation(count, *key)[index])
    return index_shuffle(index, count - 1, draw(*key), 4)


@lru_cache(maxsize=16)
def _permutation(count: int, *key: int) -> np.ndarray:
    return np.argsort(np.random.SeedSequence(key).generate_state(count, np.uint64))


class Stream:
    """All documents in stored order, each after its BOS, as one circular sequence of tokens."""

    def __init__(self, store: TokenStore):
        self.ends = np.cumsum(store.lengths.astype(np.int64) + 1)
        self.size = int(self.ends[-1])

    def window(self, start: int, count: int) -> Row:
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
    """Unit u, for any u: a window of the stream, in an order of its own in every epoch.

    The windows of an epoch overlap by the one token that is only a target; they start at an offset
    drawn for the epoch, so that documents are cut at other places each time.
    """

    def __init__(
        self,
        store: TokenStore,
        config: ConcatConfig,
        length: int,
        *key: int,
        max_epochs: float | None = None,
    ):
        self.stream, self.length, self.key, self.drawn = Stream(store), length, key, 0
        self.count = max(1, self.stream.size // length)  # units of an epoch
        self.limit = None if max_epochs is None else int(max_epochs * self.count)

    def unit(self, cut: int = 1) -> list[Row] | None:
        """`cut` rows of T/cut + 1 tokens; None when the last epoch is over."""
        if self.drawn == self.limit:
            return None
        epoch, index = divmod(self.drawn, self.count)
        self.drawn += 1
        offset = self.stream.size * draw(*self.key, epoch, 1) >> 32
        start = offset + permute(index, self.count, *self.key, epoch) * self.length
        part = self.length // cut
        return [self.stream.window(start + i * part, part + 1) for i in range(cut)]

    def get_state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "used": self.drawn * self.length, "dropped": 0, "padding": 0}

    def set_state(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class BestFit:
    """Plans rows one after the other by best fit over a buffer of shuffled documents.

    The largest that fits is placed again and again. When none fits, the row is closed (`fill`
    off), or the shortest fills it exactly and loses its end, as in nanochat; or the end goes back
    to the buffer (`carry`). Unlike there, a document longer than a row is split into parts, or
    cropped, before it enters the buffer: nanochat keeps such documents until nothing else is left,
    and never uses the longest.

    The buffer is a queue for each size and a set of the sizes there are, as the bits of an integer:
    finding the best fit is two operations on T bits, whatever the buffer holds.
    """

    def __init__(
        self,
        store: TokenStore,
        buffer: int,
        length: int,
        *key: int,
        fill: bool,
        split: bool,
        carry: bool = False,
        max_epochs: float | None = None,
    ):
        self.lengths, self.length, self.key = store.lengths, length, key
        self.fill, self.split, self.carry = fill, split, carry
        parts = -(-self.lengths.astype(np.int64) // length) if split else np.ones_like(self.lengths)
        parts = np.maximum(parts, 1)
        self.ends = np.cumsum(parts, dtype=np.int64)  # parts up to each document
        self.weights, self.weighed = store.weights, np.empty(0)
        if self.weights is not None:
            self.weighed = np.cumsum(self.weights * parts)  # what they weigh together
        self.count = int(self.ends[-1])  # parts of an epoch
        self.limit = None if max_epochs is None else int(max_epochs * self.count)
        self.buffer_size = min(buffer, self.count)
        self.cut = 1
        self.queues: dict[int, deque[Fragment]] = {}  # by size, which is tokens with BOS
        self.sizes = self.waiting = 0  # sizes that have a queue, as bits; fragments in all queues
        self.drawn = self.used = self.dropped = self.padding = 0
        self._next: deque[Fragment] = deque()  # what `drawn` counts up to, looked up ahead

    def unit(self, cut: int = 1) -> list[Row] | None:
        """`cut` rows of at most T/cut + 1 tokens; None when the last epoch is over."""
        if cut != self.cut:
            self.cut, before = cut, self._fragments()
            self._empty()
            self._put(before)
        capacity = self.length // cut + 1
        rows, rooms = zip(*(self._row(capacity) for _ in range(cut)))
        if any(rooms) if self.fill else [] in rows:  # the epochs ended before the unit was full
            placed = capacity * cut - sum(rooms)
            self.used, self.dropped = self.used - placed, self.dropped + placed
            return None
        self.padding += sum(rooms)
        return list(rows)

    def get_state(self) -> dict[str, Any]:
        waiting = list(chain.from_iterable(self._fragments()))
        names = ("drawn", "used", "dropped", "padding", "cut")
        return {name: getattr(self, name) for name in names} | {"waiting": waiting}

    def set_state(self, state: dict[str, Any]) -> None:
        self.drawn, self.used, self.dropped = state["drawn"], state["used"], state["dropped"]
        self.padding, self.cut = state["padding"], state["cut"]
        self._empty()
        self._next.clear()
        numbers = iter(state["waiting"])
        self._put(Fragment(*four) for four in zip(numbers, numbers, numbers, numbers))

    def _row(self, room: int) -> tuple[Row, int]:
        """A row, and how many tokens of room it has left."""
        row: Row = []
        queues = self.queues
        while room:
            while self.waiting < self.buffer_size and self._draw():
                pass
            size = (self.sizes & (2 << room) - 1).bit_length() - 1  # the largest that fits
            if size < 0 and self.fill:
                size = (self.sizes & -self.sizes).bit_length() - 1  # the smallest of all
            if size < 0:
                break
            queue = queues[size]
            document, start, stop, lost = queue.popleft()
            self.waiting -= 1
            if not queue:
                del queues[size]
                self.sizes ^= 1 << size
            end = stop if size <= room else start + room - 1
            row.append(Piece(document, True, start, end))
            if end < stop and self.carry:
                self._put([Fragment(document, end, stop, lost)])
            else:
                self.dropped += lost + stop - end
            room -= 1 + end - start
            self.used += 1 + end - start
        return row, room

    def _draw(self) -> bool:
        """Moves the next part of the epoch's order into the buffer; False after the last epoch."""
        if not self._next:
            self._look_up()
        if not self._next:
            return False
        self.drawn += 1
        self._put([self._next.popleft()])
        return True

    def _look_up(self) -> None:
        epoch, first = divmod(self.drawn, self.count)
        last = min(first + DRAWN_AT_ONCE, self.count)
        if self.limit is not None:
            last = min(last, first + self.limit - self.drawn)
        key = (*self.key, epoch)
        if self.count <= LISTED:
            parts = _permutation(self.count, *key)[first:last]
        else:
            shuffled = [permute(i, self.count, *key) for i in range(first, last)]
            parts = np.array(shuffled, np.int64)
        if self.weights is not None:
            parts = self._weighted(parts, self.weights, epoch)
        documents = np.searchsorted(self.ends, parts, side="right")
        lengths = self.lengths[documents].astype(np.int64)
        firsts = np.where(documents > 0, self.ends[documents - 1], 0)
        starts = (parts - firsts) * self.length
        stops = np.minimum(lengths, starts + self.length)
        lost = np.zeros_like(stops) if self.split else lengths - stops
        columns = (column.tolist() for column in (documents, starts, stops, lost))
        self._next.extend(map(Fragment, *columns))

    def _weighted(self, numbers: np.ndarray, weights: np.ndarray, epoch: int) -> np.ndarray:
        """The parts that stand at places as far from each other along the weights.

        An epoch has each part count x weight / total times, rounded up or down (systematic
        sampling), all of them in the order of the `numbers`.
        """
        offset = draw(*self.key, epoch, 1) / 2**32
        total = self.weighed[-1]
        places = np.minimum((numbers + offset) / self.count * total, np.nextafter(total, 0))
        documents = np.searchsorted(self.weighed, places, side="right")
        firsts = np.where(documents > 0, self.ends[documents - 1], 0)
        within = places - np.where(documents > 0, self.weighed[documents - 1], 0.0)
        index = (within / weights[documents]).astype(np.int64)
        return firsts + np.clip(index, 0, self.ends[documents] - firsts - 1)

    def _put(self, fragments: Iterable[Fragment]) -> None:
        limit = self.length // self.cut
        for document, start, stop, lost in fragments:
            if not self.split and stop - start > limit:
                stop, lost = start + limit, lost + stop - start - limit
            while True:
                end = min(stop, start + limit)
                size = 1 + end - start
                if size not in self.queues:
                    self.queues[size] = deque()
                    self.sizes |= 1 << size
                self.queues[size].append(Fragment(document, start, end, lost))
                self.waiting += 1
                start = end
                if end == stop:
                    break

    def _fragments(self) -> list[Fragment]:
        return [fragment for size in sorted(self.queues) for fragment in self.queues[size]]

    def _empty(self) -> None:
        self.queues, self.sizes, self.waiting = {}, 0, 0


Planner = Concat | BestFit


def best_fit(
    store: TokenStore,
    config: BestFitConfig,
    length: int,
    *key: int,
    max_epochs: float | None = None,
) -> BestFit:
    split = config.long_documents == "split"
    if not split:
        _check_documents_fit(store, "best_fit, long_documents crop,", length)
    options = {"fill": True, "split": split, "carry": config.carry_tails}
    return BestFit(store, config.buffer, length, *key, **options, max_epochs=max_epochs)


def padded(
    store: TokenStore,
    config: PaddedConfig,
    length: int,
    *key: int,
    max_epochs: float | None = None,
) -> BestFit:
    _check_documents_fit(store, "padded", length)
    options = {"fill": False, "split": False}
    return BestFit(store, config.buffer, length, *key, **options, max_epochs=max_epochs)


# One row a packing: (store, its config, T, *seeds, max_epochs=) -> what plans the rows.
PACKINGS: dict[str, Callable[..., Planner]] = {
    "concat": Concat,
    "best_fit": best_fit,
    "padded": padded,
}


def assemble(
    rows: list[tuple[TokenStore, Row]],
    length: int,
    *,
    segments: bool,
    workers: int = 1,
    mapped: Callable[..., Iterable[None]] = map,
    change: Callable[[int, augment.Row], None] | None = None,
) -> Batch:
    """Reads the tokens of planned rows of at most T+1 tokens and lays them out as [B, T] arrays.

    The rows are shared by `workers` calls of a function that is `mapped` over them. `change`, if
    there is one, is called with each row and its number.
    """
    shape = (len(rows), length)
    tokens_BT, targets_BT = np.empty(shape, np.int32), np.empty(shape, np.int32)
    weights_BT = np.zeros(shape, np.float32)
    segments_BT = positions_BT = None
    if segments:
        segments_BT, positions_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    place = np.arange(length, dtype=np.int32)

    def lay_all(indices: Sequence[int]) -> None:
        stores = {id(rows[index][0]): rows[index][0] for index in indices}
        parts: dict[int, list[tuple[int, int, int]]] = {key: [] for key in stores}
        for index in indices:
            parts[id(rows[index][0])] += [(p.document, p.start, p.stop) for p in rows[index][1]]
        read = {key: store.read_many(parts[key]) for key, store in stores.items()}
        for index in indices:
            lay(index, read[id(rows[index][0])])

    def lay(index: int, read: Iterator[np.ndarray]) -> None:
        (store, row), at = rows[index], 0
        ids, pieces = np.full(length + 1, store.bos_id, np.int32), []
        learned = np.zeros(length + 1, np.float32)
        for number, (_, bos, start, stop) in enumerate(row, 1):
            first, at = at, at + bos + stop - start
            tokens = next(read)
            if store.marked:
                tokens, learned[first + bos : at] = without_marks(tokens)
            ids[first + bos : at] = tokens
            pieces.append((first + bos, at))
            if segments_BT is not None and positions_BT is not None:
                segments_BT[index, first:at] = number
                positions_BT[index, first:at] = place[: min(at, length) - first]
        if not store.marked:
            learned[1:at] = 1
        tokens_BT[index], weights_BT[index] = ids[:-1], learned[1:]
        if change is not None:
            change(index, augment.Row(ids, weights_BT[index], pieces, tokens_BT[index]))
        targets_BT[index] = ids[1:]

    shares = [range(len(rows))[start::workers] for start in range(min(workers, len(rows)))]
    deque(mapped(lay_all, shares), 0)
    return Batch(tokens_BT, targets_BT, weights_BT, segments_BT, positions_BT)


def _check_documents_fit(store: TokenStore, packing: str, length: int) -> None:
    cut = float(np.maximum(store.lengths.astype(np.int64) - length, 0).sum()) / store.tokens
    if cut > MOST_CUT:
        if store.marked:
            raise UserError(
                f"train.sequence_length {length} would cut {cut:.0%} of the tokens off the "
                f"conversations: half of them are longer than {int(np.median(store.lengths))}"
            )
        raise UserError(
            f"data.packing {packing} would drop {cut:.0%} of the tokens, because the documents are "
            f"longer than sequence_length {length}; use concat, or cut the text into paragraphs"
        )
