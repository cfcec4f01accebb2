"""Warps of a block of `streamed` that add the sums of those that multiply, and store results.

Two such warps finish alternate groups of 16 columns, while the others multiply the next ones.
"""

import functools
import itertools
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.hopper.emit import (
    Int,
    address,
    after,
    arrive,
    const,
    float_const,
    init_barrier,
    loop,
    loop_while,
    ptx,
    run_if,
    select,
    wait_barrier,
    zero,
)  # fmt: skip
from jaxtrain_kernels.hopper.words import floats, to_word
from jaxtrain_kernels.matmul.streamed.claims import Claims
from jaxtrain_kernels.matmul.streamed.exchange import Exchange, complete_word
from jaxtrain_kernels.matmul.streamed.order import COLUMNS
from jaxtrain_kernels.matmul.streamed.plan import FINISHERS, SUMS, Memory, PhaseRefs, StreamPlan
from jaxtrain_kernels.matmul.streamed.registers import gated


class Sums:
    """Sums of groups of 16 columns in shared memory, by warps."""

    def __init__(self, plan: StreamPlan, memory: Memory):
        self.plan, self.memory = plan, memory

    def init(self) -> None:
        """Initialize the barriers, by one thread."""
        for n in range(SUMS):
            init_barrier(self.memory.sums_full + 8 * n, self.plan.warps)
            init_barrier(self.memory.sums_free + 8 * n, 1)

    def address(self, number: Int, warp: Int) -> Int:
        """Of a warp's sums of group `number` of the call."""
        at = (number & (SUMS - 1)) * self.plan.warps + warp
        return self.memory.sums + at * self.plan.sums_bytes

    def barriers(self, number: Int) -> tuple[Int, Int, Int]:
        """Full and free barrier of a group's sums, and the parity."""
        at = (number & (SUMS - 1)) * 8
        parity = (number >> (SUMS.bit_length() - 1)) & 1
        return self.memory.sums_full + at, self.memory.sums_free + at, parity

    def store(self, number: Int, warp: Int, lane: Int, four: list[Any]) -> None:
        """Write the warp's sums of a group, when those of an earlier one are read."""
        full, free, parity = self.barriers(number)
        wait_barrier(free, parity ^ 1)
        g, t, quads = lane >> 2, lane & 3, self.plan.quads
        at = self.address(number, warp) + (g * quads + t) * 16
        put = functools.partial(ptx, "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", at, *four)
        run_if(t < quads, put)
        ptx("bar.warp.sync -1;")
        run_if(lane.equals(0), lambda: arrive(full))


class Finisher:
    """A lane has two adjacent columns of two rows; lanes have the same ones, but the sums of
    different warps, if a group has fewer of them than a warp has lanes."""

    def __init__(
        self,
        plan: StreamPlan,
        refs: tuple[PhaseRefs, ...],
        stream: Int,
        exchange: Exchange,
        sums: Sums,
        lane: Int,
    ):
        self.plan, self.refs, self.sums, self.exchange = plan, refs, sums, exchange
        self.lane, self.residuals = lane, {}
        self.each = 8 * plan.quads  # pairs of columns and rows
        self.first_warp, self.parts = lane // self.each, 32 // self.each
        rest = lane % self.each
        self.column, self.row = (rest // plan.quads) * 2, (rest % plan.quads) * 2
        self.at = rest * 16
        last = None
        for p, phase in enumerate(plan.phases):
            if phase.residual:
                self.residuals[p] = stream if last is None else exchange.address(last)
                last = p
        self.exchanged = set(list(self.residuals)[1:])  # whose stream is of an earlier phase

    def run(self, which: Int, panels: list[tuple[Int, Int]]) -> None:
        """Finish each second group of all phases, from group `which` on."""
        base = const(0)
        for p, (first, count) in enumerate(panels):
            phase, finish = self.plan.phases[p], self.finish_phase
            if self.plan.claimed(phase):
                finish = self.finish_claimed
            base = base + finish(p, which, base, first, count) * phase.across

    def finish_phase(self, p: int, which: Int, base: Int, first: Int, count: Int) -> Int:
        """base: number of the phase's first group in the call. Returns the number of panels."""
        phase, skipped = self.plan.phases[p], (which - base) & (FINISHERS - 1)
        column = first * phase.panel_columns + self.column

        def step(i: Int, _: list[Any]) -> list[Any]:
            group = skipped + i * FINISHERS
            self.finish(p, base + group, column + group * COLUMNS)
            return []

        groups = count * phase.across - skipped
        loop((groups + (FINISHERS - 1)) // FINISHERS, [], step)
        return count

    def finish_claimed(self, p: int, which: Int, base: Int, first: Int, count: Int) -> Int:
        """As `finish_phase`, with the panels that the block claims."""
        phase, claims = self.plan.phases[p], Claims(self.plan, self.sums.memory, p)
        claim = lambda group: claims.read(group // phase.across - count).value

        def step(carried: list[Any]) -> list[Any]:
            group, claimed = map(Int, carried)
            own = group // phase.across
            panel = select(own < count, first + own, count * self.plan.blocks + claimed)
            column = panel * phase.panel_columns + (group % phase.across) * COLUMNS
            self.finish(p, base + group, column + self.column)
            group = group + FINISHERS
            return [group.value, claim(group)]

        start = (which - base) & (FINISHERS - 1)
        found = loop_while([start.value, claim(start)], lambda x: Int(x[1]).compare("sge", 0), step)
        end = Int(found[0]) // phase.across
        before = claims.read(end - count - 1)  # the first of two marks, or a claim
        return select(before < 0, end - 1, end)

    def finish(self, p: int, number: Int, column: Int) -> None:
        """Finish group `number` of the call, of which the lane has two columns from `column` on."""
        phase = self.plan.phases[p]
        ahead = self.load_ahead(p, column)
        full, free, parity = self.sums.barriers(number)
        wait_barrier(full, parity)
        sums = self.add_warps(number)
        free = after(free, Int(ptx("mov.b32 $0, $1;", sums[0], out="r", effects=False)))
        inverses = [self.inverse_rms(p, row) for row in self.rows()] if phase.normed else []
        ptx("bar.warp.sync -1;")
        run_if(self.lane.equals(0), lambda: arrive(free))
        run_if(self.first_warp.equals(0), lambda: self.store_rows(p, column, sums, inverses, ahead))

    def rows(self) -> list[Int]:
        return [self.row + r for r in range(min(self.plan.rows, 2))]

    def load_ahead(self, p: int, column: Int) -> "_Ahead":
        """Load what the results need besides the sums, for which the warp waits longer."""
        phase, ref, scales, old = self.plan.phases[p], self.refs[p], [], []
        if ref.scales is not None:
            load = "ld.global.v2.f32 {$0, $1}, [$2];"
            scales = ptx(load, address(ref.scales) + column.wide() * 4, out="ff")
        for row in self.rows() if phase.residual else ():
            inside = select(row < self.plan.rows, row, const(0))
            at = self.residuals[p] + (inside * phase.N + column).wide() * 2
            old.append((at, ptx("ld.relaxed.gpu.global.b32 $0, [$1];", at, out="r")))
        return _Ahead(scales, old)

    def add_warps(self, number: Int) -> list[Any]:
        sums = [zero() for _ in range(4)]
        begin = self.sums.address(number, self.first_warp) + self.at
        for n in range(self.plan.warps // self.parts):
            at = begin + n * self.parts * self.plan.sums_bytes
            part = ptx("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", at, out="ffff")
            sums = [arith.addf(a, b) for a, b in zip(sums, part, strict=True)]
        return [self.across_parts(x) for x in sums]

    def across_parts(self, x: Any) -> Any:
        """Sum of x over the lanes that have the sums of different warps."""
        distance = self.each
        while distance < 32:
            x, distance = arith.addf(x, mgpu.utils.shfl_bfly(x, distance)), 2 * distance
        return x

    def inverse_rms(self, p: int, row: Int) -> Any:
        total, plan = zero(), self.plan
        for n in range(plan.warps // self.parts):
            warp = self.first_warp + (p * plan.warps + n * self.parts)
            at = self.sums.memory.squares + (row + warp * 8) * 4
            total = arith.addf(total, ptx("ld.shared.f32 $0, [$1];", at, out="f"))
        scale = float_const(1 / plan.phases[p].K)
        mean = arith.addf(arith.mulf(self.across_parts(total), scale), float_const(plan.eps))
        return ptx("rsqrt.approx.f32 $0, $1;", mean, out="f", effects=False)

    def store_rows(
        self, p: int, column: Int, sums: list[Any], inverses: list[Any], ahead: "_Ahead"
    ) -> None:
        for r, row in enumerate(self.rows()):
            ys = [sums[r], sums[2 + r]]
            if ahead.scales:
                ys = [arith.mulf(y, scale) for y, scale in zip(ys, ahead.scales, strict=True)]
            if inverses:
                ys = [arith.mulf(y, inverses[r]) for y in ys]
            old = None
            if self.plan.phases[p].residual:
                at, old = ahead.old[r]
                old = complete_word(at, old) if p in self.exchanged else old
            put = functools.partial(self.store, p, column, row, ys, old)
            put() if self.plan.rows in (1, 2, 4, 8) else run_if(row < self.plan.rows, put)

    def store(self, p: int, column: Int, row: Int, ys: list[Any], old: Any) -> None:
        """Store two columns of a row: rounded; then their activation, or the stream plus them."""
        phase, both = self.plan.phases[p], to_word(*ys)
        column = column if phase.activation is None else column >> 1
        targets = [self.out_address(p, row, column)]
        if p + 1 < len(self.plan.phases):
            width = sum(phase.outputs)
            own = self.exchange.address(p) + (row * width + column).wide() * 2
            targets.insert(0, own)
        if phase.activation is not None:
            y = gated(phase.activation, *floats(both))
            code = "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.relaxed.gpu.global.b16 [$0], h; }"
            for at in targets:
                ptx(code, at, y)
            return
        if phase.residual:
            pairs = zip(floats(both), floats(old), strict=True)
            both = to_word(*[arith.addf(y, x) for y, x in pairs])
        for at in targets:
            ptx("st.relaxed.gpu.global.b32 [$0], $1;", at, both)

    def out_address(self, p: int, row: Int, column: Int) -> Int:
        """Address of a value of the phase's results, whose parts have adjacent columns."""
        sizes, outs = self.plan.phases[p].outputs, self.refs[p].outs
        base, size, own = address(outs[0]), const(sizes[0]), column
        for first, n, out in zip(itertools.accumulate(sizes), sizes[1:], outs[1:], strict=False):
            later = column.compare("sge", first)
            base, size = select(later, address(out), base), select(later, const(n), size)
            own = select(later, column - first, own)
        return base + (row * size + own).wide() * 2


class _Ahead(NamedTuple):
    """Scales of a lane's columns, and addresses and words of the stream in its rows."""

    scales: list[Any]
    old: list[tuple[Int, Any]]
