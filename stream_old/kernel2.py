"""Consecutive products of a few rows in one kernel, whose weights never stop streaming.

One block runs on each multiprocessor. Each of its warps has a ring of slots in shared memory, and
asks for the next slot's codes as soon as it has used a slot. So while the blocks exchange the
results of one product, which are the inputs of the next, the codes of the next arrive.

A product's columns are in panels (`order`); a block has adjacent panels, and its warps have
different inputs, which they keep in registers. The exchange: all write their columns to global memory, then increment a counter of the
product, and wait until it has all increments. Counters are zeros before and after a call: the last
block to end resets them.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.matmul.streamed.emit import (
    Int, address, const, i32, loop, number, ptx, select, when, zero,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.order import (
    COLUMNS, PIECES, SLOT_INPUTS, SLOT_WORDS, slots_across,
)  # fmt: skip

WARPS = 8
THREADS = 32 * WARPS
POLLS = 1 << 15  # of a counter before a block gives up
COUNTER_BYTES = 128
COUNTERS = 8  # the last one is not zero after a timeout
LOG2E = 1.4426950408889634
LOAD = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"


class Phase(NamedTuple):
    """A product. normed: its input is an RMS norm. gated: columns alternate, gate and up.
    residual: the stream is added to the result, which becomes the stream."""

    K: int
    N: int
    normed: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def outputs(self) -> int:
        return self.N // 2 if self.gated else self.N

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


class StreamPlan(NamedTuple):
    """form: int8 or int4. rows: of the inputs, up to 8. slots: of a warp. eps: of the norms. ahead:
    slots of a warp that are fetched into the L2 cache for the following call, which begins with
    two products of few inputs. exchange, multiply: False only to time the rest."""

    form: str
    rows: int
    phases: tuple[Phase, ...]
    blocks: int
    slots: int
    eps: float
    ahead: int = 0
    exchange: bool = True
    multiply: bool = True
    stamps: bool = False

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


class PhaseRefs(NamedTuple):
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


@functools.partial(jax.jit, static_argnums=0)
def streamed_products(
    plan: StreamPlan, x, stream, state, weights, following: tuple[jax.Array, ...] = ()
) -> list[jax.Array]:
    """Results [M, outputs] of each phase. x [M, >= K]: the first phase's input. stream [M, D].
    weights: (codes, scales or None in int4, gain or None) of each phase, codes in the order of
    `to_stream`. state: int32 [COUNTERS, 32], zeros at first. following: codes of the next call's
    first two phases."""
    flat = [*jax.tree.leaves(weights), *following]

    def body(x_ref, stream_ref, state_ref, *refs, **memory):
        refs, outs = list(refs[: len(flat)]), list(refs[len(flat) :])
        stamps = outs.pop() if plan.stamps else None
        given = []
        for phase, out in zip(plan.phases, outs, strict=True):
            codes = refs.pop(0)
            scales = refs.pop(0) if plan.form == "int8" else None
            given.append(PhaseRefs(codes, scales, refs.pop(0) if phase.normed else None, out))
        args = (x_ref, stream_ref, state_ref, given, Memory(**memory), stamps, refs)
        types = jax.tree.map(lambda _: plgpu.RefType(), args)
        run = lambda _, *args: _Block(plan, x.shape[-1], *args).run()
        plgpu.inline_mgpu(arg_types=types)(run)(*args)

    most = max(map(plan.most_slots, plan.phases))
    scratch = dict(
        ring=plgpu.SMEM((WARPS * plan.slots * plan.slot_bytes // 4,), jnp.int32),
        barriers=plgpu.SMEM((WARPS * plan.slots * 2,), jnp.int32),
        sums=plgpu.SMEM((most * WARPS * plan.sums_bytes // 4,), jnp.float32),
        squares=plgpu.SMEM((WARPS * 8,), jnp.float32),
    )
    return hopper.pallas_kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((plan.rows, p.outputs), jnp.bfloat16) for p in plan.phases]
        + [jax.ShapeDtypeStruct((plan.blocks, 64), jnp.int32)] * plan.stamps,
        scratch_types=scratch,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
    )(x, stream, state, *flat)


class _Block:
    """One block, as operations of each thread."""

    def __init__(self, plan, width: int, x, stream, state, refs, memory, stamps, following=()):
        self.plan, self.refs, self.width = plan, refs, width
        self.memory = Memory(*map(address, memory))
        self.x, self.stream, self.state = address(x), address(stream), address(state)
        self.thread = Int(mgpu.utils.thread_idx())
        self.warp = Int(mgpu.utils.warp_idx())
        self.lane = self.thread & 31
        self.g, self.t = self.lane >> 2, self.lane & 3
        self.is_first_lane = self.lane.equals(0)
        self.is_first = self.thread.equals(0)
        block = Int(arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x)))
        self.stamps = None if stamps is None else address(stamps) + (block * 256).wide()
        self.stamped = 0
        self.first, self.panels, self.bases, self.ends = [], [], [], [const(0)]
        self.following = []
        for phase, ref in zip(plan.phases, refs, strict=True):
            total = phase.N // phase.panel_columns
            first = (block * total) // plan.blocks
            self.first.append(first)
            self.panels.append(((block + 1) * total) // plan.blocks - first)
            each = phase.turns * phase.across  # of a warp, in a panel
            skipped = first * (each * WARPS * plan.slot_bytes)
            self.bases.append(address(ref.codes) + skipped.wide())
            self.ends.append(self.ends[-1] + self.panels[-1] * each)
            if len(self.following) < len(following):
                codes = following[len(self.following)]
                self.following.append(address(codes) + skipped.wide())

    # Slots. Each warp counts its own.

    def slot_addresses(self, place: Int) -> tuple[Int, Int]:
        """Barrier and first byte of one of the warp's places in the ring."""
        at = place * WARPS + self.warp
        return self.memory.barriers + at * 8, self.memory.ring + at * self.plan.slot_bytes

    def ask(self, slot: Int, place: Int) -> None:
        """Start to load one of the warp's slots to a place."""
        count, size = len(self.plan.phases), self.plan.slot_bytes
        base, begin, two = self.bases[-1], self.ends[-2], const(self.plan.phases[-1].across - 1)
        for p in range(count - 2, -1, -1):
            earlier = slot < self.ends[p + 1]
            base = select(earlier, self.bases[p], base)
            begin = select(earlier, self.ends[p], begin)
            two = select(earlier, const(self.plan.phases[p].across - 1), two)
        own = slot - begin
        at = (((own >> two) * WARPS + self.warp) << two) + (own & two)
        source = base + at.wide() * size
        barrier, target = self.slot_addresses(place)

        def copy():
            ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", barrier)
            ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                f" [$0], [$1], {size}, [$2];",
                target, source, barrier,
            )  # fmt: skip

        when(arith.andi(self.is_first_lane, slot < self.ends[-1]), copy)
        if self.following:
            self.fetch(slot - self.ends[-1])

    def fetch(self, slot: Int) -> None:
        """Fetch a slot of the following call into the L2 cache, from slot 0 on."""
        earlier = slot < self.ends[1]
        base = select(earlier, self.following[0], self.following[1])
        own = select(earlier, slot, slot - self.ends[1])
        source = base + (own * WARPS + self.warp).wide() * self.plan.slot_bytes
        code = f"cp.async.bulk.prefetch.L2.global [$0], {self.plan.slot_bytes};"
        inside = arith.andi(slot.compare("sge", 0), slot < self.plan.ahead)
        when(arith.andi(self.is_first_lane, inside), lambda: ptx(code, source))

    def start(self) -> None:
        def init():
            for place in range(self.plan.slots):
                ptx("mbarrier.init.shared::cta.b64 [$0], 1;", self.slot_addresses(const(place))[0])
            ptx("fence.mbarrier_init.release.cluster;")
            ptx("fence.proxy.async.shared::cta;")

        when(self.is_first_lane, init)
        ptx("bar.warp.sync -1;")
        for place in range(self.plan.slots):
            self.ask(const(place), const(place))

    def await_slot(self, place: Int, parity: Int) -> Int:
        """First byte of a place, once it is loaded."""
        barrier, begin = self.slot_addresses(place)
        ptx(
            "{ .reg .pred p; .reg .b32 n; mov.b32 n, 4096; AGAIN:"
            " mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE;"
            " sub.s32 n, n, 1; setp.gt.s32 p, n, 0; @p bra AGAIN; DONE: }",
            barrier, parity,
        )  # fmt: skip
        return begin

    # Phases

    def stamp(self) -> None:
        if self.stamps is None:
            return
        clock = ptx("mov.u32 $0, %clock;", out="r")
        time = ptx("mov.u32 $0, %globaltimer_lo;", out="r")
        at = self.stamps + self.stamped * 8
        self.stamped += 1
        store = lambda: ptx("st.global.v2.b32 [$0], {$1, $2};", at, clock, time)
        when(self.is_first, store)

    def run(self) -> None:
        self.stamp()
        self.start()
        ring = [const(0).value, const(0).value, const(0).value]  # place, parity, slot
        source, gains = self.x, self.load_gains(0)
        for p, phase in enumerate(self.plan.phases):
            self.prefetch_epilogue(p)
            self.stamp()
            run = self.multiply if phase.across == 1 else self.multiply_wide
            ring = run(p, source, gains, ring)
            self.stamp()
            self.sync()
            self.stamp()
            self.finish(p)
            last = p + 1 == len(self.plan.phases)
            self.sync()
            self.stamp()
            when(self.is_first, self.end if last else functools.partial(self.signal, p))
            self.stamp()
            if not last:
                gains = self.load_gains(p + 1)
                if self.plan.exchange:
                    self.wait(p)
                self.sync()
                self.stamp()
                source, self.width = address(self.refs[p].out), phase.outputs

    def sync(self) -> None:
        ptx("bar.sync 0;")

    def counter(self, p: int) -> Int:
        return self.state + p * COUNTER_BYTES

    def signal(self, p: int) -> None:
        ptx("fence.acq_rel.gpu;")
        ptx("red.release.gpu.global.add.u32 [$0], 1;", self.counter(p))

    def end(self) -> None:
        """Reset the counters, in the last block: all others have waited for the last time."""
        last = len(self.plan.phases) - 1
        before = Int(ptx("atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;", self.counter(last), out="r"))

        def reset():
            for p in range(last + 1):
                ptx("st.relaxed.gpu.global.b32 [$0], 0;", self.counter(p))

        when(before.equals(self.plan.blocks - 1), reset)

    def wait(self, p: int) -> None:
        """Wait in the first thread until all blocks have signalled the phase."""

        def poll():
            left = ptx(
                f"{{ .reg .pred p; .reg .b32 n, c; mov.b32 n, {POLLS}; AGAIN:"
                f" ld.acquire.gpu.global.b32 c, [$1]; setp.ge.s32 p, c, {self.plan.blocks};"
                " @p bra DONE; sub.s32 n, n, 1; setp.gt.s32 p, n, 0; @p bra AGAIN;"
                " DONE: mov.b32 $0, n; }",
                self.counter(p), out="r",
            )  # fmt: skip
            failed = lambda: ptx("st.global.b32 [$0], 1;", self.counter(COUNTERS - 1))
            when(Int(left).equals(0), failed)

        when(self.is_first, poll)

    # Products

    def loaded(self, base: Int, turn: Int, row: Int, width: int) -> list[list]:
        """The lane's 16 bytes of each piece of 256 inputs, of the warp's turn."""
        at = row * (width * 2) + (turn * WARPS + self.warp) * (SLOT_INPUTS * 2) + self.t * 16
        load = "ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];"
        start = base + at.wide()
        return [ptx(load, start + 64 * piece, out="rrrr") for piece in range(PIECES)]

    def load_inputs(self, base: Int, turn: Int) -> list[list]:
        most = self.plan.rows - 1
        row = self.g if most == 7 else select(self.g < most, self.g, const(most))
        return self.loaded(base, turn, row, self.width)

    def load_gains(self, p: int) -> list:
        """Gains of the warp's inputs, for a norm."""
        phase = self.plan.phases[p]
        if not phase.normed:
            return []
        base = address(self.refs[p].gain)
        return [self.loaded(base, const(j), const(0), 0) for j in range(phase.turns)]

    def normed(self, inputs: list, gains: list) -> list:
        """Inputs times gains. Writes the sums of the inputs' squares to shared memory."""
        total = zero()
        for four in itertools.chain(*inputs):
            for x in itertools.chain(*map(_floats, four)):
                total = ptx("fma.rn.f32 $0, $1, $1, $2;", x, total, out="f", effects=False)
        for distance in (1, 2):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        at = self.memory.squares + (self.warp * 8 + self.g) * 4
        when(self.t.equals(0), lambda: ptx("st.shared.f32 [$0], $1;", at, total))
        times = lambda x, y: ptx("mul.rn.bf16x2 $0, $1, $2;", x, y, out="r", effects=False)
        return jax.tree.map(times, inputs, gains)

    def multiply(self, p: int, source: Int, gains: list, ring: list) -> list:
        """Write the warp's sums of each panel to shared memory."""
        phase = self.plan.phases[p]
        inputs = [self.load_inputs(source, const(j)) for j in range(phase.turns)]
        if phase.normed:
            inputs = self.normed(inputs, gains)

        def panel(n, ring):
            sums = self.zeros()
            for xs in inputs:
                ring, sums = self.use_slot(ring, xs, sums)
            self.store_sums(n, sums)
            return ring

        return loop(self.panels[p], ring, panel)

    def multiply_wide(self, p: int, source: Int, gains: list, ring: list) -> list:
        """As `multiply`, with too many inputs for registers: they are loaded one turn ahead, and
        multiply all slots across a panel."""
        phase = self.plan.phases[p]
        flat = lambda xs: list(itertools.chain(*xs))
        assert not phase.normed

        def panel(n, ring):
            def turn(j, carried):
                ring, words, sums = carried[:3], carried[3 : 3 + 4 * PIECES], carried[3 + 4 * PIECES :]
                following = j + 1
                wraps = following.equals(phase.turns)
                ahead = self.load_inputs(source, select(wraps, const(0), following))
                xs = [words[4 * i : 4 * i + 4] for i in range(PIECES)]
                parts, each = [], len(sums) // phase.across
                for i in range(phase.across):
                    ring, part = self.use_slot(ring, xs, sums[i * each : (i + 1) * each])
                    parts += part
                return [*ring, *flat(ahead), *parts]

            first = flat(self.load_inputs(source, const(0)))
            zeros = self.zeros() * phase.across
            found = loop(const(phase.turns), [*ring, *first, *zeros], turn)
            sums = found[3 + 4 * PIECES :]
            for i in range(phase.across):
                each = len(sums) // phase.across
                self.store_sums(n * phase.across + i, sums[i * each : (i + 1) * each])
            return found[:3]

        return loop(self.panels[p], ring, panel)

    def zeros(self) -> list:
        return [zero() for _ in range(8 if self.plan.form == "int8" else 4)]

    def use_slot(self, ring: list, xs: list, sums: list) -> tuple[list, list]:
        """Add the next slot's products, and ask for the slot that takes its place."""
        place, parity, slot = map(Int, ring)
        begin = self.await_slot(place, parity)
        if self.plan.multiply:
            add = self.add_int8 if self.plan.form == "int8" else self.add_int4
            sums = add(begin, xs, list(sums))
        ptx("bar.warp.sync -1;")
        self.ask(slot + self.plan.slots, place)
        place = place + 1
        wraps = place.equals(self.plan.slots)
        parity = parity ^ select(wraps, const(1), const(0))
        place = select(wraps, const(0), place)
        return [place.value, parity.value, (slot + 1).value], list(sums)

    def add_int8(self, begin: Int, xs: list, sums: list) -> list:
        """Add a slot's products to two accumulators of four."""
        codes = begin + self.lane * 16
        words = [ptx(LOAD, codes + 512 * b, out="rrrr") for b in range(PIECES)]
        for w, x in zip(words, xs, strict=True):
            for half in range(2):
                a = [_bf16(w[2 * half + i], shift) for i in range(2) for shift in (0, 8)]
                four = slice(4 * half, 4 * half + 4)
                sums[four] = _mma(a, x[2 * half : 2 * half + 2], sums[four])
        return sums

    def add_int4(self, begin: Int, xs: list, sums: list) -> list:
        """Add a slot's products, times the scales of its two groups."""
        codes, blocks = begin + self.lane * 16, PIECES // 2
        words = [ptx(LOAD, codes + 512 * b, out="rrrr") for b in range(blocks)]
        for group in range(2):
            at = begin + (512 * blocks + 32 * group) + self.g * 4
            scales = _floats(ptx("ld.shared.b32 $0, [$1];", at, out="r"))
            parts = [[zero() for _ in range(4)] for _ in range(2)]
            for block in range(group * blocks // 2, (group + 1) * blocks // 2):
                for i, word in enumerate(words[block]):
                    x = xs[2 * block + i // 2][2 * (i % 2) : 2 * (i % 2) + 2]
                    parts[i % 2] = _mma([_bf16_of_4(word, s) for s in (0, 4, 8, 12)], x, parts[i % 2])
            for i in range(4):
                part = arith.addf(parts[0][i], parts[1][i])
                sums[i] = ptx(
                    "fma.rn.f32 $0, $1, $2, $3;", part, scales[i // 2], sums[i], out="f",
                    effects=False,
                )  # fmt: skip
        return sums

    def store_sums(self, slot: Int, sums: list) -> None:
        if len(sums) == 8:
            sums = [arith.addf(sums[i], sums[4 + i]) for i in range(4)]
        quads = self.plan.quads
        at = (slot * WARPS + self.warp) * self.plan.sums_bytes + (self.g * quads + self.t) * 16
        store = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
        put = lambda: ptx(store, self.memory.sums + at, *sums)
        when(self.t < quads, put)

    # Epilogue. A thread has two adjacent columns of two rows, or several such.

    def items(self, p: int) -> list["_Item"]:
        phase, quads = self.plan.phases[p], self.plan.quads
        found = []
        for i in range(-(-self.plan.most_slots(phase) * 8 * quads // THREADS)):
            index = self.thread + i * THREADS
            slot, rest = index // (8 * quads), index % (8 * quads)
            column = self.first[p] * phase.panel_columns + slot * COLUMNS + (rest // quads) * 2
            valid = slot < self.panels[p] * phase.across
            sums = self.memory.sums + slot * (WARPS * self.plan.sums_bytes) + rest * 16
            found.append(_Item(valid, column, (rest % quads) * 2, sums))
        return found

    def prefetch_epilogue(self, p: int) -> None:
        """Load scales and the stream, which the epilogue needs, before the products."""
        phase, ref = self.plan.phases[p], self.refs[p]
        self.scales, self.old = [], []
        for item in self.items(p):
            safe = select(item.valid, item.column, const(0))
            if ref.scales is not None:
                load = "ld.global.v2.f32 {$0, $1}, [$2];"
                self.scales.append(ptx(load, address(ref.scales) + safe.wide() * 4, out="ff"))
            if phase.residual:
                old = []
                for row in self.rows(item):
                    inside = select(row < self.plan.rows, row, const(0))
                    at = self.stream + (inside * phase.outputs + safe).wide() * 2
                    old.append(ptx("ld.global.cg.b32 $0, [$1];", at, out="r"))
                self.old.append(old)

    def rows(self, item: "_Item") -> list[Int]:
        return [item.row + r for r in range(min(self.plan.rows, 2))]

    def finish(self, p: int) -> None:
        phase = self.plan.phases[p]
        for i, item in enumerate(self.items(p)):
            when(item.valid, functools.partial(self.finish_item, p, i, item))
        if phase.residual:
            self.stream = address(self.refs[p].out)

    def finish_item(self, p: int, i: int, item: "_Item") -> None:
        phase = self.plan.phases[p]
        sums = self.zeros()[:4]
        for warp in range(WARPS):
            part = ptx(
                "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
                item.sums + warp * self.plan.sums_bytes, out="ffff",
            )  # fmt: skip
            sums = [arith.addf(a, b) for a, b in zip(sums, part, strict=True)]
        for r, row in enumerate(self.rows(item)):
            ys = [sums[r], sums[2 + r]]
            if self.scales:
                ys = [arith.mulf(y, scale) for y, scale in zip(ys, self.scales[i], strict=True)]
            if phase.normed:
                inverse = self.inverse_rms(phase.K, row)
                ys = [arith.mulf(y, inverse) for y in ys]
            old = self.old[i][r] if phase.residual else None
            put = functools.partial(self.store, p, item.column, row, ys, old)
            put() if self.plan.rows in (1, 2, 4, 8) else when(row < self.plan.rows, put)

    def inverse_rms(self, K: int, row: Int) -> Any:
        total = zero()
        for warp in range(WARPS):
            at = self.memory.squares + (row + warp * 8) * 4
            total = arith.addf(total, ptx("ld.shared.f32 $0, [$1];", at, out="f"))
        mean = arith.addf(arith.mulf(total, number(1 / K)), number(self.plan.eps))
        return ptx("rsqrt.approx.f32 $0, $1;", mean, out="f", effects=False)

    def store(self, p: int, column: Int, row: Int, ys: list, old: Any) -> None:
        phase, both = self.plan.phases[p], _packed(*ys)
        if phase.gated:
            column = column >> 1
        at = address(self.refs[p].out) + (row * phase.outputs + column).wide() * 2
        if phase.gated:
            gate, up = _floats(both)
            power = arith.mulf(gate, number(-LOG2E))
            below = arith.addf(number(1), ptx("ex2.approx.f32 $0, $1;", power, out="f"))
            y = arith.mulf(ptx("div.full.f32 $0, $1, $2;", gate, below, out="f"), up)
            ptx("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }", at, y)
            return
        if phase.residual:
            pairs = zip(_floats(both), _floats(old), strict=True)
            both = _packed(*[arith.addf(y, old) for y, old in pairs])
        ptx("st.global.b32 [$0], $1;", at, both)


class _Item(NamedTuple):
    """Two columns and two rows, from these on. sums: address of the first warp's sums."""

    valid: Any
    column: Int
    row: Int
    sums: Int


def _floats(word: Any) -> list:
    """The lower and the upper bfloat16 of a word, in float32."""
    shift = "shl.b32 $0, $1, 16;", "and.b32 $0, $1, -65536;"
    bits = [ptx(code, word, out="r", effects=False) for code in shift]
    return [arith.bitcast(ir.F32Type.get(), x) for x in bits]


def _packed(low: Any, high: Any) -> Any:
    return ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, out="r", effects=False)


def _mma(a: list, b: list, sums: list) -> list:
    """Sums of 16 columns and 8 rows plus the products of 16 inputs."""
    return ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3},"
        " {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        *a, *b, *sums, out="ffff", effects=False,
    )  # fmt: skip


def _bf16(word: Any, shift: int) -> Any:
    """int8 codes of one column and two inputs, as bfloat16: bytes 0 and 2 of the word, or 1 and 3.

    A byte's lower 7 bits are the mantissa of 128 + bits; its top bit is the lowest of the exponent
    of 128, or of 256. Their difference is the code.
    """
    first = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return ptx(
        "{ .reg .b32 t, m, s; " + first + " lop3.b32 m, t, 0x007F007F, 0x43004300, 0xEA;"
        " lop3.b32 s, t, 0x00800080, 0x43004300, 0xEA; sub.rn.bf16x2 $0, m, s; }",
        word, out="r", effects=False,
    )  # fmt: skip


def _bf16_of_4(word: Any, shift: int) -> Any:
    """4-bit codes, less 8, of one column and two inputs: 128 + code, less 136."""
    first = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return ptx(
        "{ .reg .b32 t, m, s; " + first + " lop3.b32 m, t, 0x000F000F, 0x43004300, 0xEA;"
        " mov.b32 s, 0x43084308; sub.rn.bf16x2 $0, m, s; }",
        word, out="r", effects=False,
    )  # fmt: skip
