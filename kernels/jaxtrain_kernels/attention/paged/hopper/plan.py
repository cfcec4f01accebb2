"""Compile-time constants of the kernel of `hopper`, and its memory."""

from typing import Any, NamedTuple

from jaxtrain_kernels.hopper.emit import Int

HEAD = 128  # channels of a head


class PageMemory(NamedTuple):
    """Shared memory. first: number of tiles before each sequence. lengths: tokens of each.
    parts: of a head, of each warp."""

    ring: Any
    full: Any
    free: Any
    first: Any
    lengths: Any
    parts: Any


class PageStreamPlan(NamedTuple):
    """B sequences, K heads with G queries each, pages of `size` tokens. tokens: of a tile.
    factor: from q k^T to a score in base 2."""

    B: int
    K: int
    G: int
    size: int
    tokens: int
    quantized: bool
    blocks: int
    slots: int
    window: int | None
    factor: float

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self.K * HEAD * (1 if self.quantized else 2)

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes from token to token of a slot of keys and of values: other banks for each."""
        return self.row_bytes + 64, self.row_bytes + 16

    @property
    def scales_at(self) -> int:
        """First byte of a slot's scales."""
        return self.tokens * (self.row_bytes + 64)

    @property
    def scale_bytes(self) -> int:
        return 4 * self.tokens * self.K if self.quantized else 0

    @property
    def slot_bytes(self) -> int:
        return -(-(self.scales_at + self.scale_bytes) // 128) * 128

    @property
    def threads(self) -> int:
        """Of the warps that multiply, one for each head."""
        return 32 * self.K

    @property
    def warpgroups(self) -> int:
        return self.K // 4 + 1

    @property
    def rounds(self) -> int:
        """Sequences of a lane."""
        return -(-self.B // 32)

    @property
    def shared_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of `PageMemory`."""
        many = 32 * self.rounds
        barriers = 8 * max(self.slots, 16)
        parts = self.K * PART_BYTES
        return self.slots * self.slot_bytes, barriers, barriers, 4 * (many + 4), 4 * many, parts


PART_BYTES = 4 * (HEAD + 4)


class PageRefs(NamedTuple):
    """References to the call's arrays, inputs first. W: pages of a row of the table."""

    q: Any
    k: Any
    k_scale: Any
    v: Any
    v_scale: Any
    table: Any
    starts: Any
    counts: Any
    counters: Any
    out: Any
    sums: Any
    stats: Any
    W: int


class Segment(NamedTuple):
    """A block's tiles of sequence b: `count` from tile `first` of the sequence on. partial: other
    blocks have tiles of it too, `parts` with this one, from `first_block` on. slot: of the part."""

    b: Int
    first: Int
    count: Int
    length: Int
    partial: Any
    slot: Int
    first_block: Int
    parts: Int
