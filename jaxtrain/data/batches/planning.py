"""Planning of training rows: the tokens of each row, decided from document lengths alone.

A row of T+1 tokens is a list of `Piece`s. Since no token is read to plan, every process plans the
same rows and then reads only its own: the stream depends on the seed and the row, not on workers.
Rows are planned in units of T tokens: one row, or `cut` rows of T/cut during the warm-up of the
sequence length. What has been seen of a corpus does not depend on how the units were cut.

All documents of an epoch are placed before the next epoch begins, in the same row if there is room.
At the end of any row, each document has been used as often as any other, or once less.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.batches.concat import Concat
from jaxtrain.data.batches.order import (
    GLOBAL,
    BlockOrder,
    ShuffleConfig,
    make_order,
    random_bits,
)
from jaxtrain.data.batches.pieces import Ahead, Counts, Piece, PlannedRow, blocks_ahead
from jaxtrain.data.batches.prefix_sums import PrefixSums
from jaxtrain.data.store.blocks import first_documents
from jaxtrain.data.store.store import TokenStore
from jaxtrain.settings import UserError

DRAWN_AT_ONCE = 1024  # document parts that are looked up in the corpus together
REFILL = 7 / 8  # of the buffer; refilling one by one is slow, and lone new documents fit less often
MOST_CUT = 0.75  # fraction of all tokens; above it the documents do not suit the packing
GOLDEN = (5**0.5 - 1) / 2  # any number of steps of this size around a circle is spread evenly


class Fragment(NamedTuple):
    """Tokens start..stop of a document, buffered for a row; the `lost` tokens after are cropped."""

    document: int
    start: int
    stop: int
    lost: int


def check_documents_fit(store: TokenStore, packing: str, length: int) -> None:
    """Raise UserError if a packing that crops documents would lose most of the text (MOST_CUT)."""
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


class BestFit:
    """Plans rows one after the other from a buffer of shuffled documents.

    While a row has room for more than two documents of mean size, the oldest of the buffer is
    placed, so that the order stays random. Then follows a document that fills the row exactly, or
    two that do so together; else the oldest, or the largest that fits. If none fits, the row is
    closed (`fill` off), or the shortest document fills it exactly. As in nanochat, its end is then
    lost; with `carry` it returns to the buffer. A document longer than a row is split into parts,
    or cropped, before it enters the buffer; nanochat instead keeps such documents until nothing
    else is left, and never uses the longest. A single free position gets a BOS alone.

    The buffer is one queue per size, and a bit set of the sizes that exist, as an integer: finding
    what fits is a few operations on T bits, whatever the buffer holds. The reversed bit set,
    shifted by the room, shares a bit with it where two sizes fill the row.
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
        shuffle: ShuffleConfig = GLOBAL,
    ):
        self.lengths, self.length, self.key = store.lengths, length, key
        self.fill, self.split, self.carry = fill, split, carry
        self.parts = PrefixSums(self.lengths, self._parts_of)
        self.weights, self.weighed = store.weights, np.empty(0)
        if self.weights is not None:  # cumulative weights of the documents
            self.weighed = np.cumsum(self.weights * self._parts_of(self.lengths))
        self.count = self.parts.total  # parts of an epoch
        self.groups = np.array([0, len(self.lengths)])  # first documents of groups read together
        if shuffle.name == "blocks":
            self.groups = first_documents(self.lengths)
        self.order = make_order(shuffle, self._edges())
        self.limit = None if max_epochs is None else int(max_epochs * self.count)
        self.buffer_size = min(buffer, self.count)
        self.low = self.buffer_size * REFILL  # documents at which the buffer is refilled
        self.cut = 1
        self.waiting: OrderedDict[int, Fragment] = OrderedDict()  # by number, the oldest first
        self.queues: dict[int, deque[int]] = {}  # fragment numbers by size (tokens with BOS)
        self.came = self.buffered_tokens = 0  # fragments ever added; tokens in the buffer
        self.sizes = self.reverse = 0  # bit n, and bit T+1 - n, are set if size n has a queue
        self.drawn = self.used = self.dropped = self.padding = self.cropped = self.left_out = 0
        self.whole = 0  # finished epochs
        self.began = self.before = Counts()  # at the start of this epoch, and of the one before
        self._next: deque[Fragment] = deque()  # fragments after `drawn`, looked up in advance

    def unit(self, cut: int = 1) -> list[PlannedRow] | None:
        """Return the next `cut` rows of at most T/cut + 1 tokens, or None after the last epoch."""
        if cut != self.cut:
            self.cut, before = cut, list(self.waiting.values())
            self._empty()
            self._put(before)
        capacity = self.length // cut + 1
        rows, rooms = zip(*(self._row(capacity) for _ in range(cut)))
        if not any(rows) or (self.fill and any(rooms)):  # the epochs ended before the unit was full
            self._take_back(rows, capacity)
            return None
        return list(rows)

    def get_state(self) -> dict[str, Any]:
        counts = {name: [*getattr(self, name)] for name in ("counts", "began", "before")}
        waiting = list(chain.from_iterable(self.waiting.values()))
        names = ("drawn", "whole", "cut")
        return {name: getattr(self, name) for name in names} | {"waiting": waiting} | counts

    def set_state(self, state: dict[str, Any]) -> None:
        self.drawn, self.whole, self.cut = state["drawn"], state["whole"], state["cut"]
        self.used, self.dropped, self.padding, self.cropped, self.left_out = state["counts"]
        self.began, self.before = Counts(*state["began"]), Counts(*state["before"])
        self._empty()
        self._next.clear()
        numbers = iter(state["waiting"])
        self._put(Fragment(*four) for four in zip(numbers, numbers, numbers, numbers))

    def epochs(self, state: dict[str, Any]) -> float:
        """Passes over the corpus up to a state, exact except for the ends in the buffer."""
        return max(state["drawn"] - len(state["waiting"]) // len(Fragment._fields), 0) / self.count

    @property
    def counts(self) -> Counts:
        """Packing counts up to now."""
        return Counts(self.used, self.dropped, self.padding, self.cropped, self.left_out)

    def _row(self, room: int) -> tuple[PlannedRow, int]:
        """Plan one row. Returns it, and the number of positions that stay free."""
        row: PlannedRow = []
        queues, waiting = self.queues, self.waiting
        while room:
            if len(waiting) <= self.low:
                self._refill()
            size = self._fitting(room)
            if size == 0 and self.fill and waiting:
                size = (self.sizes & -self.sizes).bit_length() - 1  # the smallest of all
                if room == 1:
                    document, start, _, _ = waiting[queues[size][0]]
                    row.append(Piece(document, True, start, start))
                    self.used, room = self.used + 1, 0
                    break
            if size == 0:
                break
            document, start, stop, lost = self._take(size)
            end = stop if size <= room else start + room - 1
            row.append(Piece(document, True, start, end))
            if end < stop and self.carry:
                self._put([Fragment(document, end, stop, lost)])
            elif lost or end < stop:
                self.dropped += lost + stop - end
                self.cropped += 1
            room -= 1 + end - start
            self.used += 1 + end - start
        self.padding += room
        if not waiting and self.drawn % self.count == 0:
            self._end_epoch()
        return row, room

    def _fitting(self, room: int) -> int:
        """Size of the fragment to place next in a row with `room` tokens left; 0 if none fits."""
        largest = (self.sizes & (2 << room) - 1).bit_length() - 1
        if largest < 0:
            return 0
        _, start, stop, _ = self.waiting[next(iter(self.waiting))]
        oldest = 1 + stop - start
        if oldest <= room and room * len(self.waiting) > 2 * self.buffered_tokens:
            return oldest
        top = self.length // self.cut + 1  # an empty row: a fragment that fills it must be oldest
        if largest == room and (oldest == room or room < top):
            return room
        pair = (self.sizes & self.reverse >> top - room).bit_length() - 1  # the larger of the two
        if pair > 0 and (2 * pair != room or len(self.queues[pair]) > 1):
            return pair
        return oldest if oldest <= room else largest

    def _take(self, size: int) -> Fragment:
        """Remove and return the oldest fragment of a size from the buffer."""
        queue = self.queues[size]
        fragment = self.waiting.pop(queue.popleft())
        self.buffered_tokens -= size
        if not queue:
            del self.queues[size]
            self.sizes ^= 1 << size
            self.reverse ^= 1 << self.length // self.cut + 1 - size
        return fragment

    def _refill(self) -> None:
        """Moves the next parts of the epoch's order into the buffer. Moves none while parts of a
        fully drawn epoch are still in the buffer, nor after the last epoch."""
        while len(self.waiting) < self.buffer_size:
            if not self._next:
                if self.drawn % self.count == 0:
                    if self.waiting:
                        return
                    self._end_epoch()
                self._look_up()
                if not self._next:
                    return
            count = min(self.buffer_size - len(self.waiting), len(self._next))
            self.drawn += count
            self._put([self._next.popleft() for _ in range(count)])

    def _end_epoch(self) -> None:
        """Counts an epoch once, when all of its documents are placed."""
        whole = self.drawn // self.count
        if whole > self.whole:
            if self.weights is not None:
                self.left_out += len(self.lengths) - self._drawn_in(whole - 1)
            self.whole, self.before, self.began = whole, self.began, self.counts

    def _take_back(self, rows: Iterable[PlannedRow], capacity: int) -> None:
        """Counts rows that are not returned: the epochs ended before the unit was full."""
        pieces = list(chain.from_iterable(rows))
        placed = sum(1 + piece.stop - piece.start for piece in pieces)
        self.used, self.dropped = self.used - placed, self.dropped + placed
        self.padding -= capacity * self.cut - placed
        self.left_out += sum(piece.start == 0 for piece in pieces)
        if self.drawn % self.count == 0:
            self.began = self.counts

    def _look_up(self) -> None:
        epoch, first = divmod(self.drawn, self.count)
        last = min(first + DRAWN_AT_ONCE, self.count)
        if self.limit is not None:
            last = min(last, first + self.limit - self.drawn)
        parts = self.order.take(first, last, *self.key, epoch)
        if self.weights is not None:
            parts = self._weighted(parts, self.weights, epoch)
        documents, firsts = self.parts.find(parts)
        lengths = self.lengths[documents].astype(np.int64)
        starts = (parts - firsts) * self.length
        stops = np.minimum(lengths, starts + self.length)
        lost = np.zeros_like(stops) if self.split else lengths - stops
        columns = (column.tolist() for column in (documents, starts, stops, lost))
        self._next.extend(map(Fragment, *columns))

    def _edges(self) -> np.ndarray:
        """int64: the first part of each group, then the number of parts."""
        if self.weights is None:
            return self.parts.before(self.groups)
        places = np.concatenate([[0], self.weighed])[self.groups] / self.weighed[-1]
        return np.rint(places * self.count).astype(np.int64)

    def ahead(self, slots: int) -> Ahead:
        """Documents that are needed now and in the next `slots` slots of the order."""
        if not isinstance(self.order, BlockOrder):
            return Ahead((0, 0), [(0, len(self.lengths))])
        epoch, index = divmod(self.drawn, self.count)
        slot = self.order.slot(index, *self.key, epoch)
        blocks = blocks_ahead(self.order, slot, slots, epoch, self.key)
        groups = self.groups.tolist()
        return Ahead((epoch, slot), [(groups[b], groups[b + 1]) for _, b in blocks])

    def _weighted(self, numbers: np.ndarray, weights: np.ndarray, epoch: int) -> np.ndarray:
        """Parts at evenly spaced positions along the cumulative weights (systematic sampling).

        An epoch has each part count x weight / total times, rounded up or down, in the order of
        `numbers`. The offset of the positions moves on by a golden section in each epoch, so that
        the roundings of many epochs even out.
        """
        places, documents = self._places(numbers, epoch)
        firsts = self.parts.before(documents)
        within = places - np.where(documents > 0, self.weighed[documents - 1], 0.0)
        index = (within / weights[documents]).astype(np.int64)
        return firsts + np.clip(index, 0, self._parts_of(self.lengths[documents]) - 1)

    def _parts_of(self, lengths: np.ndarray) -> np.ndarray:
        """int64: number of parts of documents with these lengths."""
        if not self.split:
            return np.ones(lengths.shape, np.int64)
        return np.maximum(-(-lengths.astype(np.int64) // self.length), 1)

    def _places(self, numbers: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of an epoch's draws along the cumulative weights, and the documents there."""
        offset = (random_bits(*self.key, 0, 1) / 2**32 + epoch * GOLDEN) % 1
        total = self.weighed[-1]
        places = np.minimum((numbers + offset) / self.count * total, np.nextafter(total, 0))
        return places, np.searchsorted(self.weighed, places, side="right")

    def _drawn_in(self, epoch: int) -> int:
        """Number of documents that an epoch has drawn at least once."""
        _, documents = self._places(np.arange(self.count), epoch)
        return 1 + int(np.count_nonzero(np.diff(documents)))

    def _put(self, fragments: Iterable[Fragment]) -> None:
        limit = self.length // self.cut
        for document, start, stop, lost in fragments:
            if not self.split and stop - start > limit:
                stop, lost = start + limit, lost + stop - start - limit
            while True:
                end = min(stop, start + limit)
                size = 1 + end - start
                queue = self.queues.get(size)
                if queue is None:
                    queue = self.queues[size] = deque()
                    self.sizes |= 1 << size
                    self.reverse |= 1 << limit + 1 - size
                queue.append(self.came)
                self.waiting[self.came] = Fragment(document, start, end, lost)
                self.came, self.buffered_tokens = self.came + 1, self.buffered_tokens + size
                start = end
                if end == stop:
                    break

    def _empty(self) -> None:
        self.queues, self.sizes, self.reverse, self.buffered_tokens = {}, 0, 0, 0
        self.waiting.clear()


Planner = Concat | BestFit
