"""One block of the kernel of `streamed`, as operations of each thread.

It has adjacent panels of each product. Its warps multiply different inputs, with a row of inputs
in each 4 lanes, or load codes (`ring`).
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, gpu

from jaxtrain_kernels.matmul.streamed.emit import (
    Int,
    address,
    const,
    float_const,
    int_type,
    loop,
    ptx,
    run_if,
    select,
    zero,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.order import COLUMNS, HALF_INPUTS, PIECES
from jaxtrain_kernels.matmul.streamed.plan import (
    COUNTER_BYTES,
    THREADS,
    WARPS,
    Memory,
    PhaseRefs,
    StreamPlan,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.registers import (
    add_int4,
    add_int8,
    floats,
    gated,
    offsets_of_groups,
    to_word,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.ring import SERVED, Ring

POLLS = 1 << 22  # of a counter, some seconds, before a block ends the program with an error


class StreamRefs(NamedTuple):
    """References to the call's arrays. x: the first input; its rows have `width` values. phases: of
    each product."""

    x: Any
    width: int
    stream: Any
    counters: Any
    phases: Sequence[PhaseRefs]


class StreamBlock:
    """A block's registers, and what its threads do."""

    def __init__(self, plan: StreamPlan, operands: StreamRefs, memory: Memory):
        self.plan, self.refs = plan, operands.phases
        self.memory = Memory(*map(address, memory))
        self.ring = Ring(plan, self.memory)
        self.source, self.width = address(operands.x), operands.width
        self.stream, self.counters = address(operands.stream), address(operands.counters)
        self.thread = Int(mgpu.utils.thread_idx())
        self.warp, self.lane = Int(mgpu.utils.warp_idx()), self.thread & 31
        self.g, self.t = self.lane >> 2, self.lane & 3
        self.is_first = self.thread.equals(0)
        block = Int(arith.index_cast(int_type(), gpu.block_id(gpu.Dimension.x)))
        self.panels = []  # first, and number, in each phase
        for phase in plan.phases:
            total = phase.N // phase.panel_columns
            first = (block * total) // plan.blocks
            self.panels.append((first, ((block + 1) * total) // plan.blocks - first))

    def run(self) -> None:
        loader = self.warp - WARPS
        loads = arith.andi(loader.compare("sge", 0), self.lane.equals(0))
        warps = [loader * SERVED + n for n in range(SERVED)]
        run_if(loads, lambda: self.ring.init(warps))
        ptx("bar.sync 0;")
        run_if(loads, lambda: self.ring.load(warps, [ref.codes for ref in self.refs], self.panels))
        run_if(loader < 0, self.compute)

    def compute(self) -> None:
        position, gains = [const(0).value] * 2, self.load_gains(0)
        for p, phase in enumerate(self.plan.phases):
            ahead = self.load_epilogue(p)
            multiply = self.multiply if phase.turns == 1 else self.multiply_wide
            position = multiply(p, gains, position)
            self.sync()
            self.finish(p, ahead)
            self.sync()
            if p + 1 == len(self.plan.phases):
                run_if(self.is_first, self.end)
                return
            run_if(self.is_first, functools.partial(self.signal, p))
            gains = self.load_gains(p + 1)
            run_if(self.is_first, functools.partial(self.wait, p))
            self.sync()
            self.source, self.width = address(self.refs[p].outs[0]), phase.outputs[0]

    # Exchange

    def sync(self) -> None:
        """Wait for all warps that multiply."""
        ptx(f"bar.sync 1, {THREADS};")

    def counter(self, p: int) -> Int:
        return self.counters + p * COUNTER_BYTES

    def signal(self, p: int) -> None:
        """Publish the block's results, which its other threads have written."""
        ptx("fence.acq_rel.gpu;")
        ptx("red.relaxed.gpu.global.add.u32 [$0], 1;", self.counter(p))

    def wait(self, p: int) -> None:
        """Wait until all blocks have signalled the phase."""
        ptx(
            f"{{ .reg .pred p; .reg .b32 n, c; mov.b32 n, {POLLS}; AGAIN:"
            f" ld.acquire.gpu.global.b32 c, [$0]; setp.ge.s32 p, c, {self.plan.blocks};"
            " @p bra DONE; sub.s32 n, n, 1; setp.gt.s32 p, n, 0; @p bra AGAIN; trap; DONE: }",
            self.counter(p),
        )  # fmt: skip

    def end(self) -> None:
        """Reset the counters, in the last block: all others have waited for the last time."""
        last = len(self.plan.phases) - 1
        add = "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
        before = Int(ptx(add, self.counter(last), out="r"))

        def reset() -> None:
            for p in range(last + 1):
                ptx("st.relaxed.gpu.global.b32 [$0], 0;", self.counter(p))

        run_if(before.equals(self.plan.blocks - 1), reset)

    # Inputs

    def loaded(self, base: Int, turn: Int, row: Int, width: int, deep: int) -> list[list[Any]]:
        """The lane's 16 bytes of each piece of a slot's inputs, of the warp's turn."""
        at = row * (width * 2) + (turn * WARPS + self.warp) * (HALF_INPUTS * deep * 2) + self.t * 16
        load = "ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];"
        start = base + at.wide()
        return [ptx(load, start + 64 * piece, out="rrrr") for piece in range(PIECES * deep)]

    def load_inputs(self, p: int, turn: Int) -> list[list[Any]]:
        most = self.plan.rows - 1
        row = self.g if most == 7 else select(self.g < most, self.g, const(most))
        return self.loaded(self.source, turn, row, self.width, self.plan.phases[p].deep)

    def load_gains(self, p: int) -> list[list[Any]]:
        """Gains of the warp's inputs, for a norm."""
        gain = self.refs[p].gain
        if gain is None:
            return []
        return self.loaded(address(gain), const(0), const(0), 0, self.plan.phases[p].deep)

    def normed(self, inputs: list[list[Any]], gains: list[list[Any]]) -> list[list[Any]]:
        """Inputs times gains, if there are any. Writes the sums of the inputs' squares to shared
        memory."""
        total = zero()
        for x in itertools.chain(*(floats(word) for four in inputs for word in four)):
            total = ptx("fma.rn.f32 $0, $1, $1, $2;", x, total, out="f", effects=False)
        for distance in (1, 2):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        at = self.memory.squares + (self.warp * 8 + self.g) * 4
        run_if(self.t.equals(0), lambda: ptx("st.shared.f32 [$0], $1;", at, total))
        times = lambda x, y: ptx("mul.rn.bf16x2 $0, $1, $2;", x, y, out="r", effects=False)
        return jax.tree.map(times, inputs, gains) if gains else inputs

    # Products

    def multiply(self, p: int, gains: list[list[Any]], position: list[Any]) -> list[Any]:
        """Write the warp's sums of each panel to shared memory. All its inputs are in registers."""
        phase = self.plan.phases[p]
        inputs = self.load_inputs(p, const(0))
        if phase.normed:
            inputs = self.normed(inputs, gains)
        offsets = self.offsets(inputs)

        def panel(n: Int, position: list[Any]) -> list[Any]:
            sums = [self.zeros() for _ in range(phase.across)]
            position, sums = self.use_slot(position, inputs, offsets, sums)
            self.store_sums(n * phase.across, sums)
            return position

        return loop(self.panels[p][1], position, panel)

    def multiply_wide(self, p: int, gains: list[list[Any]], position: list[Any]) -> list[Any]:
        """As `multiply`, with more inputs, which are loaded one turn ahead."""
        phase, end = self.plan.phases[p], 2 + 4 * PIECES

        def panel(n: Int, position: list[Any]) -> list[Any]:
            def turn(j: Int, carried: list[Any]) -> list[Any]:
                following = j + 1
                wraps = following.equals(phase.turns)
                ahead = self.load_inputs(p, select(wraps, const(0), following))
                inputs = [list(four) for four in itertools.batched(carried[2:end], 4)]
                sums = self.by_half(carried[end:])
                position, sums = self.use_slot(carried[:2], inputs, self.offsets(inputs), sums)
                return [*position, *itertools.chain(*ahead), *itertools.chain(*sums)]

            first = itertools.chain(*self.load_inputs(p, const(0)))
            found = loop(
                const(phase.turns), [*position, *first, *self.zeros(), *self.zeros()], turn
            )
            self.store_sums(n * phase.across, self.by_half(found[end:]))
            return found[:2]

        return loop(self.panels[p][1], position, panel)

    def by_half(self, sums: list[Any]) -> list[list[Any]]:
        return [list(half) for half in itertools.batched(sums, len(sums) // 2)]

    def zeros(self) -> list[Any]:
        return [zero() for _ in range(8 if self.plan.form == "int8" else 4)]

    def offsets(self, inputs: list[list[Any]]) -> list[list[Any]]:
        return offsets_of_groups(inputs) if self.plan.form == "int4" else []

    def use_slot(
        self,
        position: list[Any],
        inputs: list[list[Any]],
        offsets: list[list[Any]],
        sums: list[list[Any]],
    ) -> tuple[list[Any], list[list[Any]]]:
        """Next position, and the sums with the products of the slot's halves, whose sums are the
        same if they have the same columns."""
        begin, sums = self.ring.await_slot(position, self.warp), [list(half) for half in sums]
        read = const(0)
        deep = 2 // len(sums)
        for half in range(2):
            own, part = sums[half // deep], half % deep
            xs = inputs[part * PIECES : (part + 1) * PIECES]
            given = begin, half, self.lane, xs
            if self.plan.form == "int8":
                sums[half // deep], read = add_int8(*given, own, read)
            else:
                own_offsets = offsets[2 * part : 2 * part + 2]
                sums[half // deep], read = add_int4(*given, own_offsets, own, read)
        position = self.ring.release(position, self.warp, self.lane.equals(0), read)
        return position, sums

    def store_sums(self, first: Int, sums: list[list[Any]]) -> None:
        """Write the sums of groups of 16 columns, from the block's group `first` on."""
        quads = self.plan.quads
        for i, half in enumerate(sums):
            half = half if len(half) == 4 else [arith.addf(half[n], half[4 + n]) for n in range(4)]
            at = ((first + i) * WARPS + self.warp) * self.plan.sums_bytes
            at = self.memory.sums + at + (self.g * quads + self.t) * 16
            store = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
            put = functools.partial(ptx, store, at, *half)
            run_if(self.t < quads, put)

    # Epilogue. A thread has two adjacent columns of two rows, or several such.

    def items(self, p: int) -> list["_Item"]:
        phase, quads = self.plan.phases[p], self.plan.quads
        first, count = self.panels[p]
        found = []
        for i in range(-(-self.plan.most_columns(phase) * 8 * quads // THREADS)):
            index = self.thread + i * THREADS
            group, rest = index // (8 * quads), index % (8 * quads)
            column = first * phase.panel_columns + group * COLUMNS + (rest // quads) * 2
            sums = self.memory.sums + group * (WARPS * self.plan.sums_bytes) + rest * 16
            item = _Item(group < count * phase.across, column, (rest % quads) * 2, sums)
            found.append(item)
        return found

    def load_epilogue(self, p: int) -> list["_Ahead"]:
        """Load what the epilogue needs before the products, which last longer than the loads."""
        phase, ref, found = self.plan.phases[p], self.refs[p], []
        for item in self.items(p):
            safe, scales, old = select(item.valid, item.column, const(0)), [], []
            if ref.scales is not None:
                load = "ld.global.v2.f32 {$0, $1}, [$2];"
                scales = ptx(load, address(ref.scales) + safe.wide() * 4, out="ff")
            for row in self.rows(item) if phase.residual else ():
                inside = select(row < self.plan.rows, row, const(0))
                at = self.stream + (inside * phase.N + safe).wide() * 2
                old.append(ptx("ld.global.cg.b32 $0, [$1];", at, out="r"))
            found.append(_Ahead(scales, old))
        return found

    def rows(self, item: "_Item") -> list[Int]:
        return [item.row + r for r in range(min(self.plan.rows, 2))]

    def finish(self, p: int, ahead: list["_Ahead"]) -> None:
        for item, own in zip(self.items(p), ahead, strict=True):
            run_if(item.valid, functools.partial(self.finish_item, p, item, own))
        if self.plan.phases[p].residual:
            self.stream = address(self.refs[p].outs[0])

    def finish_item(self, p: int, item: "_Item", ahead: "_Ahead") -> None:
        """Add the warps' sums, and store the results."""
        phase, sums = self.plan.phases[p], [zero() for _ in range(4)]
        for warp in range(WARPS):
            at = item.sums + warp * self.plan.sums_bytes
            part = ptx("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", at, out="ffff")
            sums = [arith.addf(a, b) for a, b in zip(sums, part, strict=True)]
        for r, row in enumerate(self.rows(item)):
            ys = [sums[r], sums[2 + r]]
            if ahead.scales:
                ys = [arith.mulf(y, scale) for y, scale in zip(ys, ahead.scales, strict=True)]
            if phase.normed:
                inverse = self.inverse_rms(phase.K, row)
                ys = [arith.mulf(y, inverse) for y in ys]
            old = ahead.old[r] if phase.residual else None
            put = functools.partial(self.store, p, item.column, row, ys, old)
            put() if self.plan.rows in (1, 2, 4, 8) else run_if(row < self.plan.rows, put)

    def inverse_rms(self, K: int, row: Int) -> Any:
        total = zero()
        for warp in range(WARPS):
            at = self.memory.squares + (row + warp * 8) * 4
            total = arith.addf(total, ptx("ld.shared.f32 $0, [$1];", at, out="f"))
        mean = arith.addf(arith.mulf(total, float_const(1 / K)), float_const(self.plan.eps))
        return ptx("rsqrt.approx.f32 $0, $1;", mean, out="f", effects=False)

    def store(self, p: int, column: Int, row: Int, ys: list[Any], old: Any) -> None:
        """Store two columns of a row: rounded; then their activation, or the stream plus them."""
        phase, both = self.plan.phases[p], to_word(*ys)
        column = column if phase.activation is None else column >> 1
        at = self.out_address(p, row, column)
        if phase.activation is not None:
            y = gated(phase.activation, *floats(both))
            ptx("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }", at, y)
            return
        if phase.residual:
            pairs = zip(floats(both), floats(old), strict=True)
            both = to_word(*[arith.addf(y, x) for y, x in pairs])
        ptx("st.global.b32 [$0], $1;", at, both)

    def out_address(self, p: int, row: Int, column: Int) -> Int:
        """Address of a value of the phase's results, whose parts have adjacent columns."""
        sizes, outs = self.plan.phases[p].outputs, self.refs[p].outs
        base, size, own = address(outs[0]), const(sizes[0]), column
        for first, n, out in zip(itertools.accumulate(sizes), sizes[1:], outs[1:], strict=False):
            later = column.compare("sge", first)
            base, size = select(later, address(out), base), select(later, const(n), size)
            own = select(later, column - first, own)
        return base + (row * size + own).wide() * 2


class _Item(NamedTuple):
    """Two columns and two rows, from these on. sums: address of the first warp's sums."""

    valid: Any
    column: Int
    row: Int
    sums: Int


class _Ahead(NamedTuple):
    """Scales of an item's columns, and words of the stream in its rows."""

    scales: list[Any]
    old: list[Any]
