"""The slots of shared memory through which all codes of a block stream.

Each warp that multiplies has its own slots, which it uses in turn. One copy loads a slot of some
adjacent warps. A loader serves several such groups of warps alternately, and never waits for
anything but a free slot and its own copies. During an exchange it has fewer in flight, because a
block's other accesses queue behind them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain_kernels.hopper.emit import (
    Int,
    address,
    after,
    arrive,
    const,
    init_barrier,
    loop,
    loop_while,
    ptx,
    run_if,
    select,
    wait_barrier,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.claims import Claims
from jaxtrain_kernels.matmul.streamed.plan import (
    EXCHANGE_STEPS,
    LOADERS,
    Memory,
    StreamPhase,
    StreamPlan,
)  # fmt: skip


class Ring:
    """panels: a block's first panel and number of panels in each phase."""

    def __init__(self, plan: StreamPlan, memory: Memory):
        self.plan, self.memory = plan, memory
        self.groups = plan.warps // plan.sharing

    def served(self, loader: Int) -> list[Int]:
        """A loader's groups of warps."""
        count = self.groups // LOADERS
        return [loader * count + n for n in range(count)]

    def barriers(self, index: Int, group: Int) -> tuple[Int, Int]:
        """Full and free barrier of one of a group's slots."""
        at = (index * self.groups + group) * 8
        return self.memory.full + at, self.memory.free + at

    def first_byte(self, index: Int, warp: Int) -> Int:
        return self.memory.ring + (index * self.plan.warps + warp) * self.plan.slot_bytes

    def init(self, loader: Int) -> None:
        """Initialize the barriers of a loader's groups, by one thread."""
        for group in self.served(loader):
            for index in range(self.plan.slots):
                full, free = self.barriers(const(index), group)
                init_barrier(full, 1)
                init_barrier(free, self.plan.sharing)
        ptx("fence.mbarrier_init.release.cluster;")
        ptx("fence.proxy.async.shared::cta;")

    def load(
        self,
        loader: Int,
        codes: Sequence[Any],
        panels: Sequence[tuple[Int, Int]],
        counters: Sequence[Int],
    ) -> None:
        """Load all slots of a loader's groups, by one thread. codes: of each phase. panels: first
        one, and number, in each phase. counters: of claims."""
        state = [const(0).value] * 3  # number of slots so far, index, parity
        is_first = select(loader.equals(0), const(1), const(0))
        groups = self.served(loader)
        for p, (phase, ref, (first, count)) in enumerate(
            zip(self.plan.phases, codes, panels, strict=True)
        ):
            load = functools.partial(self.load_panels, phase, address(ref), groups)
            slow = EXCHANGE_STEPS if p else 0
            if not self.plan.claimed(phase):
                state = load(first, count, state, slow)
                continue
            claims, others = Claims(self.plan, self.memory, p), count * self.plan.blocks
            asked = claims.ask(counters[p], const(0), is_first)
            state = load(first, count, state, slow)
            claim = claims.settle(asked, const(0), is_first)

            def step(
                carried: list[Any],
                p: int = p,
                claims: Claims = claims,
                load: Callable[..., list[Any]] = load,
                others: Int = others,
            ) -> list[Any]:
                number, panel = map(Int, carried[:2])
                asked = claims.ask(counters[p], number + 1, is_first)
                state = load(others + panel, const(1), carried[2:])
                number = number + 1
                return [number.value, claims.settle(asked, number, is_first).value, *state]

            start = [const(0).value, claim.value, *state]
            state = loop_while(start, lambda x: Int(x[1]).compare("sge", 0), step)[2:]

    def load_panels(
        self,
        phase: StreamPhase,
        codes: Int,
        groups: Sequence[Int],
        first: Int,
        count: Int,
        state: list[Any],
        slow: int = 0,
    ) -> list[Any]:
        """Load adjacent panels, with fewer copies in flight in the first `slow` steps; return the
        state after them."""
        size, sharing = self.plan.slot_bytes, self.plan.sharing
        begin = codes + (first * (phase.turns * self.plan.warps * size)).wide()

        def step(i: Int, state: list[Any], flight: int) -> list[Any]:
            number, index, parity = map(Int, state)
            for n, group in enumerate(groups):
                self.await_earlier(number, index, parity, n - flight, groups)
                full, free = self.barriers(index, group)
                reused = number.compare("sge", self.plan.slots)
                run_if(reused, functools.partial(wait_barrier, free, parity ^ 1))
                warp = group * sharing
                source = begin + (i * self.plan.warps + warp).wide() * size
                self.copy(source, self.first_byte(index, warp), full)
            return [(number + 1).value, *self.next(index, parity)]

        few, many = self.plan.flight
        steps, done = count * phase.turns, const(0)
        if slow:
            done = select(steps < slow, steps, const(slow))
            state = loop(done, state, functools.partial(step, flight=few))
        fast = lambda i, state: step(done + i, state, many)
        return loop(steps - done, state, fast)

    def await_earlier(
        self, number: Int, index: Int, parity: Int, offset: int, groups: Sequence[Int]
    ) -> None:
        """Wait for the copy `offset` copies after that of slot `number` of the first group: an
        earlier one, as it is negative."""
        back, other = -(offset // len(groups)), offset % len(groups)
        earlier = index - back
        wraps = earlier < 0
        earlier = select(wraps, earlier + self.plan.slots, earlier)
        parity = parity ^ select(wraps, const(1), const(0))
        full, _ = self.barriers(earlier, groups[other])
        run_if(number.compare("sge", back), lambda: wait_barrier(full, parity))

    def copy(self, source: Int, target: Int, barrier: Int) -> None:
        size = self.plan.slot_bytes * self.plan.sharing
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
        wait_barrier(self.barriers(index, warp // self.plan.sharing)[0], parity)
        return self.first_byte(index, warp)

    def release(
        self, position: Sequence[Any], warp: Int, is_first_lane: Any, read: Int
    ) -> list[Any]:
        """Free the warp's slot; return the next position.

        read: depends on every load from the slot. Otherwise loads that still wait behind others
        when the barrier is signalled may find the codes of a later slot.
        """
        index, parity = map(Int, position)
        free = after(self.barriers(index, warp // self.plan.sharing)[1], read)
        ptx("bar.warp.sync -1;")
        run_if(is_first_lane, lambda: arrive(free))
        return self.next(index, parity)
