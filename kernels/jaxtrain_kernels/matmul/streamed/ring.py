"""A warp's slots in shared memory, through which all its codes of a call stream."""

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.matmul.streamed.emit import Int, address, const, ptx, select, when
from jaxtrain_kernels.matmul.streamed.plan import WARPS, Memory, StreamPlan


class Ring:
    """The warp's slots, counted from 0, and their places in shared memory.

    first, panels: a block's first panel and number of panels in each phase. A position in the ring
    is (place, parity of its barrier, slot): raw values, which loops carry.
    """

    def __init__(
        self,
        plan: StreamPlan,
        memory: Memory,
        warp: Int,
        is_first_lane: Any,
        codes: Sequence[Any],
        following: Sequence[Any],
        panels: Sequence[tuple[Int, Int]],
    ):
        self.plan, self.memory = plan, memory
        self.warp, self.is_first_lane = warp, is_first_lane
        self.bases, self.following, self.ends = [], [], [const(0)]
        for p, (phase, ref, (first, count)) in enumerate(
            zip(plan.phases, codes, panels, strict=True)
        ):
            skipped = first * (phase.panel_slots * WARPS * plan.slot_bytes)
            self.bases.append(address(ref) + skipped.wide())
            self.ends.append(self.ends[-1] + count * phase.panel_slots)
            if p < len(following):
                self.following.append(address(following[p]) + skipped.wide())

    def begin(self) -> list[Any]:
        """Ask for the first slots; return the first position."""

        def init() -> None:
            for place in range(self.plan.slots):
                ptx("mbarrier.init.shared::cta.b64 [$0], 1;", self.addresses(const(place))[0])
            ptx("fence.mbarrier_init.release.cluster;")
            ptx("fence.proxy.async.shared::cta;")

        when(self.is_first_lane, init)
        ptx("bar.warp.sync -1;")
        for place in range(self.plan.slots):
            self.ask(const(place), const(place))
        return [const(0).value] * 3

    def addresses(self, place: Int) -> tuple[Int, Int]:
        """Barrier and first byte of a place."""
        at = place * WARPS + self.warp
        return self.memory.barriers + at * 8, self.memory.ring + at * self.plan.slot_bytes

    def ask(self, slot: Int, place: Int) -> None:
        """Start to load a slot, if there are so many. One of the following call, by the number of
        slots past the end, is only fetched into the L2 cache."""
        size, phases = self.plan.slot_bytes, self.plan.phases
        base, begin, two = self.bases[-1], self.ends[-2], const(phases[-1].across - 1)
        for p in range(len(phases) - 2, -1, -1):
            earlier = slot < self.ends[p + 1]
            base = select(earlier, self.bases[p], base)
            begin = select(earlier, self.ends[p], begin)
            two = select(earlier, const(phases[p].across - 1), two)
        own = slot - begin
        at = (((own >> two) * WARPS + self.warp) << two) + (own & two)
        source = base + at.wide() * size
        barrier, target = self.addresses(place)

        def copy() -> None:
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
        """Fetch a slot of the following call's first two phases into the L2 cache."""
        earlier = slot < self.ends[1]
        base = select(earlier, self.following[0], self.following[1])
        own = select(earlier, slot, slot - self.ends[1])
        source = base + (own * WARPS + self.warp).wide() * self.plan.slot_bytes
        code = f"cp.async.bulk.prefetch.L2.global [$0], {self.plan.slot_bytes};"
        inside = arith.andi(slot.compare("sge", 0), slot < self.plan.ahead)
        when(arith.andi(self.is_first_lane, inside), lambda: ptx(code, source))

    def wait(self, position: Sequence[Any]) -> Int:
        """First byte of the position's slot, once it is loaded."""
        place, parity, _ = map(Int, position)
        barrier, begin = self.addresses(place)
        ptx(
            "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
            " @!p bra AGAIN; }",
            barrier, parity,
        )  # fmt: skip
        return begin

    def advance(self, position: Sequence[Any]) -> list[Any]:
        """Ask for a slot in the place of the position's, which the warp has used; return the next
        position."""
        place, parity, slot = map(Int, position)
        ptx("bar.warp.sync -1;")
        self.ask(slot + self.plan.slots, place)
        place = place + 1
        wraps = place.equals(self.plan.slots)
        parity = parity ^ select(wraps, const(1), const(0))
        return [select(wraps, const(0), place).value, parity.value, (slot + 1).value]
