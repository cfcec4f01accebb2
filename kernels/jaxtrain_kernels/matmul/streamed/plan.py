"""Compile-time constants of the kernel of `streamed`, and its memory."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxtrain_kernels.matmul.streamed.order import (
    COLUMNS,
    HALVES_INPUTS,
    PIECE,
    WARPS,
    half_inputs,
    half_words,
    slot_words,
    slots_across,
)  # fmt: skip

LOADERS, FINISHERS = 2, 2  # warps
COPY_BYTES = 8192  # of codes that one copy loads, for one warp or several
EXCHANGE_STEPS = 3  # slots of a warp that are loaded while blocks exchange results
SUMS = 2 * FINISHERS  # groups of 16 columns that shared memory has sums of
EXCHANGE_LINE = 128  # bytes of device memory before the values that blocks exchange
CLAIMS = 32  # lanes of a warp: most panels that a block claims, and marks of their end
SPARE = 3  # panels of a block's share that blocks claim when they need them, where it has enough
NOT_CLAIMED, NO_MORE = -2, -1
DIGITS = 3  # of an input as an integer
DIGIT_WORDS = 72  # of a warp's in shared memory: 2 of each 8 inputs, in banks of their own
FIXED_BYTES = DIGITS * DIGIT_WORDS * 4


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
        return self.K // (HALVES_INPUTS * self.deep)


class StreamPlan(NamedTuple):
    """form: int8 or int4. rows: of the inputs, up to 8. slots: of a warp, in shared memory. flight:
    most copies that one loader has in flight during an exchange, and else. eps: of the norms."""

    form: str
    rows: int
    phases: tuple[StreamPhase, ...]
    blocks: int
    slots: int
    flight: tuple[int, int]
    eps: float

    @property
    def warps(self) -> int:
        """That multiply."""
        return WARPS[self.form]

    @property
    def half_inputs(self) -> int:
        return half_inputs(self.form)

    @property
    def pieces(self) -> int:
        """Of 32 inputs, in a half."""
        return self.half_inputs // PIECE

    @property
    def slot_bytes(self) -> int:
        return slot_words(self.form) * 4

    @property
    def sharing(self) -> int:
        """Adjacent warps whose slots one copy loads."""
        return COPY_BYTES // (8 * half_words(self.form))

    @property
    def most_rows(self) -> int:
        """The power of two from `rows` on."""
        return 1 << (self.rows - 1).bit_length()

    @property
    def quads(self) -> int:
        """Pairs of rows."""
        return max(1, self.most_rows // 2)

    def is_fixed(self, phase: StreamPhase) -> bool:
        """Whether a phase's inputs are integers, and their products of `fixed`."""
        loads = phase.turns * self.pieces * phase.deep / 8
        return self.form == "int4" and self.rows == 1 and loads <= 8

    @property
    def sums_bytes(self) -> int:
        """Of 16 columns, by one warp."""
        return 8 * self.quads * 16

    @property
    def shared_bytes(self) -> tuple[int, ...]:
        """Of each part of `Memory`."""
        copies = self.slots * self.warps // self.sharing
        return (
            self.slots * self.warps * self.slot_bytes,
            8 * copies,
            8 * copies,
            SUMS * self.warps * self.sums_bytes,
            8 * SUMS,
            8 * SUMS,
            len(self.phases) * self.warps * 8 * 4,
            len(self.phases) * CLAIMS * 4,
            self.warps * FIXED_BYTES if any(map(self.is_fixed, self.phases)) else 128,
        )

    @property
    def shared_offsets(self) -> list[int]:
        """First byte of each part of `Memory`, and the bytes of all: in one array, as Pallas
        aligns each to 1,024 bytes."""
        sizes = [-(-size // 128) * 128 for size in self.shared_bytes]
        return [0, *itertools.accumulate(sizes)]

    def claimed(self, phase: StreamPhase) -> int:
        """Panels that blocks claim. Blocks whose codes come faster, as they do by 15%, get more.
        With one or two rows all are as late without claims."""
        panels = phase.N // phase.panel_columns
        share = panels // self.blocks - SPARE
        if share <= 0 or phase.turns > 1 or self.rows <= 2:
            return 0
        return panels - share * self.blocks

    @property
    def exchange_offsets(self) -> list[int]:
        """First byte of each exchanged result in a set, behind the counters of claims, and the
        bytes of a set."""
        sizes = [EXCHANGE_LINE, *(self.rows * sum(p.outputs) * 2 for p in self.phases[:-1])]
        return list(itertools.accumulate(-(-size // 128) * 128 for size in sizes))

    @property
    def exchange_words(self) -> int:
        return (EXCHANGE_LINE + 2 * self.exchange_offsets[-1]) // 4


# Codes, scales in int8, and gain of the norm, of a phase.
Arrays = tuple[jax.Array, jax.Array | None, jax.Array | None]


class PhaseRefs(NamedTuple):
    """References to a product's arrays, and to its results."""

    codes: Any
    scales: Any
    gain: Any
    outs: Sequence[Any]


class Memory(NamedTuple):
    """Shared memory. ring: slots; full, free: their barriers. sums: of columns by warps;
    sums_full, sums_free: their barriers. squares: sums of each phase's rows by warps. claims: of
    panels in each phase. fixed: inputs as integers, by warps."""

    ring: Any
    full: Any
    free: Any
    sums: Any
    sums_full: Any
    sums_free: Any
    squares: Any
    claims: Any
    fixed: Any
