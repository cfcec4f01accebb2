"""Consecutive products of a few rows in one kernel, whose weights never stop streaming.

One block runs on each multiprocessor. Each of its warps has a ring of slots in shared memory, and
asks for the next slot's codes as soon as it has used a slot. So while the blocks exchange the
results of one product, which are the inputs of the next, the codes of the next arrive.

A product's columns are in panels of 16; a block has adjacent panels, and its warps have different
inputs. The exchange: all write their columns to global memory, then increment a counter of the
product, and wait until it has all increments. Counters are never reset: the last product's, which
all blocks read before any of them can increment it, tells where the others began.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.matmul.streamed.emit import (
    Int, address, const, loop, number, ptx, select, when, zero,
)  # fmt: skip
from order1 import COLUMNS, INPUTS

WARPS = 8
THREADS = 32 * WARPS
BLOCKS = 8  # of a slot
SLOT_INPUTS = BLOCKS * INPUTS
POLLS = 1 << 15  # of a counter before a block gives up
COUNTER_BYTES = 128
COUNTERS = 8  # the last one is not zero after a timeout


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


class StreamPlan(NamedTuple):
    """slots: of a warp. eps: of the norms. exchange, multiply: False only to time the rest."""

    phases: tuple[Phase, ...]
    blocks: int
    slots: int
    eps: float
    exchange: bool = True
    multiply: bool = True
    stamps: bool = False

    @property
    def slot_bytes(self) -> int:
        return SLOT_INPUTS * COLUMNS

    @property
    def most_panels(self) -> int:
        return max(-(-p.N // COLUMNS // self.blocks) for p in self.phases)


class PhaseRefs(NamedTuple):
    codes: Any
    scales: Any
    gain: Any
    out: Any


class Memory(NamedTuple):
    """Shared memory. ring: slots; barriers: of slots; inputs: of a product; sums: of panels by warps; squares:
    of warps."""

    ring: Any
    barriers: Any
    inputs: Any
    sums: Any
    squares: Any


@functools.partial(jax.jit, static_argnums=0)
def streamed_products(plan: StreamPlan, x, stream, state, weights) -> list[jax.Array]:
    """Results [1, outputs] of each phase. x [1, K]: the first phase's input. stream [1, D].
    weights: (codes, scales, gain) of each phase. state: int32 [COUNTERS, 32], zeros at first."""
    flat = [array for triple in weights for array in triple if array is not None]
    count = len(plan.phases)

    def body(x, stream, state, *refs, **memory):
        refs, outs = list(refs[: len(flat)]), list(refs[len(flat) :])
        stamps = outs.pop() if plan.stamps else None
        given = []
        for phase, out in zip(plan.phases, outs, strict=True):
            codes, scales = refs.pop(0), refs.pop(0)
            given.append(PhaseRefs(codes, scales, refs.pop(0) if phase.normed else None, out))
        args = (x, stream, state, given, Memory(**memory), stamps)
        types = jax.tree.map(lambda _: plgpu.RefType(), args)
        run = lambda _, *args: _Block(plan, *args).run()
        plgpu.inline_mgpu(arg_types=types)(run)(*args)

    widest = max(p.K for p in plan.phases)
    scratch = dict(
        ring=plgpu.SMEM((WARPS * plan.slots * plan.slot_bytes // 4,), jnp.int32),
        barriers=plgpu.SMEM((WARPS * plan.slots * 2,), jnp.int32),
        inputs=plgpu.SMEM((widest // 2,), jnp.int32),
        sums=plgpu.SMEM((plan.most_panels * WARPS * COLUMNS,), jnp.float32),
        squares=plgpu.SMEM((WARPS,), jnp.float32),
    )
    return hopper.pallas_kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((1, p.outputs), jnp.bfloat16) for p in plan.phases]
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

    def __init__(self, plan: StreamPlan, x, stream, state, refs, memory, stamps):
        self.plan, self.refs = plan, refs
        self.memory = Memory(*map(address, memory))
        self.x, self.stream, self.state = address(x), address(stream), address(state)
        i32 = ir.IntegerType.get_signless(32)
        self.thread = Int(mgpu.utils.thread_idx())
        self.warp = Int(mgpu.utils.warp_idx())
        self.lane = self.thread & 31
        self.g, self.t = self.lane >> 2, self.lane & 3
        self.is_first_lane = self.lane.equals(0)
        self.is_first = self.thread.equals(0)
        block = Int(arith.index_cast(i32, gpu.block_id(gpu.Dimension.x)))
        self.stamps = None if stamps is None else address(stamps) + (block * 256).wide()
        self.stamped = 0
        self.first, self.panels, self.each, ends = [], [], [], [const(0)]
        for phase in plan.phases:
            total = phase.N // COLUMNS
            first = (block * total) // plan.blocks
            self.first.append(first)
            self.panels.append(((block + 1) * total) // plan.blocks - first)
            self.each.append(phase.K // SLOT_INPUTS)
            ends.append(ends[-1] + self.panels[-1] * self.each[-1])
        self.ends = ends[1:]
        self.bases = [
            address(ref.codes) + (first * each - end).wide() * plan.slot_bytes
            for ref, first, each, end in zip(refs, self.first, self.each, ends, strict=False)
        ]

    # Slots. A warp's i-th slot is the block's slot 8 i + warp.

    def slot_addresses(self, place: Int) -> tuple[Int, Int]:
        """Barrier and first byte of one of the warp's places in the ring."""
        at = place * WARPS + self.warp
        return self.memory.barriers + at * 8, self.memory.ring + at * self.plan.slot_bytes

    def ask(self, slot: Int, place: Int) -> None:
        """Start to load one of the block's slots to a place."""
        base = self.bases[-1]
        for end, other in list(zip(self.ends, self.bases, strict=True))[-2::-1]:
            base = select(slot < end, other, base)
        source = base + slot.wide() * self.plan.slot_bytes
        barrier, target = self.slot_addresses(place)
        size = self.plan.slot_bytes

        def copy():
            ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", barrier)
            ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                f" [$0], [$1], {size}, [$2];",
                target, source, barrier,
            )  # fmt: skip

        when(arith.andi(self.is_first_lane, slot < self.ends[-1]), copy)

    def start(self) -> None:
        def init():
            for place in range(self.plan.slots):
                ptx("mbarrier.init.shared::cta.b64 [$0], 1;", self.slot_addresses(const(place))[0])
            ptx("fence.mbarrier_init.release.cluster;")
            ptx("fence.proxy.async.shared::cta;")

        when(self.is_first_lane, init)
        ptx("bar.warp.sync -1;")
        for place in range(self.plan.slots):
            self.ask(self.warp + place * WARPS, const(place))

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

    # Products

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
        began = ptx("ld.relaxed.gpu.global.b32 $0, [$1];", self.counter(-1), out="r")
        self.began = Int(began)
        self.load_inputs(self.x, self.plan.phases[0], self.refs[0])
        self.sync()
        ring = [const(0).value, const(0).value, self.warp.value]  # place, parity, slot
        for p, phase in enumerate(self.plan.phases):
            self.prefetch_epilogue(p)
            self.stamp()
            ring = self.multiply(p, ring)
            self.stamp()
            self.sync()
            self.stamp()
            self.finish(p)
            last = p + 1 == len(self.plan.phases)
            self.sync()
            self.stamp()
            self.signal(-1 if last else p)
            self.stamp()
            if not last:
                following = self.plan.phases[p + 1], self.refs[p + 1]
                gains = self.load_gains(*following)
                if self.plan.exchange:
                    self.wait(p)
                self.sync()
                self.stamp()
                self.load_inputs(address(self.refs[p].out), *following, gains)
                self.sync()

    def sync(self) -> None:
        ptx("bar.sync 0;")

    def counter(self, p: int) -> Int:
        p = COUNTERS - 2 if p < 0 else p
        return self.state + p * COUNTER_BYTES

    def signal(self, p: int) -> None:
        def add():
            ptx("fence.acq_rel.gpu;")
            ptx("red.release.gpu.global.add.u32 [$0], 1;", self.counter(p))

        when(self.is_first, add)

    def wait(self, p: int) -> None:
        """Wait in the first thread until all blocks have signalled the phase."""
        end = self.began + self.plan.blocks

        def poll():
            left = ptx(
                "{ .reg .pred p; .reg .b32 n, c; mov.b32 n, %d; AGAIN:"
                " ld.acquire.gpu.global.b32 c, [$1]; sub.s32 c, c, $2;"
                " setp.ge.s32 p, c, 0; @p bra DONE;"
                " sub.s32 n, n, 1; setp.gt.s32 p, n, 0; @p bra AGAIN; DONE: mov.b32 $0, n; }"
                % POLLS,
                self.counter(p), end, out="r",
            )  # fmt: skip
            failed = lambda: ptx("st.global.b32 [$0], 1;", self.state + 7 * COUNTER_BYTES)
            when(Int(left).equals(0), failed)

        when(self.is_first, poll)

    def chunks(self, phase: Phase) -> list[tuple[Int, Any]]:
        """(first byte, condition) of each 16 bytes of the input that this thread loads."""
        total = phase.K * 2 // 16
        at = [self.thread + i * THREADS for i in range(-(-total // THREADS))]
        return [(i * 16, i < total) for i in at]

    def load_gains(self, phase: Phase, ref: PhaseRefs) -> list:
        if not phase.normed:
            return []
        base = address(ref.gain)
        load = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
        return [ptx(load, base + at.wide(), out="rrrr") for at, _ in self.chunks(phase)]

    def load_inputs(self, base: Int, phase: Phase, ref: PhaseRefs, gains: Sequence = ()) -> None:
        """Copy the input to shared memory; with a norm, times its gain, and sum its squares."""
        if phase.normed and not gains:
            gains = self.load_gains(phase, ref)
        load = "ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];"
        chunks = self.chunks(phase)
        words = [ptx(load, base + at.wide(), out="rrrr") for at, _ in chunks]
        total = zero()
        for i, ((at, _), four) in enumerate(zip(chunks, words, strict=True)):
            if phase.normed:
                for word in four:
                    for x in _floats(word):
                        total = ptx("fma.rn.f32 $0, $1, $1, $2;", x, total, out="f", effects=False)
                times = lambda x, y: ptx(
                    "mul.rn.bf16x2 $0, $1, $2;", x, y, out="r", effects=False
                )
                four = [times(x, y) for x, y in zip(four, gains[i], strict=True)]
            ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", self.memory.inputs + at, *four)
        if phase.normed:
            for distance in (16, 8, 4, 2, 1):
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            store = lambda: ptx("st.shared.f32 [$0], $1;", self.memory.squares + self.warp * 4, total)
            when(self.is_first_lane, store)

    def multiply(self, p: int, ring: list) -> list:
        """Write each warp's sums of each panel to shared memory."""
        turns = self.each[p] // WARPS

        def panel(n, ring):
            def turn(j, carried):
                place, parity, slot, *sums = carried
                place, parity, slot = Int(place), Int(parity), Int(slot)
                begin = self.await_slot(place, parity)
                if self.plan.multiply:
                    inputs = (j * WARPS + self.warp) * (SLOT_INPUTS * 2)
                    sums = self.add_slot(begin, self.memory.inputs + inputs, sums)
                ptx("bar.warp.sync -1;")
                self.ask(slot + WARPS * self.plan.slots, place)
                place = place + 1
                wraps = place.equals(self.plan.slots)
                parity = parity ^ select(wraps, const(1), const(0))
                place = select(wraps, const(0), place)
                return [place.value, parity.value, (slot + WARPS).value, *sums]

            zeros = [zero() for _ in range(8)]
            *ring, a, b, c, d, e, f, g, h = loop(const(turns), [*ring, *zeros], turn)
            even, odd = arith.addf(a, e), arith.addf(c, g)
            at = ((n * WARPS + self.warp) * COLUMNS + self.g * 2) * 4
            store = lambda: ptx(
                "st.shared.v2.f32 [$0], {$1, $2};", self.memory.sums + at, even, odd
            )
            when(self.t.equals(0), store)
            return ring

        return loop(self.panels[p], ring, panel)

    def add_slot(self, codes: Int, inputs: Int, sums: list) -> list:
        """Add a slot's products to two accumulators of four."""
        codes, inputs = codes + self.lane * 16, inputs + self.t * 16
        load = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        words = [ptx(load, codes + 512 * b, out="rrrr") for b in range(BLOCKS)]
        xs = [ptx(load, inputs + 64 * b, out="rrrr") for b in range(BLOCKS)]
        for w, x in zip(words, xs, strict=True):
            for half in range(2):
                a = [_bf16(w[2 * half + i], shift) for i in range(2) for shift in (0, 8)]
                four = slice(4 * half, 4 * half + 4)
                sums[four] = ptx(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3},"
                    " {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                    *a, x[2 * half], x[2 * half + 1], *sums[four], out="ffff", effects=False,
                )  # fmt: skip
        return sums

    # Epilogue. A thread has two adjacent columns.

    def prefetch_epilogue(self, p: int) -> None:
        """Load scales and the stream, which the epilogue needs, before the products."""
        phase, ref = self.plan.phases[p], self.refs[p]
        self.column = self.first[p] * COLUMNS + self.thread * 2
        inside = arith.cmpi(arith.CmpIPredicate.slt, self.column.value, const(phase.N - 1).value)
        safe = select(inside, self.column, const(0))
        self.scales = ptx(
            "ld.global.v2.f32 {$0, $1}, [$2];", address(ref.scales) + safe.wide() * 4, out="ff"
        )
        if phase.residual:
            self.old = ptx("ld.global.cg.b32 $0, [$1];", self.stream + safe.wide() * 2, out="r")

    def finish(self, p: int) -> None:
        phase, ref = self.plan.phases[p], self.refs[p]
        panel, pair = self.thread >> 3, self.thread & 7
        out = address(ref.out)

        def columns():
            even, odd = zero(), zero()
            for warp in range(WARPS):
                at = ((panel * WARPS + warp) * COLUMNS + pair * 2) * 4
                load = "ld.shared.v2.f32 {$0, $1}, [$2];"
                a, b = ptx(load, self.memory.sums + at, out="ff")
                even, odd = arith.addf(even, a), arith.addf(odd, b)
            ys = [arith.mulf(y, scale) for y, scale in zip((even, odd), self.scales, strict=True)]
            if phase.normed:
                total = zero()
                for warp in range(WARPS):
                    square = ptx("ld.shared.f32 $0, [$1];", self.memory.squares + warp * 4, out="f")
                    total = arith.addf(total, square)
                mean = arith.addf(arith.mulf(total, number(1 / phase.K)), number(self.plan.eps))
                inverse = ptx("rsqrt.approx.f32 $0, $1;", mean, out="f")
                ys = [arith.mulf(y, inverse) for y in ys]
            both = _packed(*ys)
            if phase.gated:
                gate, up = _floats(both)
                power = arith.mulf(gate, number(-1.4426950408889634))
                below = arith.addf(number(1), ptx("ex2.approx.f32 $0, $1;", power, out="f"))
                y = arith.mulf(ptx("div.full.f32 $0, $1, $2;", gate, below, out="f"), up)
                at = out + (self.column >> 1).wide() * 2
                ptx(
                    "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }", at, y
                )
                return
            if phase.residual:
                pairs = zip(_floats(both), _floats(self.old), strict=True)
                both = _packed(*[arith.addf(y, old) for y, old in pairs])
            ptx("st.global.b32 [$0], $1;", out + self.column.wide() * 2, both)

        when(self.thread < self.panels[p] * (COLUMNS // 2), columns)
        if phase.residual:
            self.stream = out


def _floats(word: Any) -> list:
    """The lower and the upper bfloat16 of a word, in float32."""
    shift = "shl.b32 $0, $1, 16;", "and.b32 $0, $1, -65536;"
    i32 = [ptx(code, word, out="r", effects=False) for code in shift]
    return [arith.bitcast(ir.F32Type.get(), x) for x in i32]


def _packed(low: Any, high: Any) -> Any:
    return ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, out="r", effects=False)


def _bf16(word: Any, shift: int) -> Any:
    """Codes of one column and two inputs, as bfloat16: bytes 0 and 2 of the word, or 1 and 3.

    A byte's lower 7 bits are the mantissa of 128 + bits; its top bit is the lowest of the exponent
    of 128, or of 256. Their difference is the code.
    """
    first = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return ptx(
        "{ .reg .b32 t, m, s; " + first + " lop3.b32 m, t, 0x007F007F, 0x43004300, 0xEA;"
        " lop3.b32 s, t, 0x00800080, 0x43004300, 0xEA; sub.rn.bf16x2 $0, m, s; }",
        word, out="r", effects=False,
    )  # fmt: skip
