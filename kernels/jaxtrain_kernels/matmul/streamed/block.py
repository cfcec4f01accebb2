"""One block of the kernel of `streamed`, as operations of each thread.

It has adjacent panels of each product. Some of its warps load codes (`ring`), most multiply
different inputs, with a row of inputs in each 4 lanes, and some add their sums (`finish`).
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, gpu

from jaxtrain_kernels.matmul.streamed import exchange
from jaxtrain_kernels.matmul.streamed.emit import (
    Int,
    address,
    concurrently,
    const,
    int_type,
    loop,
    ptx,
    run_if,
    select,
    zero,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.exchange import Exchange
from jaxtrain_kernels.matmul.streamed.finish import Finisher, Sums
from jaxtrain_kernels.matmul.streamed.plan import (
    FINISHERS,
    LOADERS,
    Memory,
    PhaseRefs,
    StreamPlan,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.registers import (
    add_int4,
    add_int8,
    floats,
    offsets_of_groups,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.ring import Ring


class StreamRefs(NamedTuple):
    """References to the call's arrays. x: the first input; its rows have `width` values. exchanged:
    memory of `Exchange`. phases: of each product."""

    x: Any
    width: int
    stream: Any
    exchanged: Any
    phases: Sequence[PhaseRefs]


class StreamBlock:
    """A block's registers, and what its threads do."""

    def __init__(self, plan: StreamPlan, operands: StreamRefs, memory: Memory):
        self.plan, self.refs = plan, tuple(operands.phases)
        self.memory = Memory(*map(address, memory))
        self.ring, self.sums = Ring(plan, self.memory), Sums(plan, self.memory)
        self.source, self.width = address(operands.x), operands.width
        self.stream, self.exchanged = address(operands.stream), address(operands.exchanged)
        self.thread = Int(mgpu.utils.thread_idx())
        self.warp, self.lane = Int(mgpu.utils.warp_idx()), self.thread & 31
        self.g, self.t = self.lane >> 2, self.lane & 3
        self.block = Int(arith.index_cast(int_type(), gpu.block_id(gpu.Dimension.x)))
        self.panels = []  # first, and number, in each phase
        for phase in plan.phases:
            total = phase.N // phase.panel_columns
            first = (self.block * total) // plan.blocks
            self.panels.append((first, ((self.block + 1) * total) // plan.blocks - first))

    def run(self) -> None:
        loader = self.warp - self.plan.warps
        finisher = loader - LOADERS
        is_loader = arith.andi(loader.compare("sge", 0), finisher < 0)
        is_other = arith.ori(loader < 0, finisher.compare("sge", 0))
        loads = arith.andi(is_loader, self.lane.equals(0))
        groups = self.ring.served(loader)
        run_if(loads, lambda: self.ring.init(groups))
        run_if(self.thread.equals(0), self.sums.init)
        threads = 32 * (self.plan.warps + LOADERS + FINISHERS)
        run_if(is_loader, lambda: ptx(f"bar.arrive 2, {threads};"))  # loads need no other warp
        run_if(is_other, lambda: ptx(f"bar.sync 2, {threads};"))
        concurrently(
            (loads, lambda: self.ring.load(groups, [x.codes for x in self.refs], self.panels)),
            (loader < 0, self.multiply_all),
            (finisher.compare("sge", 0), lambda: self.finish_all(finisher)),
        )

    def finish_all(self, finisher: Int) -> None:
        exchanged = Exchange(self.plan, self.exchanged)
        exchanged.clear(self.block, finisher * 32 + self.lane)
        given = self.stream, exchanged, self.sums, self.lane
        Finisher(self.plan, self.refs, *given).run(finisher, self.panels)
        ptx(f"bar.sync 1, {32 * (self.plan.warps + FINISHERS)};")
        run_if(arith.andi(finisher.equals(0), self.lane.equals(0)), exchanged.end)

    def multiply_all(self) -> None:
        exchanged = Exchange(self.plan, self.exchanged)
        position, base = [const(0).value] * 2, const(0)
        for p, phase in enumerate(self.plan.phases):
            if p:
                self.source = exchanged.address(p - 1)
                self.width = sum(self.plan.phases[p - 1].outputs)
            multiply = self.multiply if phase.turns == 1 else self.multiply_wide
            position = multiply(p, base, position)
            base = base + self.panels[p][1] * phase.across
        ptx(f"bar.arrive 1, {32 * (self.plan.warps + FINISHERS)};")

    # Inputs

    def place(self, p: int, turn: Int, row: Int, width: int) -> Int:
        """Offset of the lane's first 16 bytes of a slot's inputs, of the warp's turn."""
        inputs = self.plan.half_inputs * self.plan.phases[p].deep
        at = row * (width * 2) + (turn * self.plan.warps + self.warp) * (inputs * 2) + self.t * 16
        return at.wide()

    def address_of_inputs(self, p: int, turn: Int) -> Int:
        most = self.plan.rows - 1
        row = self.g if most == 7 else select(self.g < most, self.g, const(most))
        return self.source + self.place(p, turn, row, self.width)

    def load_inputs(self, p: int, turn: Int) -> list[Any]:
        """Words of a slot's inputs, of which some may not have been written yet."""
        pieces = self.plan.pieces * self.plan.phases[p].deep
        return exchange.load(self.address_of_inputs(p, turn), pieces)

    def complete_inputs(self, p: int, turn: Int, words: list[Any]) -> list[list[Any]]:
        """The four words of each piece, when all are there."""
        words = exchange.complete(self.address_of_inputs(p, turn), words) if p else words
        return [list(four) for four in itertools.batched(words, 4)]

    def load_gains(self, p: int) -> list[list[Any]]:
        """Gains of the warp's inputs, for a norm."""
        gain, pieces = self.refs[p].gain, self.plan.pieces * self.plan.phases[p].deep
        if gain is None:
            return []
        words = exchange.load(address(gain) + self.place(p, const(0), const(0), 0), pieces)
        return [list(four) for four in itertools.batched(words, 4)]

    def normed(self, p: int, inputs: list[list[Any]], gains: list[list[Any]]) -> list[list[Any]]:
        """Inputs times gains, if there are any. Writes the sums of the inputs' squares to shared
        memory, before the sums of the products."""
        total = zero()
        for x in itertools.chain(*(floats(word) for four in inputs for word in four)):
            total = ptx("fma.rn.f32 $0, $1, $1, $2;", x, total, out="f", effects=False)
        for distance in (1, 2):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        at = self.memory.squares + ((self.warp + p * self.plan.warps) * 8 + self.g) * 4
        run_if(self.t.equals(0), lambda: ptx("st.shared.f32 [$0], $1;", at, total))
        times = lambda x, y: ptx("mul.rn.bf16x2 $0, $1, $2;", x, y, out="r", effects=False)
        return jax.tree.map(times, inputs, gains) if gains else inputs

    # Products

    def multiply(self, p: int, base: Int, position: list[Any]) -> list[Any]:
        """Give the warp's sums of each panel to those that finish. All its inputs are in registers.
        base: number of the phase's first group of columns."""
        phase, gains = self.plan.phases[p], self.load_gains(p)
        inputs = self.complete_inputs(p, const(0), self.load_inputs(p, const(0)))
        if phase.normed:
            inputs = self.normed(p, inputs, gains)
        offsets = self.offsets(inputs)

        def panel(n: Int, position: list[Any]) -> list[Any]:
            sums = [self.zeros() for _ in range(phase.across)]
            position, sums = self.use_slot(position, inputs, offsets, sums)
            self.store_sums(base + n * phase.across, sums)
            return position

        return loop(self.panels[p][1], position, panel)

    def multiply_wide(self, p: int, base: Int, position: list[Any]) -> list[Any]:
        """As `multiply`, with more inputs, which are loaded one turn ahead."""
        phase, end = self.plan.phases[p], 2 + 4 * self.plan.pieces

        def panel(n: Int, position: list[Any]) -> list[Any]:
            def turn(j: Int, carried: list[Any]) -> list[Any]:
                inputs = self.complete_inputs(p, j, carried[2:end])
                following = j + 1
                wraps = following.equals(phase.turns)
                ahead = self.load_inputs(p, select(wraps, const(0), following))
                sums = self.by_half(carried[end:])
                position, sums = self.use_slot(carried[:2], inputs, self.offsets(inputs), sums)
                return [*position, *ahead, *itertools.chain(*sums)]

            carried = [*position, *self.load_inputs(p, const(0)), *self.zeros(), *self.zeros()]
            found = loop(const(phase.turns), carried, turn)
            self.store_sums(base + n * phase.across, self.by_half(found[end:]))
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
        read, deep = const(0), 2 // len(sums)
        of_half = functools.partial(_part, parts=deep)
        for half in range(2):
            own, part = sums[half // deep], half % deep
            given = begin, half, self.lane, of_half(inputs, part)
            if self.plan.form == "int8":
                sums[half // deep], read = add_int8(*given, own, read)
            else:
                sums[half // deep], read = add_int4(*given, of_half(offsets, part), own, read)
        position = self.ring.release(position, self.warp, self.lane.equals(0), read)
        return position, sums

    def store_sums(self, first: Int, sums: list[list[Any]]) -> None:
        """Give the sums of groups of 16 columns, from the call's group `first` on."""
        for i, half in enumerate(sums):
            half = half if len(half) == 4 else [arith.addf(half[n], half[4 + n]) for n in range(4)]
            self.sums.store(first + i, self.warp, self.lane, half)


def _part(values: list[Any], part: int, parts: int) -> list[Any]:
    """One of adjacent parts of equal length."""
    size = len(values) // parts
    return values[part * size : (part + 1) * size]
