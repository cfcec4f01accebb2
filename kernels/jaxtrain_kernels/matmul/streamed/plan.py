"""Compile-time constants of the kernel of `streamed`, and its memory."""

from typing import Any, NamedTuple

from jaxtrain_kernels.matmul.streamed.order import COLUMNS, SLOT_INPUTS, SLOT_WORDS, slots_across

WARPS = 8
THREADS = 32 * WARPS
COUNTER_BYTES = 128
COUNTERS = 8  # one for each phase


class Phase(NamedTuple):
    """A product. normed: its input is an RMS norm. activation: swiglu or geglu, if columns
    alternate, gate and up. residual: the stream is added to the result, which becomes the stream.
    """

    K: int
    N: int
    normed: bool = False
    activation: str | None = None
    residual: bool = False

    @property
    def outputs(self) -> int:
        return self.N if self.activation is None else self.N // 2

    @property
    def across(self) -> int:
        """Slots of the same inputs in a panel."""
        return slots_across(self.K)

    @property
    def panel_columns(self) -> int:
        return COLUMNS * self.across

    @property
    def turns(self) -> int:
        """Different inputs of a warp, in slots."""
        return self.K // (SLOT_INPUTS * WARPS)

    @property
    def panel_slots(self) -> int:
        """Slots of a warp in a panel."""
        return self.turns * self.across


class StreamPlan(NamedTuple):
    """form: int8 or int4. rows: of the inputs, up to 8. slots: of a warp. eps: of the norms. ahead:
    slots of a warp that are fetched into the L2 cache for the following call, which begins with
    two products of few inputs."""

    form: str
    rows: int
    phases: tuple[Phase, ...]
    blocks: int
    slots: int
    eps: float
    ahead: int = 0

    @property
    def slot_bytes(self) -> int:
        return SLOT_WORDS[self.form] * 4

    @property
    def quads(self) -> int:
        """Pairs of rows."""
        return 1 if self.rows <= 2 else 2 if self.rows <= 4 else 4

    def most_slots(self, phase: Phase) -> int:
        """Most slots across all panels of a block."""
        return -(-phase.N // phase.panel_columns // self.blocks) * phase.across

    @property
    def sums_bytes(self) -> int:
        """Of a slot's columns, by one warp."""
        return 8 * self.quads * 16

    @property
    def shared_bytes(self) -> tuple[int, ...]:
        """Of each part of `Memory`."""
        ring, sums = WARPS * self.slots, max(map(self.most_slots, self.phases)) * WARPS
        return ring * self.slot_bytes, ring * 8, sums * self.sums_bytes, WARPS * 8 * 4


class PhaseRefs(NamedTuple):
    """References to a product's arrays, and to its results."""

    codes: Any
    scales: Any
    gain: Any
    out: Any


class Memory(NamedTuple):
    """Shared memory. ring: slots; barriers: of slots; sums: of columns by warps; squares: of rows
    by warps."""

    ring: Any
    barriers: Any
    sums: Any
    squares: Any
