"""Slots of shared memory that one warp fills in turn, and all warps that multiply read."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtrain_kernels.hopper.emit import Int, const, loop, ptx, run_if, select

COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {}, [$2];"


class SlotRing(NamedTuple):
    """first: address of the slots. full, free: of their barriers. bytes: of a slot. fillers: number
    of threads that signal that a slot is full. readers: number of warps that read each slot.

    A position is (index of a slot, parity of its use): raw values, which loops carry.
    """

    first: Int
    full: Int
    free: Int
    slots: int
    bytes: int
    fillers: int
    readers: int

    @property
    def start(self) -> list[Any]:
        """First position."""
        return [const(0).value] * 2

    def init(self) -> None:
        """Initialize the barriers, by one thread."""
        for index in range(self.slots):
            for barrier, count in ((self.full, self.fillers), (self.free, self.readers)):
                ptx(f"mbarrier.init.shared::cta.b64 [$0], {count};", barrier + index * 8)

    def next(self, position: Sequence[Any]) -> list[Any]:
        index, parity = map(Int, position)
        index = index + 1
        wraps = index.equals(self.slots)
        parity = parity ^ select(wraps, const(1), const(0))
        return [select(wraps, const(0), index).value, parity.value]

    # The warp that fills slots

    def await_free(self, number: Int, position: Sequence[Any]) -> tuple[Int, Int]:
        """First byte and barrier of a slot, once it is free. number: of slots before it."""
        index, parity = map(Int, position)
        is_reused, free = number.compare("sge", self.slots), self.free + index * 8
        run_if(is_reused, lambda: await_all(free, [(0, parity ^ 1)]))
        return self.first + index * self.bytes, self.full + index * 8

    def await_earlier(self, number: Int, position: Sequence[Any], flight: int) -> None:
        """Wait until the slot `flight` slots before is full."""
        index, parity = map(Int, position)
        earlier = index - flight
        wraps = earlier < 0
        earlier = select(wraps, earlier + self.slots, earlier)
        full, parity = self.full + earlier * 8, parity ^ select(wraps, const(1), const(0))
        run_if(number.compare("sge", flight), lambda: await_all(full, [(0, parity)]))

    def load(self, count: int, flight: int, carried: list[Any], begin: Int) -> list[Any]:
        """Load adjacent slots, by one thread, which has at most `flight` of them being loaded.
        carried: number of slots so far, and position; returns them after the last slot."""

        def step(i: Int, carried: list[Any]) -> list[Any]:
            number, position = Int(carried[0]), carried[1:]
            self.await_earlier(number, position, flight)
            slot, full = self.await_free(number, position)
            ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", full, const(self.bytes))
            ptx(COPY.format(self.bytes), slot, begin + (i * self.bytes).wide(), full)
            return [(number + 1).value, *self.next(position)]

        return loop(const(count), carried, step)

    # The warps that read slots

    def release(self, free: Int, offsets: Sequence[int], is_first_lane: Any, read: Int) -> None:
        """Free slots, by each warp that read them: those whose barriers are at `free` + offsets.

        read: depends on every load from them, and the addresses of the barriers on it (%ctaid.z is
        0, which the compiler does not know): the loads have ended when the barriers are signalled.
        """
        zero = Int(ptx("mov.u32 $0, %ctaid.z;", out="r", effects=False))
        free = free + (read & zero)
        ptx("bar.warp.sync -1;")

        def arrive() -> None:
            for offset in offsets:
                code = f"mbarrier.arrive.release.cta.shared::cta.b64 _, [$0+{offset}];"
                ptx(code, free)

        run_if(is_first_lane, arrive)


def fence_init() -> None:
    """Make barriers' initial states visible to loads, by the thread that initialized them."""
    ptx("fence.mbarrier_init.release.cluster;")
    ptx("fence.proxy.async.shared::cta;")


def await_all(barrier: Int, phases: Sequence[tuple[int, Int]]) -> None:
    """Wait for phases of barriers: (offset from `barrier`, parity) of each."""
    test = "mbarrier.try_wait.parity.shared::cta.b64"
    tests = "".join(
        f" {test} q, [$0+{offset}], ${i + 1};" + (" and.pred p, p, q;" if i else " mov.pred p, q;")
        for i, (offset, _) in enumerate(phases)
    )
    code = f"{{ .reg .pred p, q; AGAIN:{tests} @!p bra AGAIN; }}"
    ptx(code, barrier, *[parity for _, parity in phases])
