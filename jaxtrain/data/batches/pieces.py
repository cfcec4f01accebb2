"""Types of the planners: pieces of documents in rows, counts, and documents needed next."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxtrain.data.batches.order import BlockOrder


class Piece(NamedTuple):
    """Tokens start..stop of a document, after BOS if `bos`."""

    document: int
    bos: bool
    start: int
    stop: int


PlannedRow = list[Piece]


class Counts(NamedTuple):
    """Counts of packing: tokens used, dropped and padded, documents cropped and left out."""

    used: int = 0  # tokens in rows, BOS included
    dropped: int = 0  # tokens in no row
    padding: int = 0  # positions of rows without a token
    cropped: int = 0  # documents, or parts of them, that lost their end
    left_out: int = 0  # documents without a token in any row

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(self, other)))


class Ahead(NamedTuple):
    """Documents that a planner needs next, as ranges (first, last), in the order of need. They stay
    the same as long as `epoch_slot` does."""

    epoch_slot: tuple[int, int]  # epoch and slot
    documents: list[tuple[int, int]]


def blocks_ahead(
    order: BlockOrder, slot: int, slots: int, epoch: int, key: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Yield (epoch, block) for blocks with items in `slot` and the next `slots` slots, in order."""
    last = min(slot + slots, order.blocks - 1)
    yield from ((epoch, block) for block in order.needed(slot, *key, epoch))
    for later in range(slot + 1, last + 1):
        yield epoch, order.needed(later, *key, epoch)[-1]
    if slot + slots > last:
        yield from ((epoch + 1, block) for block in order.needed(0, *key, epoch + 1))
