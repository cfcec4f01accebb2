"""The slots of shared memory through which the keys and values of a block stream."""

from collections.abc import Sequence
from typing import Any

from jaxtrain_kernels.attention.paged.hopper.plan import PageMemory, PageStreamPlan
from jaxtrain_kernels.hopper.emit import (
    Int,
    after,
    const,
    ptx,
    run_if,
    select,
    wait_barrier,
)  # fmt: skip


def lane_value(x: Int, lane: Int) -> Int:
    """x of a lane of the warp."""
    return Int(ptx("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", x, lane, out="r"))


def sum_of_lanes(x: Int) -> Int:
    return Int(ptx("redux.sync.add.s32 $0, $1, -1;", x, out="r"))


class PageRing:
    """Slots with a tile of keys, or of values, and their scales, in turn."""

    def __init__(self, plan: PageStreamPlan, memory: PageMemory):
        self.plan, self.memory = plan, memory

    def barriers(self, index: Int) -> tuple[Int, Int]:
        """Full and free barrier of a slot."""
        return self.memory.full + index * 8, self.memory.free + index * 8

    def first_byte(self, index: Int) -> Int:
        return self.memory.ring + index * self.plan.slot_bytes

    def init(self) -> None:
        for index in range(self.plan.slots):
            full, free = self.barriers(const(index))
            ptx("mbarrier.init.shared::cta.b64 [$0], 1;", full)
            ptx(f"mbarrier.init.shared::cta.b64 [$0], {self.plan.K};", free)
        ptx("fence.mbarrier_init.release.cluster;")
        ptx("fence.proxy.async.shared::cta;")

    def load(
        self, position: list[Any], kind: int, arrays: Sequence[Any], token: Int, lane: Int
    ) -> list[Any]:
        """Load a tile into the next slot, by a warp. position: number, index, parity. kind: 0 of
        keys, 1 of values. arrays: values and scales. token: number of the first, int64."""
        plan, (number, index, parity) = self.plan, map(Int, position)
        full, free = self.barriers(index)
        run_if(number.compare("sge", plan.slots), lambda: wait_barrier(free, parity ^ 1))
        begin = self.first_byte(index)
        size = plan.tokens * plan.row_bytes + plan.scale_bytes
        copy = (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [$0], [$1], {size}, [$2];"
        )

        def first() -> None:
            ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", full)
            if plan.quantized:
                source = arrays[1] + token * (4 * plan.K)
                code = copy.replace("{size}", str(plan.scale_bytes))
                ptx(code, begin + plan.scales_at, source, full)

        def row() -> None:
            source = arrays[0] + (token + lane.wide()) * plan.row_bytes
            code = copy.replace("{size}", str(plan.row_bytes))
            ptx(code, begin + lane * plan.strides[kind], source, full)

        run_if(lane.equals(0), first)
        ptx("bar.warp.sync -1;")
        run_if(lane < plan.tokens, row)
        return [(number + 1).value, *self.next(index, parity)]

    def next(self, index: Int, parity: Int) -> list[Any]:
        """Index of the following slot, and its parity: raw values, which loops carry."""
        index = index + 1
        wraps = index.equals(self.plan.slots)
        parity = parity ^ select(wraps, const(1), const(0))
        return [select(wraps, const(0), index).value, parity.value]

    def await_slot(self, position: Sequence[Any]) -> Int:
        """First byte of the slot at a position (index, parity), once it is loaded."""
        index, parity = map(Int, position)
        wait_barrier(self.barriers(index)[0], parity)
        return self.first_byte(index)

    def release(self, position: Sequence[Any], lane: Int, read: Int) -> list[Any]:
        """Free the slot for this warp; return the next position. read: as in the streamed
        products' ring, depends on every load from the slot."""
        index, parity = map(Int, position)
        free = after(self.barriers(index)[1], read)
        ptx("bar.warp.sync -1;")
        arrive = "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];"
        run_if(lane.equals(0), lambda: ptx(arrive, free))
        return self.next(index, parity)
