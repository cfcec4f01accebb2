"""Compile-time constants of the kernel of `hopper`, and its memory."""

from typing import Any, NamedTuple

from jaxtrain_kernels.decode_layers.hopper.order import (
    INPUTS,
    ROWS,
    SlotShape,
    slot_shape,
)
from jaxtrain_kernels.decode_layers.packing import LayersShape

WORD = 8  # bytes that are written at once: two bfloat16 or a float32, and a tag
SHARED_BYTES = 227 * 1024  # of a block
STEPS = 2  # of a slot of keys
KEY_SLOTS = 2
JOINED = 16  # channels of a head that a warp joins
PHASES = ("qkv", "out", "up", "down")


class StreamedProduct(NamedTuple):
    """A phase's matrix. most: units of a block, of which neighbours may have the same ones, so that
    all have equally many. slots: of a unit. chunks: of a warp in a unit."""

    rows: int
    inputs: int
    units: int
    most: int
    slots: int
    chunks: int


class StreamedPlan(NamedTuple):
    """blocks: of the grid. splits: parts of a head's keys, the last of which is the new token.
    spare: units of attention's output that a block multiplies beyond its own, so that the ring has
    whole turns in a layer. slots: of the ring of weights. flight: most slots of it that are being
    loaded. page: tokens of a page. pages: of a layer. table: length of the page table. spins: reads
    of a vector before a warp times out."""

    shape: LayersShape
    blocks: int
    splits: int
    spare: int
    slots: int
    flight: int
    page: int
    pages: int
    table: int
    spins: int

    @property
    def slot(self) -> SlotShape:
        return slot_shape(self.shape)

    @property
    def warps(self) -> int:
        return self.slot.warps

    @property
    def warpgroups(self) -> int:
        """Of the block: behind the warps that multiply, one loads weights, and one loads keys."""
        return -(-(self.warps + 2) // 4)

    @property
    def slots_of_layer(self) -> int:
        return sum(p.most * p.slots for p in self.products.values())

    @property
    def turns(self) -> int:
        """Of the ring, in a layer: so a slot's place in the ring is the same in each layer."""
        return self.slots_of_layer // self.slots

    @property
    def tokens(self) -> int:
        """Of a slot of keys."""
        return 2 * STEPS * self.warps

    @property
    def products(self) -> dict[str, StreamedProduct]:
        s, slot = self.shape, self.slot
        C = s.heads * s.head_dim
        sizes = (s.qkv_rows, s.width), (s.width, C), (s.hidden, s.width), (s.width, s.hidden)
        return {
            name: StreamedProduct(
                rows, inputs, rows // ROWS,
                -(-rows // ROWS // self.blocks) + (self.spare if name == "out" else 0),
                slot.slots(inputs), inputs // INPUTS // slot.warps,
            )
            for name, (rows, inputs) in zip(PHASES, sizes, strict=True)
        }  # fmt: skip

    @property
    def key_bytes(self) -> int:
        """Of a slot of keys and values."""
        return self.tokens * self.shape.head_dim * 4

    @property
    def parts_bytes(self) -> int:
        """Of a split of a head: a sum for each channel, and twice the total."""
        return (self.shape.head_dim + 2) * WORD

    @property
    def places(self) -> dict[str, int]:
        """First byte of each vector that blocks exchange; behind them `end`."""
        s = self.shape
        C = s.heads * s.head_dim
        values = {"qkv": s.qkv_rows, "heads": C, "out": s.width, "up": s.hidden, "down": s.width}
        sizes = {name: size * WORD // 2 for name, size in values.items()}
        sizes["parts"] = s.heads * self.splits * self.parts_bytes
        sizes["timed_out"] = 4
        places, at = {}, 0
        for name, size in sizes.items():
            places[name], at = at, at + -(-size // 128) * 128
        return places | {"end": at}

    @property
    def sums_bytes(self) -> int:
        """Of one phase's sums."""
        return max(p.most for p in self.products.values()) * ROWS * self.warps * 4

    @property
    def shared_bytes(self) -> tuple[int, ...]:
        """Of each part of `LayersMemory`."""
        padded = -(-self.warps // 4) * 16
        sizes = (
            self.slots * self.slot.bytes, self.slots * 8, self.slots * 8, 2 * self.sums_bytes,
            2 * padded, self.warps * self.shape.head_dim * 4, padded,
            KEY_SLOTS * self.key_bytes, KEY_SLOTS * 8, KEY_SLOTS * 8,
        )  # fmt: skip
        return tuple(-(-size // 16) * 16 for size in sizes)


class LayersMemory(NamedTuple):
    """Shared memory. ring: slots; full, free: their barriers; sums: of rows by warps, of two
    phases; squares: of inputs by warps, of two phases; heads, totals: of attention by warps; keys:
    slots of keys and values; keys_full, keys_free: their barriers."""

    ring: Any
    full: Any
    free: Any
    sums: Any
    squares: Any
    heads: Any
    totals: Any
    keys: Any
    keys_full: Any
    keys_free: Any


class LayersRefs(NamedTuple):
    """References to the call's arrays. cos, sin: [H/2]. values: [L, K * H]. windows: [L]. scales:
    [L, 2]. qkv .. down: in the order of the stream. words: what blocks exchange, and whether one
    timed out. keys, values_kept: pages of all layers. last, middle: the stream after these layers.
    timed_out: 0 or 1."""

    x0: Any
    cos: Any
    sin: Any
    values: Any
    start: Any
    count: Any
    table: Any
    windows: Any
    scales: Any
    qkv: Any
    out: Any
    up: Any
    down: Any
    words: Any
    keys: Any
    values_kept: Any
    last: Any
    middle: Any
    timed_out: Any
