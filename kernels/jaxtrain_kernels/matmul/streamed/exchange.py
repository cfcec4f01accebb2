"""Results that all blocks of the kernel of `streamed` write and read, in device memory.

A word that is not written yet has the bits of a NaN that no result has: a rounded NaN is 0x7FFF.
So a word is its own signal: who needs it reads it until it is there, and there are neither fences
nor counters. A call uses one of two sets, and clears the other one, which the call before used. A
counter, which each block increments once in a call, says which.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jaxtrain_kernels.hopper.emit import Int, const, loop, ptx, run_if, select
from jaxtrain_kernels.matmul.streamed.plan import EXCHANGE_LINE, FINISHERS, StreamPlan

POLLS = 1 << 22  # of a word, some seconds, before a block ends the program with an error
NOT_WRITTEN = 0xFFFF  # of 16 bits
VOTE = "vote.sync.any.pred some, some, -1;"


class Exchange:
    """start: address of the memory, whose bits are all ones before the first call."""

    def __init__(self, plan: StreamPlan, start: Int):
        self.plan, self.start = plan, start
        offsets = plan.exchange_offsets
        count = Int(ptx("ld.relaxed.gpu.global.b32 $0, [$1];", start, out="r"))
        calls = (count + 1) // plan.blocks
        is_second = (calls & 1).equals(1)
        first = start + EXCHANGE_LINE
        size = const(offsets[-1])
        self.own = first + select(is_second, size, const(0)).wide()
        self.other = first + select(is_second, const(0), size).wide()

    def address(self, p: int) -> Int:
        """Of a phase's results, [rows, columns]."""
        return self.own + self.plan.exchange_offsets[p]

    def counter(self, p: int) -> Int:
        """Of the panels of a phase that are claimed."""
        return self.own + 4 * p

    def clear(self, block: Int, thread: Int) -> None:
        """Clear the block's part of the other set, by the warps that finish."""
        count = self.plan.exchange_offsets[-1] // 16
        each = self.plan.blocks * FINISHERS * 32

        def step(i: Int, _: list[Any]) -> list[Any]:
            at = (i * self.plan.blocks + block) * (FINISHERS * 32) + thread
            put = functools.partial(
                ptx, "st.global.v4.b32 [$0], {$1, $1, $1, $1};", self.other + (at * 16).wide(),
                const(-1),
            )  # fmt: skip
            run_if(at < count, put)
            return []

        loop(const(-(-count // each)), [], step)

    def end(self) -> None:
        """Count the block, by one thread, when all its threads have read the counter."""
        most = 2 * self.plan.blocks - 1
        ptx(f"red.relaxed.gpu.global.inc.u32 [$0], {most};", self.start)


def load_words(start: Int, loads: int, stride: int) -> list[Any]:
    """A lane's 16 bytes each `stride` bytes, as words."""
    code = "ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return [word for n in range(loads) for word in ptx(code, start + n * stride, out="rrrr")]


def complete_words(start: Int, words: Sequence[Any], stride: int) -> list[Any]:
    """The words of `load_words`; those that were not there are loaded again until all lanes of the
    warp have all of theirs."""
    count = len(words)
    moves = [f"mov.b32 ${i}, ${count + 1 + i};" for i in range(count)]
    pieces = [range(i, i + 4) for i in range(0, count, 4)]
    code = _polled(moves, pieces, stride, VOTE)
    return ptx(code, start, *words, out="r" * count, early=True)


def await_word(start: Int) -> None:
    """Wait until all lanes of the warp have a word of two values."""
    code = _polled(["mov.b32 $0, $2;"], [range(1)], 0, VOTE)
    ptx(code, start, const(-1), out="r", early=True)


def complete_word(start: Int, word: Any) -> Any:
    """A word of two values, loaded again until it is there."""
    code = _polled(["mov.b32 $0, $2;"], [range(1)], 0, "")
    return ptx(code, start, word, out="r", early=True)


def _polled(moves: list[str], pieces: list[range], stride: int, vote: str) -> str:
    """PTX of `moves`, then of loads of the pieces of whose words one has 16 bits of ones. pieces:
    numbers of results. The first argument is the first piece's address."""
    start = f"${pieces[-1][-1] + 1}"
    code = ["{ .reg .pred q, some; .reg .b32 m, l, n;", *moves, f"mov.b32 n, {POLLS}; CHECK:"]
    loads = []
    for i, piece in enumerate(pieces):
        first, *rest = [f"${n}" for n in piece]
        code += [f".reg .pred p{i};", f"mov.b32 m, {first};"]
        code += [f"max.u16x2 m, m, {x};" for x in rest]
        code += [
            f"shl.b32 l, m, 16; setp.ge.u32 q, l, {NOT_WRITTEN << 16};",
            f"setp.ge.or.u32 p{i}, m, {NOT_WRITTEN << 16}, q;",
            f"or.pred some, some, p{i};" if i else "mov.pred some, p0;",
        ]
        size, results = ("v4.", f"{{{', '.join([first, *rest])}}}") if rest else ("", first)
        loads.append(f"@p{i} ld.relaxed.gpu.global.{size}b32 {results}, [{start}+{i * stride}];")
    code += [vote, "@!some bra DONE;", *loads]
    code.append("sub.s32 n, n, 1; setp.gt.s32 q, n, 0; @q bra CHECK; trap; DONE: }")
    return " ".join(code)
