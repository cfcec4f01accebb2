"""Shuffle order of an epoch: the item of a corpus at each position, as a function of a key.

An item is a document, a part of one, or a window of the stream. `global` permutes all items.
`blocks` is for stores larger than a host's local cache: the consecutive items of a block are spread
over `window` slots, one slot per block. At any time the items of `window` blocks from anywhere in
the corpus are mixed, and the blocks are needed one after another.
"""

from collections import OrderedDict
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import numpy as np
from grain.experimental import index_shuffle
from pydantic import Field

from jaxtrain.settings import Settings

LISTED = 1 << 16  # up to here an array is faster than grain's cipher, which slows as 1 / count
BLOCKS, ITEMS, SLOT = 0x424C4B00, 0x424C4B01, 0x424C4B02  # seed words of the draws of `blocks`
SLOTS = 4  # slots of an order that are kept in memory


class GlobalShuffle(Settings):
    """A new permutation of all documents in each epoch: any document may follow any other."""

    name: Literal["global"] = "global"


class BlockShuffle(Settings):
    """Mixes the documents of `window` blocks, which are read in random order."""

    name: Literal["blocks"] = "blocks"
    window: int = Field(
        default=256,
        ge=2,
        description="blocks of 2^20 tokens whose documents are mixed; a host keeps about twice as "
        "many in data.local_cache",
    )


ShuffleConfig = Annotated[GlobalShuffle | BlockShuffle, Field(discriminator="name")]
GLOBAL = GlobalShuffle()


@lru_cache(maxsize=64)
def random_bits(*key: int) -> int:
    """32 random bits that are a function of `key`."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def shuffled_index(index: int, count: int, *key: int) -> int:
    """Element `index` of a permutation of range(count) that is a function of `key`."""
    if count <= LISTED:
        return int(_permutation(count, *key)[index])
    return index_shuffle(index, count - 1, random_bits(*key), 4)


@lru_cache(maxsize=16)
def _permutation(count: int, *key: int) -> np.ndarray:
    return permutation(count, *key)


def permutation(count: int, *key: int) -> np.ndarray:
    """int64 [count]: a permutation of range(count) that is a function of `key`."""
    return np.argsort(np.random.SeedSequence(key).generate_state(count, np.uint64))


class GlobalOrder:
    """A permutation of all items."""

    def __init__(self, count: int):
        self.count = count

    def take(self, first: int, last: int, *key: int) -> np.ndarray:
        """int64 [last - first]: items at positions first..last of the epoch of `key`."""
        if self.count <= LISTED:
            return _permutation(self.count, *key)[first:last]
        shuffled = [shuffled_index(i, self.count, *key) for i in range(first, last)]
        return np.array(shuffled, np.int64)


class SlotOrder(NamedTuple):
    """Layout of the blocks of an epoch in its slots."""

    ranked: np.ndarray  # int64 [blocks]: the blocks in the order in which they are needed
    ends: np.ndarray  # int64 [blocks]: items up to the end of each slot


class BlockOrder:
    """Items in as many slots as blocks. Slot s mixes a part of each of the `window` blocks ranked
    up to s; the first slots of an epoch wrap around to the last blocks. edges: int64 [blocks + 1],
    the first item of each block."""

    def __init__(self, edges: np.ndarray, window: int):
        self.edges, self.blocks = edges, len(edges) - 1
        self.window = min(window, self.blocks)
        self._layouts: OrderedDict[tuple[int, ...], SlotOrder] = OrderedDict()
        self._slots: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()
        self._shuffled: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

    def take(self, first: int, last: int, *key: int) -> np.ndarray:
        """int64 [last - first]: items at positions first..last of the epoch of `key`."""
        ends = self._layout(*key).ends
        found, slot = [], self.slot(first, *key)
        while first < last:
            begin, end = int(ends[slot - 1]) if slot else 0, int(ends[slot])
            stop = min(last, end)
            if first < stop:
                found.append(self._slot(slot, *key)[first - begin : stop - begin])
                first = stop
            slot += 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def slot(self, index: int, *key: int) -> int:
        """Slot of a position of an epoch."""
        return int(np.searchsorted(self._layout(*key).ends, index, side="right"))

    def needed(self, slot: int, *key: int) -> list[int]:
        """Blocks whose items are in a slot, the newest last."""
        ranked = self._layout(*key).ranked
        return [int(ranked[(slot - i) % self.blocks]) for i in reversed(range(self.window))]

    def _layout(self, *key: int) -> SlotOrder:
        if key not in self._layouts:
            ranked, n, window = permutation(self.blocks, *key, BLOCKS), self.blocks, self.window
            each, more = divmod(np.diff(self.edges)[ranked], window)
            # A block has `each` + 1 items in `more` slots, and `each` items in the others.
            sums = np.cumsum(np.concatenate([[0], each[n - window + 1 :], each]))
            starts = np.arange(n)
            extra = np.zeros(n + window + 1, np.int64)
            np.add.at(extra, starts, more > 0)
            np.add.at(extra, starts + more, -(more > 0).astype(np.int64))
            extra = np.cumsum(extra)
            extra[: window + 1] += extra[n:]
            sizes = sums[window:] - sums[:-window] + extra[:n]
            _keep(self._layouts, key, SlotOrder(ranked, np.cumsum(sizes)), 2)
        return self._layouts[key]

    def _slot(self, slot: int, *key: int) -> np.ndarray:
        if (*key, slot) not in self._slots:
            ranked, parts = self._layout(*key).ranked, []
            for i in range(self.window):
                items = self._items(int(ranked[(slot - i) % self.blocks]), *key)
                each, more = divmod(len(items), self.window)
                begin = i * each + min(i, more)
                parts.append(items[begin : begin + each + (i < more)])
            found = np.concatenate(parts)
            found = found[permutation(len(found), *key, SLOT, slot)]
            _keep(self._slots, (*key, slot), found, SLOTS)
        return self._slots[*key, slot]

    def _items(self, block: int, *key: int) -> np.ndarray:
        """Shuffled items of a block; `window` consecutive slots share them."""
        if (*key, block) not in self._shuffled:
            first, last = int(self.edges[block]), int(self.edges[block + 1])
            found = first + permutation(last - first, *key, ITEMS, block)
            _keep(self._shuffled, (*key, block), found, self.window + SLOTS)
        return self._shuffled[*key, block]


def _keep[T](kept: OrderedDict[tuple[int, ...], T], key: tuple[int, ...], value: T, most: int):
    kept[key] = value
    while len(kept) > most:
        kept.popitem(last=False)


Order = GlobalOrder | BlockOrder


def make_order(shuffle: ShuffleConfig, edges: np.ndarray) -> Order:
    """An order of edges[-1] items; edges: int64 [blocks + 1], the first item of each block."""
    if shuffle.name == "global":
        return GlobalOrder(int(edges[-1]))
    return BlockOrder(edges, shuffle.window)
