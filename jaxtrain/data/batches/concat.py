"""Concat packing: rows are windows of one stream of all documents, and may start inside one."""

from typing import Any

import numpy as np

from jaxtrain.data.batches.order import (
    GLOBAL,
    BlockOrder,
    Order,
    ShuffleConfig,
    make_order,
    random_bits,
)
from jaxtrain.data.batches.pieces import Ahead, Counts, Piece, PlannedRow, blocks_ahead
from jaxtrain.data.batches.prefix_sums import PrefixSums
from jaxtrain.data.store.blocks import BLOCK_TOKENS
from jaxtrain.data.store.store import TokenStore


def lengths_with_bos(lengths: np.ndarray) -> np.ndarray:
    """int64: lengths of documents, each with one more token for its BOS."""
    return lengths.astype(np.int64) + 1


class TokenStream:
    """All documents in stored order, each after its BOS, as one circular sequence of tokens."""

    def __init__(self, store: TokenStore):
        self.lengths = store.lengths
        self.tokens = PrefixSums(store.lengths, lengths_with_bos)
        self.size = self.tokens.total

    def window(self, start: int, count: int) -> PlannedRow:
        """Pieces that cover tokens start..start+count of the stream, which wraps around."""
        start %= self.size
        (document,), (begin,) = (x.tolist() for x in self.tokens.find(np.array([start])))
        pieces = []
        while count:
            end = begin + 1 + int(self.lengths[document])
            stop = min(start + count, end)
            first = start - begin  # 0 is the BOS
            pieces.append(Piece(document, first == 0, max(first - 1, 0), stop - begin - 1))
            count -= stop - start
            document = (document + 1) % len(self.lengths)
            start = begin = end if document else 0
        return pieces


class Concat:
    """Plans units of T tokens: windows of the token stream, shuffled anew in every epoch.

    The tape of an epoch is a BOS, then the whole circular stream from an offset drawn for the
    epoch, so that documents are cut at different positions each time. The tapes of all epochs, end
    to end, are cut into windows of T + 1 tokens that overlap by one, which is only a target. The
    windows inside an epoch are shuffled; the window across its end keeps its position.
    """

    def __init__(
        self,
        store: TokenStore,
        length: int,
        *key: int,
        max_epochs: float | None = None,
        shuffle: ShuffleConfig = GLOBAL,
    ):
        self.stream, self.length, self.key, self.drawn = TokenStream(store), length, key, 0
        self.tape, self.shuffle = self.stream.size + 1, shuffle
        self.orders: dict[int, Order] = {}  # by the windows of an epoch, one of two counts
        self.allowed = None if max_epochs is None else int(max_epochs * self.tape)

    def unit(self, cut: int = 1) -> list[PlannedRow] | None:
        """Return the next `cut` rows of T/cut + 1 tokens, or None after the last epoch."""
        if self._over():
            return None
        start, part = self._start(self.drawn), self.length // cut
        self.drawn += 1
        return [self._window(start + i * part, part + 1) for i in range(cut)]

    def get_state(self) -> dict[str, Any]:
        used = self.drawn * self.length
        left = self.allowed - used if self.allowed is not None and self._over() else 0
        ends = used // self.tape * self.tape, max(used // self.tape - 1, 0) * self.tape
        counts = {"counts": Counts(used, left), "began": Counts(ends[0]), "before": Counts(ends[1])}
        state = {"drawn": self.drawn, "whole": used // self.tape}
        return state | {name: [*count] for name, count in counts.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]

    def epochs(self, state: dict[str, Any]) -> float:
        """Passes over the corpus up to a state."""
        return state["drawn"] * self.length / self.tape

    def _over(self) -> bool:
        return self.allowed is not None and (self.drawn + 1) * self.length > self.allowed

    def _start(self, unit: int) -> int:
        """Position on the tapes, in tokens, where the window of unit `unit` starts."""
        epoch, first, count = self._epoch(unit)
        if unit < first + count:
            at = unit - first
            unit = first + int(self._order(count).take(at, at + 1, *self.key, epoch)[0])
        return unit * self.length

    def _epoch(self, unit: int) -> tuple[int, int, int]:
        """Epoch that a unit begins in, the first window inside it, and its number of windows."""
        epoch = unit * self.length // self.tape
        first = -(-epoch * self.tape // self.length)
        return epoch, first, (epoch + 1) * self.tape // self.length - first

    def _order(self, count: int) -> Order:
        if count not in self.orders:
            size = max(1, BLOCK_TOKENS // self.length)
            self.orders[count] = make_order(
                self.shuffle, np.append(np.arange(0, count, size), count)
            )
        return self.orders[count]

    def ahead(self, slots: int) -> Ahead:
        """Documents that are needed now and in the next `slots` slots of the order."""
        epoch, first, count = self._epoch(self.drawn)
        order, index = self._order(count), min(self.drawn - first, count - 1)
        if not isinstance(order, BlockOrder):
            return Ahead((0, 0), [(0, len(self.stream.lengths))])
        slot = order.slot(max(index, 0), *self.key, epoch)
        found = []
        for of_epoch, block in blocks_ahead(order, slot, slots, epoch, self.key):
            begin, end = order.edges[block : block + 2].tolist()
            offset = self.stream.size * random_bits(*self.key, of_epoch, 1) >> 32
            start = (first + begin) * self.length - epoch * self.tape + offset
            found += self._documents(start, (end - begin) * self.length + 1)
        return Ahead((epoch, slot), found)

    def _documents(self, start: int, count: int) -> list[tuple[int, int]]:
        """Ranges of the documents that hold tokens start..start+count of the circular stream."""
        start %= self.stream.size
        last = (start + count - 1) % self.stream.size
        low, high = self.stream.tokens.find(np.array([start, last]))[0].tolist()
        if start <= last:
            return [(low, high + 1)]
        return [(low, len(self.stream.lengths)), (0, high + 1)]

    def _window(self, start: int, count: int) -> PlannedRow:
        """Pieces that cover positions start..start+count of the tapes."""
        row: PlannedRow = []
        while count:
            epoch, at = divmod(start, self.tape)
            taken = min(count, self.tape - at)
            start, count = start + taken, count - taken
            offset = self.stream.size * random_bits(*self.key, epoch, 1) >> 32
            if at:
                row += self.stream.window(offset + at - 1, taken)
                continue
            first, *rest = self.stream.window(offset, max(taken - 1, 1))
            if taken == 1 or first.bos:
                row.append(Piece(first.document, True, first.start, first.start))
            if taken > 1:
                row += [first._replace(bos=True), *rest]
        return row
