"""The slots of shared memory through which all codes of a block stream.

Each warp that multiplies has its own slots, which it uses in turn. A loader serves two such warps
alternately, and never waits for anything but a free slot and its own loads: it has only so many in
flight as keep the memory busy, because a block's other accesses queue behind them.
"""

from collections.abc import Sequence
from typing import Any

from jaxtrain_kernels.matmul.streamed.emit import Int, address, const, loop, ptx, run_if, select
from jaxtrain_kernels.matmul.streamed.plan import LOADERS, WARPS, Memory, StreamPlan

SERVED = WARPS // LOADERS  # warps of a loader


class Ring:
    """panels: a block's first panel and number of panels in each phase."""

    def __init__(self, plan: StreamPlan, memory: Memory):
        self.plan, self.memory = plan, memory

    def barriers(self, index: Int, warp: Int) -> tuple[Int, Int]:
        """Full and free barrier of one of a warp's slots."""
        at = (index * WARPS + warp) * 8
        return self.memory.full + at, self.memory.free + at

    def first_byte(self, index: Int, warp: Int) -> Int:
        return self.memory.ring + (index * WARPS + warp) * self.plan.slot_bytes

    def init(self, warps: Sequence[Int]) -> None:
        """Initialize the barriers of these warps, by one thread."""
        for warp in warps:
            for index in range(self.plan.slots):
                for barrier in self.barriers(const(index), warp):
                    ptx("mbarrier.init.shared::cta.b64 [$0], 1;", barrier)
        ptx("fence.mbarrier_init.release.cluster;")
        ptx("fence.proxy.async.shared::cta;")

    def load(
        self, warps: Sequence[Int], codes: Sequence[Any], panels: Sequence[tuple[Int, Int]]
    ) -> None:
        """Load all slots of these warps, by one thread. codes: of each phase. panels: first one,
        and number, in each phase."""
        carried = [const(0).value] * 3  # number of slots so far, index, parity
        for phase, ref, (first, count) in zip(self.plan.phases, codes, panels, strict=True):
            size = self.plan.slot_bytes
            begin = address(ref) + (first * (phase.turns * WARPS * size)).wide()

            def step(i: Int, carried: list[Any], begin: Int = begin) -> list[Any]:
                number, index, parity = map(Int, carried)
                for n, warp in enumerate(warps):
                    self.await_earlier(number, index, parity, n, warps)
                    full, free = self.barriers(index, warp)
                    reused = number.compare("sge", self.plan.slots)
                    run_if(reused, lambda free=free: await_phase(free, parity ^ 1))
                    source = begin + (i * WARPS + warp).wide() * self.plan.slot_bytes
                    self.copy(source, self.first_byte(index, warp), full)
                return [(number + 1).value, *self.next(index, parity)]

            carried = loop(count * phase.turns, carried, step)

    def await_earlier(
        self, number: Int, index: Int, parity: Int, n: int, warps: Sequence[Int]
    ) -> None:
        """Wait for the load `flight` loads before that of slot `number` of warps[n]."""
        back, other = -((n - self.plan.flight) // len(warps)), (n - self.plan.flight) % len(warps)
        earlier = index - back
        wraps = earlier < 0
        earlier = select(wraps, earlier + self.plan.slots, earlier)
        parity = parity ^ select(wraps, const(1), const(0))
        full, _ = self.barriers(earlier, warps[other])
        run_if(number.compare("sge", back), lambda: await_phase(full, parity))

    def copy(self, source: Int, target: Int, barrier: Int) -> None:
        size = self.plan.slot_bytes
        ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", barrier)
        ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            f" [$0], [$1], {size}, [$2];",
            target, source, barrier,
        )  # fmt: skip

    def next(self, index: Int, parity: Int) -> list[Any]:
        """Index of the following slot, and its parity: raw values, which loops carry."""
        index = index + 1
        wraps = index.equals(self.plan.slots)
        parity = parity ^ select(wraps, const(1), const(0))
        return [select(wraps, const(0), index).value, parity.value]

    def await_slot(self, position: Sequence[Any], warp: Int) -> Int:
        """First byte of the warp's slot at a position (index, parity), once it is loaded."""
        index, parity = map(Int, position)
        await_phase(self.barriers(index, warp)[0], parity)
        return self.first_byte(index, warp)

    def release(
        self, position: Sequence[Any], warp: Int, is_first_lane: Any, read: Int
    ) -> list[Any]:
        """Free the warp's slot; return the next position.

        read: depends on every load from the slot, and the address of the barrier on it (%ctaid.z is
        0, which the compiler does not know): the loads have ended when the barrier is signalled.
        Otherwise those that still wait behind others may find the codes of a later slot.
        """
        index, parity = map(Int, position)
        zero = Int(ptx("mov.u32 $0, %ctaid.z;", out="r", effects=False))
        free = self.barriers(index, warp)[1] + (read & zero)
        ptx("bar.warp.sync -1;")
        arrive = "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];"
        run_if(is_first_lane, lambda: ptx(arrive, free))
        return self.next(index, parity)


def await_phase(barrier: Int, parity: Int) -> None:
    """Wait until a barrier has completed the phase of this parity."""
    ptx(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
        " @!p bra AGAIN; }",
        barrier, parity,
    )  # fmt: skip
