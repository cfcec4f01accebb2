"""Compile-time constants of the kernel of `streamed`, and its memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxtrain_kernels.matmul.streamed.order import COLUMNS, HALF_INPUTS, slot_words, slots_across

WARPS = 8  # that multiply
LOADERS = 4  # warps, each of which loads for WARPS / LOADERS others
THREADS = 32 * WARPS
COUNTER_BYTES = 128
COUNTERS = 8  # one for each phase


class StreamPhase(NamedTuple):
    """A product. normed: its input is an RMS norm. activation: swiglu or geglu, if columns
    alternate, gate and up. residual: the stream is added to the result, which becomes the stream.
    parts: columns of each result, if there are several.
    """

    K: int
    N: int
    normed: bool = False
    activation: str | None = None
    residual: bool = False
    parts: tuple[int, ...] = ()

    @property
    def outputs(self) -> tuple[int, ...]:
        """Columns of each result."""
        return self.parts or (self.N if self.activation is None else self.N // 2,)

    @property
    def across(self) -> int:
        """Halves of a slot that have different columns."""
        return slots_across(self.K)

    @property
    def deep(self) -> int:
        """Halves of a slot that have different inputs."""
        return 2 // self.across

    @property
    def panel_columns(self) -> int:
        return COLUMNS * self.across

    @property
    def turns(self) -> int:
        """Slots of a warp in a panel."""
        return self.K // (HALF_INPUTS * self.deep * WARPS)


class StreamPlan(NamedTuple):
    """form: int8 or int4. rows: of the inputs, up to 8. slots: of a warp, in shared memory. flight:
    most slots that one loader has in flight. eps: of the norms."""

    form: str
    rows: int
    phases: tuple[StreamPhase, ...]
    blocks: int
    slots: int
    flight: int
    eps: float

    @property
    def slot_bytes(self) -> int:
        return slot_words(self.form) * 4

    @property
    def quads(self) -> int:
        """Pairs of rows."""
        return 1 if self.rows <= 2 else 2 if self.rows <= 4 else 4

    def most_columns(self, phase: StreamPhase) -> int:
        """Most groups of 16 columns in the panels of a block."""
        return -(-phase.N // phase.panel_columns // self.blocks) * phase.across

    @property
    def sums_bytes(self) -> int:
        """Of 16 columns, by one warp."""
        return 8 * self.quads * 16

    @property
    def shared_bytes(self) -> tuple[int, ...]:
        """Of each part of `Memory`."""
        ring, sums = WARPS * self.slots, max(map(self.most_columns, self.phases)) * WARPS
        return ring * self.slot_bytes, ring * 8, ring * 8, sums * self.sums_bytes, WARPS * 8 * 4


# Codes, scales in int8, and gain of the norm, of a phase.
Arrays = tuple[jax.Array, jax.Array | None, jax.Array | None]


class PhaseRefs(NamedTuple):
    """References to a product's arrays, and to its results."""

    codes: Any
    scales: Any
    gain: Any
    outs: Sequence[Any]


class Memory(NamedTuple):
    """Shared memory. ring: slots; full, free: their barriers; sums: of columns by warps; squares:
    of rows by warps."""

    ring: Any
    full: Any
    free: Any
    sums: Any
    squares: Any
