"""One block of the kernel of `streamed`, as operations of each thread.

It has adjacent panels of each product. Some of its warps load codes (`ring`), most multiply
different inputs, with a row of inputs in each 4 lanes, and some add their sums (`finish`).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, gpu

from jaxtrain_kernels.hopper.emit import (
    Int,
    address,
    concurrently,
    const,
    int_type,
    loop,
    loop_while,
    ptx,
    run_if,
    select,
    zero,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.claims import Claims
from jaxtrain_kernels.matmul.streamed.exchange import Exchange
from jaxtrain_kernels.matmul.streamed.finish import Finisher, Sums
from jaxtrain_kernels.matmul.streamed.fixed import (
    FixedInputs,
    add_int4_fixed,
    scale_of,
    starts_of_groups,
)
from jaxtrain_kernels.matmul.streamed.inputs import WarpInputs
from jaxtrain_kernels.matmul.streamed.plan import (
    FINISHERS,
    FIXED_BYTES,
    LOADERS,
    Memory,
    PhaseRefs,
    StreamPlan,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.registers import (
    add_int4,
    add_int8,
    offsets_of_groups,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.ring import Ring

AHEAD_WORDS = 16  # of a lane's inputs, if they are not all in registers


class StreamRefs(NamedTuple):
    """References to the call's arrays. x: the first input; its rows have `width` values. exchanged:
    memory of `Exchange`. phases: of each product."""

    x: Any
    width: int
    stream: Any
    exchanged: Any
    phases: Sequence[PhaseRefs]


class StreamBlock:
    """A block's registers, and what its threads do. memory: addresses."""

    def __init__(self, plan: StreamPlan, operands: StreamRefs, memory: Memory):
        self.plan, self.refs = plan, tuple(operands.phases)
        self.memory = memory
        self.ring, self.sums = Ring(plan, self.memory), Sums(plan, self.memory)
        self.source, self.width = address(operands.x), operands.width
        self.stream, self.exchanged = address(operands.stream), address(operands.exchanged)
        self.thread = Int(mgpu.utils.thread_idx())
        self.warp, self.lane = Int(mgpu.utils.warp_idx()), self.thread & 31
        self.fixed = FixedInputs(self.memory.fixed + self.warp * FIXED_BYTES, self.lane)
        self.block = Int(arith.index_cast(int_type(), gpu.block_id(gpu.Dimension.x)))
        self.panels = []  # first, and number, in each phase, besides those that blocks claim
        for phase in plan.phases:
            total = phase.N // phase.panel_columns
            if claimed := plan.claimed(phase):
                count = (total - claimed) // plan.blocks
                self.panels.append((self.block * count, const(count)))
                continue
            first = (self.block * total) // plan.blocks
            self.panels.append((first, ((self.block + 1) * total) // plan.blocks - first))

    def run(self) -> None:
        loader = self.warp - self.plan.warps
        finisher = loader - LOADERS
        is_loader = arith.andi(loader.compare("sge", 0), finisher < 0)
        is_other = arith.ori(loader < 0, finisher.compare("sge", 0))
        loads = arith.andi(is_loader, self.lane.equals(0))
        threads = 32 * (self.plan.warps + LOADERS + FINISHERS)
        run_if(is_loader, lambda: self.init_loader(loader, threads))
        run_if(self.thread.equals(0), self.sums.init)
        run_if(is_other, lambda: ptx(f"bar.sync 2, {threads};"))
        concurrently(
            (loads, lambda: self.load_all(loader)),
            (loader < 0, self.multiply_all),
            (finisher.compare("sge", 0), lambda: self.finish_all(finisher)),
        )

    def init_loader(self, loader: Int, threads: int) -> None:
        """Loaders wait for each other and for no other warp."""
        run_if(self.lane.equals(0), lambda: self.ring.init(loader))
        for p, phase in enumerate(self.plan.phases):
            if self.plan.claimed(phase):
                run_if(loader.equals(0), functools.partial(self.claims(p).init, self.lane))
        ptx(f"bar.sync 3, {32 * LOADERS};")
        ptx(f"bar.arrive 2, {threads};")

    def claims(self, p: int) -> Claims:
        return Claims(self.plan, self.memory, p)

    def load_all(self, loader: Int) -> None:
        exchanged = Exchange(self.plan, self.exchanged)
        counters = [exchanged.counter(p) for p in range(len(self.refs))]
        self.ring.load(loader, [x.codes for x in self.refs], self.panels, counters)

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
            source, width = self.source, self.width
            if p:
                source, width = exchanged.address(p - 1), sum(self.plan.phases[p - 1].outputs)
            given = source, width, self.warp, self.lane
            inputs = WarpInputs(self.plan, p, *given, exchanged=p > 0)
            multiply = self.multiply if phase.turns == 1 else self.multiply_wide
            position, panels = multiply(p, inputs, base, position)
            base = base + panels * phase.across
        ptx(f"bar.arrive 1, {32 * (self.plan.warps + FINISHERS)};")

    # Products

    def multiply(
        self, p: int, inputs: WarpInputs, base: Int, position: list[Any]
    ) -> tuple[list[Any], Int]:
        """Give the warp's sums of each panel to those that finish. All its inputs are in registers.
        base: number of the phase's first group of columns. Returns the next position, and the
        number of panels."""
        phase, loads, first = self.plan.phases[p], -(-inputs.count // inputs.each), const(0)
        gain = self.refs[p].gain
        gains = [] if gain is None else inputs.load_gains(address(gain), loads)
        inputs.await_some()
        words = inputs.complete(first, inputs.load(first, loads))
        if phase.normed:
            inputs.put_squares(words, self.memory.squares)
        if gains:
            times = lambda x, y: ptx("mul.rn.bf16x2 $0, $1, $2;", x, y, out="r", effects=False)
            words = [times(x, y) for x, y in zip(words, gains, strict=True)]
        scales = scale_of(words) if self.plan.is_fixed(phase) else None
        operands = self.operands(inputs, words, scales)(0, inputs.count)

        def panel(n: Int, position: list[Any]) -> list[Any]:
            sums = [self.zeros() for _ in range(phase.across)]
            position, sums = self.use_slot(position, operands, sums)
            self.store_sums(base + n * phase.across, sums, scales)
            return position

        count = self.panels[p][1]
        position = loop(count, position, panel)
        if not self.plan.claimed(phase):
            return position, count
        claims = self.claims(p)

        def claimed(carried: list[Any]) -> list[Any]:
            number, position = Int(carried[0]), panel(count + Int(carried[0]), carried[2:])
            number = number + 1
            return [number.value, claims.read(number).value, *position]

        start = [const(0).value, claims.read(const(0)).value, *position]
        number, _, *position = loop_while(start, lambda x: Int(x[1]).compare("sge", 0), claimed)
        return position, count + Int(number)

    def multiply_wide(
        self, p: int, inputs: WarpInputs, base: Int, position: list[Any]
    ) -> tuple[list[Any], Int]:
        """As `multiply`, with more inputs, of which some loads are in registers ahead."""
        phase = self.plan.phases[p]
        turns = max(1, inputs.each // inputs.in_turn)  # of a step
        loads = max(1, inputs.in_turn // inputs.each)
        steps = phase.turns // turns
        total = -(-inputs.count // inputs.each)
        is_fixed = self.plan.is_fixed(phase)
        ahead = min(total, max(AHEAD_WORDS // 4, loads) // loads * loads)
        ahead = total if is_fixed else ahead

        def step(words: list[Any], turns: int, state: list[Any], scales: Any) -> list[Any]:
            """Position and sums after some turns, whose inputs are these words."""
            of_pieces = self.operands(inputs, words, scales)
            for turn in range(turns):
                operands = of_pieces(turn * inputs.in_turn, inputs.in_turn)
                position, sums = self.use_slot(state[:2], operands, self.by_half(state[2:]))
                state = [*position, *itertools.chain(*sums)]
            return state

        def panel(n: Int, position: list[Any]) -> list[Any]:
            def body(j: Int, carried: list[Any]) -> list[Any]:
                queue, state, first = carried[: 4 * ahead], carried[4 * ahead :], j * loads
                words, rest = inputs.complete(first, queue[: 4 * loads]), queue[4 * loads :]
                if ahead == total:  # all are in the queue
                    return [*rest, *words, *step(words, turns, state, scales)]
                following = first + ahead
                following = select(following < total, following, const(0))
                more = inputs.load(following, loads)
                return [*rest, *more, *step(words, turns, state, scales)]

            inputs.await_some()
            firsts = range(0, ahead, loads)
            queue = [word for n in firsts for word in inputs.load(const(n), loads)]
            scales = None
            if is_fixed:
                parts = [queue[4 * n : 4 * (n + loads)] for n in firsts]
                parts = [inputs.complete(const(n), x) for n, x in zip(firsts, parts, strict=True)]
                queue = list(itertools.chain(*parts))
                scales = scale_of(queue)
            carried = [*queue, *position, *self.zeros(), *self.zeros()]
            found = loop(const(steps), carried, body)
            queue, state = found[: 4 * ahead], found[4 * ahead :]
            if rest := phase.turns % turns:
                words = inputs.complete(const(steps * loads), queue[: 4 * loads])
                state = step(words, rest, state, scales)
            self.store_sums(base + n * phase.across, self.by_half(state[2:]), scales)
            return state[:2]

        count = self.panels[p][1]
        return loop(count, position, panel), count

    def by_half(self, sums: list[Any]) -> list[list[Any]]:
        return [list(half) for half in itertools.batched(sums, len(sums) // 2)]

    def zeros(self) -> list[Any]:
        return [zero() for _ in range(8 if self.plan.form == "int8" else 4)]

    def operands(
        self, inputs: WarpInputs, words: list[Any], scales: Any
    ) -> Callable[[int, int], "_Operands"]:
        """A function of the first piece and the number of pieces. scales: `scale_of`'s, or None."""
        if scales is not None:
            pieces = self.fixed.pieces(words, scales[0])
            of_pieces = lambda first, count: pieces[first : first + count]
            return lambda *at: _Operands(of_pieces(*at), starts_of_groups(of_pieces(*at)), True)
        if self.plan.form == "int8":
            return lambda *at: _Operands(inputs.pieces(words, *at), [], False)

        def of_int4(first: int, count: int) -> _Operands:
            pieces = inputs.pieces(words, first, count)
            return _Operands(pieces, offsets_of_groups(pieces), False)

        return of_int4

    def use_slot(
        self, position: list[Any], operands: "_Operands", sums: list[list[Any]]
    ) -> tuple[list[Any], list[list[Any]]]:
        """Next position, and the sums with the products of the slot's halves, whose sums are the
        same if they have the same columns."""
        begin, sums = self.ring.await_slot(position, self.warp), [list(half) for half in sums]
        read, deep = const(0), 2 // len(sums)
        of_half = functools.partial(_part, parts=deep)
        add = add_int4_fixed if operands.is_fixed else add_int4
        for half in range(2):
            own, part = sums[half // deep], half % deep
            given = begin, half, self.lane, of_half(operands.pieces, part)
            if self.plan.form == "int8":
                sums[half // deep], read = add_int8(*given, own, read)
            else:
                sums[half // deep], read = add(*given, of_half(operands.offsets, part), own, read)
        position = self.ring.release(position, self.warp, self.lane.equals(0), read)
        return position, sums

    def store_sums(self, first: Int, sums: list[list[Any]], scales: Any) -> None:
        """Give the sums of groups of 16 columns, from the call's group `first` on."""
        for i, half in enumerate(sums):
            half = half if len(half) == 4 else [arith.addf(half[n], half[4 + n]) for n in range(4)]
            half = half if scales is None else self.fixed.weigh(half, scales[1])
            self.sums.store(first + i, self.warp, self.lane, half)


class _Operands(NamedTuple):
    """Pieces, and what a group's sums begin with in int4."""

    pieces: list[list[Any]]
    offsets: list[list[Any]]
    is_fixed: bool


def _part(values: list[Any], part: int, parts: int) -> list[Any]:
    """One of adjacent parts of equal length."""
    size = len(values) // parts
    return values[part * size : (part + 1) * size]
