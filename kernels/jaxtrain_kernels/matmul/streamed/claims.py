"""Panels of a phase that the blocks of `streamed` claim one by one, from a counter.

One loader of a block claims, a panel before it needs it. The block's other warps find the claims in
shared memory, in order, and two marks behind the last one: warps that finish take turns.
"""

from typing import Any

from jaxtrain_kernels.hopper.emit import Int, const, ptx, select
from jaxtrain_kernels.matmul.streamed.plan import (
    CLAIMS,
    NO_MORE,
    NOT_CLAIMED,
    Memory,
    StreamPlan,
)  # fmt: skip


class Claims:
    """Of one phase. counter: address in device memory; its value is -1 before the first claim."""

    def __init__(self, plan: StreamPlan, memory: Memory, p: int):
        self.start = memory.claims + p * CLAIMS * 4
        self.most = plan.claimed(plan.phases[p])

    def init(self, lane: Int) -> None:
        """Initialize the claims, by a warp."""
        ptx("st.shared.b32 [$0], $1;", self.start + lane * 4, const(NOT_CLAIMED))

    def ask(self, counter: Int, number: Int, is_first: Int) -> Any:
        """Claim a panel, in the loader of which `is_first` is 1: the block's of this number.
        Returns the counter's value before, which arrives later."""
        code = (
            "{ .reg .pred p, q; setp.ne.s32 p, $2, 0; mov.b32 $0, " + str(self.most) + ";"
            f" setp.lt.and.s32 q, $3, {CLAIMS - 2}, p;"
            " @q atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }"
        )
        return ptx(code, counter, is_first, number, out="r", early=True)

    def settle(self, before: Any, number: Int, is_first: Int) -> Int:
        """The claim of this number: of `ask`, which is written to shared memory, or read there."""
        panel = Int(before) + 1
        panel = select(panel < self.most, panel, const(NO_MORE))
        code = (
            "{ .reg .pred p, q; setp.eq.s32 p, $2, 0; @p bra READ; mov.b32 $0, $3;"
            " st.volatile.shared.b32 [$1], $3; setp.ge.s32 q, $3, 0; @q bra DONE;"
            " st.volatile.shared.b32 [$1+4], $3; bra DONE;"
            " READ: ld.volatile.shared.b32 $0, [$1];"
            f" setp.eq.s32 q, $0, {NOT_CLAIMED}; @q bra READ; DONE: }}"
        )
        at = self.start + number * 4
        return Int(ptx(code, at, is_first, panel, out="r", early=True))

    def read(self, number: Int) -> Int:
        """The claim of this number, when it is there; 0 for a negative number."""
        code = (
            "{ .reg .pred p; mov.b32 $0, 0; setp.lt.s32 p, $2, 0; @p bra DONE;"
            " READ: ld.volatile.shared.b32 $0, [$1];"
            f" setp.eq.s32 p, $0, {NOT_CLAIMED}; @p bra READ; DONE: }}"
        )
        return Int(ptx(code, self.start + number * 4, number, out="r", early=True))
