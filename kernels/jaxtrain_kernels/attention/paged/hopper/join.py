"""Joins the parts of a sequence's results, which its blocks have written to device memory."""

from typing import Any

from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.attention.paged.hopper.plan import (
    HEAD,
    PART_BYTES,
    PageMemory,
    PageRefs,
    PageStreamPlan,
    Segment,
)
from jaxtrain_kernels.hopper.emit import (
    Int,
    address,
    const,
    float_const,
    loop,
    ptx,
    run_if,
    select,
    zero,
)  # fmt: skip
from jaxtrain_kernels.hopper.words import to_word

AHEAD = 10  # parts that a warp has in flight
MANY = 8  # parts of a sequence from which on all warps of a block join one head
FLOOR = -1e30


class Joiner:
    """A lane has four channels. refs: of the block."""

    def __init__(
        self, plan: PageStreamPlan, memory: PageMemory, refs: PageRefs, thread: Int, warp: Int
    ):
        self.plan, self.memory, self.refs, self.warp = plan, memory, refs, warp
        self.lane = thread & 31

    def run(self, own: Segment, block: Int) -> None:
        """Join the parts of each `parts`-th head, from that of the block's number on."""
        plan, index = self.plan, block - own.first_block
        heads = (const(plan.K * plan.G - 1) - index + own.parts) // own.parts
        many = own.parts.compare("sge", MANY)

        def together() -> None:
            def head(i: Int, carried: list[Any]) -> list[Any]:
                n = index + own.parts * i
                self.put(self.warp, self.parts(own, n, self.warp, plan.K))
                self.sync()
                run_if(self.warp.equals(0), lambda: self.finish(own, n, self.from_shared()))
                self.sync()
                return []

            loop(heads, [], head)

        def apart() -> None:
            def head(i: Int, carried: list[Any]) -> list[Any]:
                n = index + own.parts * (self.warp + i * plan.K)
                self.finish(own, n, self.parts(own, n, const(0), 1))
                return []

            loop((heads - self.warp + (plan.K - 1)) // plan.K, [], head)

        run_if(many, together)
        run_if(own.parts < MANY, apart)

    def sync(self) -> None:
        ptx(f"bar.sync 1, {self.plan.threads};")

    def parts(self, own: Segment, n: Int, first: Int, step: int) -> list[Any]:
        """Peak, total and sums of the parts first, first + step, .. of a head."""
        heads = self.plan.K * self.plan.G

        def batch(i: Int, carried: list[Any]) -> list[Any]:
            loaded = []
            for ahead in range(AHEAD):
                part = first + (i * AHEAD + ahead) * step
                real = part < own.parts
                safe = select(real, part, const(0))
                slot = (own.first_block + safe) * 2 + select(safe.equals(0), const(1), const(0))
                row = (slot * heads + n).wide()
                stats = ptx(
                    "ld.global.cg.v2.f32 {$0, $1}, [$2];", address(self.refs.stats) + row * 8,
                    out="ff",
                )  # fmt: skip
                at = address(self.refs.sums) + row * (4 * HEAD) + (self.lane * 16).wide()
                sums = ptx("ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", at, out="ffff")
                peak = arith.select(real, stats[0], float_const(FLOOR))
                total = arith.select(real, stats[1], zero())
                sums = [arith.select(real, x, zero()) for x in sums]
                loaded.append([peak, total, *sums])
            return add_parts([carried, *loaded])

        count = (own.parts - first + (AHEAD * step - 1)) // (AHEAD * step)
        nothing = [float_const(FLOOR), *[zero() for _ in range(5)]]
        return loop(select(count < 0, const(0), count), nothing, batch)

    def put(self, warp: Int, found: list[Any]) -> None:
        at = self.memory.parts + warp * PART_BYTES
        run_if(self.lane.equals(0), lambda: ptx("st.shared.v2.f32 [$0], {$1, $2};", at, *found[:2]))
        store = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
        ptx(store, at + self.lane * 16 + 16, *found[2:])

    def from_shared(self) -> list[Any]:
        found = []
        for warp in range(self.plan.K):
            at = self.memory.parts + warp * PART_BYTES
            stats = ptx("ld.shared.v2.f32 {$0, $1}, [$2];", at, out="ff")
            load = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
            found.append([*stats, *ptx(load, at + self.lane * 16 + 16, out="ffff")])
        return add_parts(found)

    def finish(self, own: Segment, n: Int, found: list[Any]) -> None:
        """Store the results of a head."""
        divide = "div.full.f32 $0, $1, $2;"
        ys = [ptx(divide, x, found[1], out="f", effects=False) for x in found[2:]]
        row = own.b * (self.plan.K * self.plan.G) + n
        at = address(self.refs.out) + (row * HEAD + self.lane * 4).wide() * 2
        ptx("st.global.v2.b32 [$0], {$1, $2};", at, to_word(*ys[:2]), to_word(*ys[2:]))


def add_parts(parts: list[list[Any]]) -> list[Any]:
    """Peak, total and sums of several."""
    peak = parts[0][0]
    for part in parts[1:]:
        peak = arith.maxnumf(peak, part[0])
    rest = [zero() for _ in parts[0][1:]]
    for part in parts:
        below = arith.subf(part[0], peak)
        share = ptx("ex2.approx.ftz.f32 $0, $1;", below, out="f", effects=False)
        rest = [
            ptx("fma.rn.f32 $0, $1, $2, $3;", x, share, old, out="f", effects=False)
            for x, old in zip(part[1:], rest, strict=True)
        ]
    return [peak, *rest]
