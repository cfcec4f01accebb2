"""One block of the kernel of `hopper`, as operations of each thread."""

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, gpu

from jaxtrain_kernels.attention.paged.hopper.join import Joiner
from jaxtrain_kernels.attention.paged.hopper.plan import (
    HEAD,
    PageMemory,
    PageRefs,
    PageStreamPlan,
    Segment,
)
from jaxtrain_kernels.attention.paged.hopper.ring import PageRing, lane_value, sum_of_lanes
from jaxtrain_kernels.attention.paged.hopper.scores import HeadTile, Queries
from jaxtrain_kernels.hopper.emit import (
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

NOTHING = -1e30  # peak of no scores


def _negated(condition: Any) -> Any:
    return arith.xori(condition, const(0).equals(0))


class PageBlock:
    """A block's registers, and what its threads do."""

    def __init__(self, plan: PageStreamPlan, refs: PageRefs, memory: PageMemory):
        self.plan, self.refs = plan, refs
        self.memory = PageMemory(*map(address, memory))
        self.ring = PageRing(plan, self.memory)
        self.thread = Int(mgpu.utils.thread_idx())
        self.warp, self.lane = Int(mgpu.utils.warp_idx()), self.thread & 31
        self.g, self.t = self.lane >> 2, self.lane & 3
        self.block = Int(arith.index_cast(int_type(), gpu.block_id(gpu.Dimension.x)))

    def run(self) -> None:
        run_if(self.warp.equals(0), self.find_lengths)
        loads = self.warp.equals(self.plan.K)
        run_if(loads, lambda: run_if(self.lane.equals(0), self.ring.init))
        ptx("bar.sync 0;")
        self.find_segments()
        run_if(loads, self.load)
        run_if(self.warp < self.plan.K, self.compute)

    # Work

    def find_lengths(self) -> None:
        """Write each sequence's length, and the tiles before it, to shared memory, by one warp."""
        plan, found = self.plan, []
        for r in range(plan.rounds):
            b = self.lane + 32 * r
            safe = select(b < plan.B, b, const(plan.B - 1)).wide() * 4
            start, count = (
                Int(ptx("ld.global.b32 $0, [$1];", address(ref) + safe, out="r"))
                for ref in (self.refs.starts, self.refs.counts)
            )
            found.append((b, start, count))
        before = const(0)
        run_if(self.lane.equals(0), lambda: ptx("st.shared.b32 [$0], 0;", self.memory.first))
        for b, start, count in found:
            real = arith.andi(const(0).compare("slt", count), b < plan.B)
            capacity = self.refs.W * plan.size
            end = start + 1
            end = select(end < capacity, end, const(capacity))
            length = select(real, end, const(0))
            total = self.tiles(length) - self.skipped(length)
            for distance in (1, 2, 4, 8, 16):
                other = lane_value(total, self.lane - distance)
                total = total + select(self.lane < distance, const(0), other)
            total = before + total
            ptx("st.shared.b32 [$0], $1;", self.memory.lengths + b * 4, length)
            ptx("st.shared.b32 [$0], $1;", self.memory.first + b * 4 + 4, total)
            before = lane_value(total, const(31))

    def tiles(self, length: Int) -> Int:
        return (length + (self.plan.tokens - 1)) // self.plan.tokens

    def skipped(self, length: Int) -> Int:
        """Tiles before the window of a sequence's last token."""
        if self.plan.window is None:
            return const(0)
        start = length - (1 + self.plan.window)
        return select(start < 0, const(0), start) // self.plan.tokens

    def shared(self, base: Int, index: Int) -> Int:
        return Int(ptx("ld.shared.b32 $0, [$1];", base + index * 4, out="r"))

    def find_segments(self) -> None:
        """The block's first and last tile, and the sequences that have them."""
        plan = self.plan
        self.total = self.shared(self.memory.first, const(plan.B))
        few = self.total < plan.blocks
        self.blocks = select(few, self.total, const(plan.blocks))  # that have tiles
        used = select(self.block < self.blocks, const(1), const(0))
        safe = select(self.blocks.equals(0), const(1), self.blocks)
        self.begin = (self.block * self.total) // safe
        self.end = self.begin + (((self.block + 1) * self.total) // safe - self.begin) * used
        low, high = const(0), const(0)
        for r in range(plan.rounds):
            b = self.lane + 32 * r
            upto = self.shared(self.memory.first, b + 1)
            upto = select(b < plan.B, upto, self.total + 1)  # not before any tile
            low = low + select((self.begin + 1).compare("sgt", upto), const(1), const(0))
            high = high + select(self.end.compare("sgt", upto), const(1), const(0))
        self.low, high = sum_of_lanes(low), sum_of_lanes(high)
        empty = self.begin.compare("sge", self.end)
        self.segments = select(empty, const(0), high - self.low + 1)

    def segment(self, i: Int) -> Segment:
        b = self.low + i
        before, after = (self.shared(self.memory.first, b + n) for n in range(2))
        length = self.shared(self.memory.lengths, b)
        low = select(before < self.begin, self.begin, before)
        high = select(after < self.end, after, self.end)
        starts, ends = low.equals(before), high.equals(after)
        # A sequence without tiles has no part.
        partial = arith.andi(_negated(arith.andi(starts, ends)), low < high)
        first_block = self.block_of(before)
        slot = self.block * 2 + select(starts, const(1), const(0))
        parts = self.block_of(after - 1) - first_block + 1
        count = high - low
        first = self.skipped(length) + (low - before)
        return Segment(b, first, count, length, partial, slot, first_block, parts)

    def block_of(self, tile: Int) -> Int:
        return ((tile + 1) * self.blocks - 1) // self.total

    # Loads

    def load(self) -> None:
        plan, refs = self.plan, self.refs
        arrays = [(refs.k, refs.k_scale), (refs.v, refs.v_scale)]
        arrays = [[None if x is None else address(x) for x in pair] for pair in arrays]
        each = plan.size // plan.tokens  # tiles of a page

        def segment(i: Int, position: list[Any]) -> list[Any]:
            own = self.segment(i)

            def batch(j: Int, position: list[Any]) -> list[Any]:
                begin = own.first + j * 32
                page = (begin + self.lane) // each
                page = select(page < refs.W, page, const(refs.W - 1))
                at = address(refs.table) + (own.b * refs.W + page).wide() * 4
                pages = Int(ptx("ld.global.b32 $0, [$1];", at, out="r"))
                rest = own.count - j * 32

                def tile(n: Int, position: list[Any]) -> list[Any]:
                    page = lane_value(pages, n)
                    token = page.wide() * plan.size + (((begin + n) % each) * plan.tokens).wide()
                    for kind in range(2):
                        position = self.ring.load(position, kind, arrays[kind], token, self.lane)
                    return position

                return loop(select(rest < 32, rest, const(32)), position, tile)

            return loop((own.count + 31) // 32, position, batch)

        loop(self.segments, [const(0).value] * 3, segment)

    # Products

    def compute(self) -> None:
        plan = self.plan
        self.zero_idle()
        queries = Queries(plan, address(self.refs.q), self.warp, self.g, self.t)

        def segment(i: Int, position: list[Any]) -> list[Any]:
            own = self.segment(i)
            words = queries.load(own.b)
            tile = HeadTile(plan, self.ring, words, self.warp, self.lane)
            start = [float_const(NOTHING)] * 2 + [zero() for _ in range(2 + HEAD // 4)]

            def step(n: Int, carried: list[Any]) -> list[Any]:
                return tile.add(carried, (own.first + n) * plan.tokens, own.length)

            found = loop(own.count, [*position, *start], step)
            position, found = found[:2], found[2:]
            peaks, totals, sums = found[:2], found[2:4], found[4:]
            for distance in (4, 8, 16):
                totals = [arith.addf(x, mgpu.utils.shfl_bfly(x, distance)) for x in totals]
            filled = const(0).compare("slt", own.count)
            run_if(filled, lambda: self.store(own, peaks, totals, sums))
            run_if(own.partial, lambda: self.signal(own))
            return position

        loop(self.segments, [const(0).value] * 2, segment)

        def join(i: Int, carried: list[Any]) -> list[Any]:
            own = self.segment(i)
            run_if(own.partial, lambda: self.join(own))
            return []

        loop(self.segments, [], join)

    def sync(self) -> None:
        """Wait for all warps that multiply."""
        ptx(f"bar.sync 1, {self.plan.threads};")

    def zero_idle(self) -> None:
        """Write zeros for sequences without tokens, of which each block has some."""
        plan = self.plan
        words = plan.K * plan.G * HEAD // 2

        def sequence(i: Int, carried: list[Any]) -> list[Any]:
            b = self.block + i * plan.blocks

            def fill() -> None:
                def word(n: Int, carried: list[Any]) -> list[Any]:
                    at = (b * words + self.thread + n * plan.threads).wide() * 4
                    ptx("st.global.b32 [$0], 0;", address(self.refs.out) + at)
                    return []

                loop(const(words // plan.threads), [], word)

            run_if(self.shared(self.memory.lengths, b).equals(0), fill)
            return []

        loop((const(plan.B + plan.blocks - 1) - self.block) // plan.blocks, [], sequence)

    def store(self, own: Segment, peaks: list[Any], totals: list[Any], sums: list[Any]) -> None:
        """Store the head's results, or its part of them."""
        plan = self.plan

        def each(put: Callable[[Int, int, int, tuple[int, int]], None]) -> None:
            """put(query, e, index of a sum, channel)."""
            for e in range(2):
                query = self.t * 2 + e

                def own_query(e: int = e, query: Int = query) -> None:
                    for j in range(HEAD // 16):
                        for half in range(2):
                            put(query, e, 4 * j + 2 * half + e, (j, half))

                run_if(query < plan.G, own_query)

        def channel(j: int, half: int) -> Int:
            if plan.quantized:
                return self.g * 2 + (16 * j + half)
            return self.g + (16 * j + 8 * half)

        def result(query: Int, e: int, index: int, at: tuple[int, int]) -> None:
            y = ptx("div.full.f32 $0, $1, $2;", sums[index], totals[e], out="f", effects=False)
            row = (own.b * plan.K + self.warp) * plan.G + query
            target = address(self.refs.out) + (row * HEAD + channel(*at)).wide() * 2
            ptx("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }", target, y)

        def part(query: Int, e: int, index: int, at: tuple[int, int]) -> None:
            row = (own.slot * plan.K + self.warp) * plan.G + query
            target = address(self.refs.sums) + (row * HEAD + channel(*at)).wide() * 4
            ptx("st.global.f32 [$0], $1;", target, sums[index])

        def parts() -> None:
            each(part)
            for e in range(2):
                row = (own.slot * plan.K + self.warp) * plan.G + (self.t * 2 + e)
                at = address(self.refs.stats) + row.wide() * 8
                real = arith.andi((self.t * 2 + e) < plan.G, self.g.equals(0))
                put = functools.partial(
                    ptx, "st.global.v2.f32 [$0], {$1, $2};", at, peaks[e], totals[e]
                )
                run_if(real, put)

        run_if(_negated(own.partial), lambda: each(result))
        run_if(own.partial, parts)

    # Exchange

    def counter(self, b: Int) -> Int:
        return address(self.refs.counters) + b.wide() * 4

    def signal(self, own: Segment) -> None:
        """Publish the block's part of a sequence."""
        self.sync()

        def add() -> None:
            ptx("fence.acq_rel.gpu;")
            ptx("red.relaxed.gpu.global.add.u32 [$0], 1;", self.counter(own.b))

        run_if(self.thread.equals(0), add)

    def join(self, own: Segment) -> None:
        """Wait for all parts of a sequence, and join those of some heads."""
        run_if(self.thread.equals(0), lambda: self.wait(own))
        self.sync()
        Joiner(self.plan, self.memory, self.refs, self.thread, self.warp).run(own, self.block)

    def wait(self, own: Segment) -> None:
        """Wait for all blocks of a sequence; the last one to come here resets the counter."""
        ptx(
            "{ .reg .pred p; .reg .b32 n, c; mov.b32 n, 4194304; AGAIN:"
            " ld.acquire.gpu.global.b32 c, [$0]; setp.ge.s32 p, c, $1;"
            " @p bra DONE; sub.s32 n, n, 1; setp.gt.s32 p, n, 0; @p bra AGAIN; trap; DONE: }",
            self.counter(own.b), own.parts,
        )  # fmt: skip
        add = "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
        before = Int(ptx(add, self.counter(own.b), out="r"))
        reset = "st.relaxed.gpu.global.b32 [$0], 0;"
        run_if(before.equals(own.parts * 2 - 1), lambda: ptx(reset, self.counter(own.b)))
