"""The slots of shared memory through which all weights of a block stream.

One thread loads them in turn. It never waits for anything but a free slot and its own loads: it has
only so many in flight as keep the memory busy, because a block's other accesses queue behind them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain_kernels.decode_layers.hopper.plan import LayersMemory, StreamedPlan
from jaxtrain_kernels.matmul.streamed.emit import Int, const, loop, ptx, run_if, select


class WeightRing:
    """A position is (index of a slot, parity of its use): raw values, which loops carry."""

    def __init__(self, plan: StreamedPlan, memory: LayersMemory):
        self.plan, self.memory = plan, memory

    def init(self) -> None:
        """Initialize the barriers, by one thread."""
        for index in range(self.plan.slots):
            ptx("mbarrier.init.shared::cta.b64 [$0], 1;", self.memory.full + index * 8)
            many = f"mbarrier.init.shared::cta.b64 [$0], {self.plan.warps};"
            ptx(many, self.memory.free + index * 8)
        ptx("fence.mbarrier_init.release.cluster;")
        ptx("fence.proxy.async.shared::cta;")

    def load(self, sources: Callable[[Int], Sequence[tuple[Int, int]]]) -> None:
        """Load all slots of all layers, by one thread. sources: of a layer, the first byte and the
        number of slots of each product."""

        def layer(index: Int, carried: list[Any]) -> list[Any]:
            for begin, count in sources(index):

                def step(i: Int, carried: list[Any], begin: Int = begin) -> list[Any]:
                    return self.load_slot(begin + (i * self.plan.slot.bytes).wide(), carried)

                carried = loop(const(count), carried, step)
            return carried

        loop(const(self.plan.shape.depth), [const(0).value] * 3, layer)

    def load_slot(self, source: Int, carried: list[Any]) -> list[Any]:
        """Load the next slot. carried: number of slots so far, up to those of the ring, and
        position."""
        number, index, parity = map(Int, carried)
        self.await_earlier(number, index, parity)
        slots = self.plan.slots
        reused = number.compare("sge", slots)
        run_if(reused, lambda: await_all([(self.memory.free + index * 8, parity ^ 1)]))
        full, size = self.memory.full + index * 8, self.plan.slot.bytes
        ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", full)
        ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            f" [$0], [$1], {size}, [$2];",
            self.memory.ring + index * size, source, full,
        )  # fmt: skip
        return [select(reused, const(slots), number + 1).value, *self.next([index, parity])]

    def await_earlier(self, number: Int, index: Int, parity: Int) -> None:
        """Wait for the load `flight` loads before."""
        earlier = index - self.plan.flight
        wraps = earlier < 0
        earlier = select(wraps, earlier + self.plan.slots, earlier)
        parity = parity ^ select(wraps, const(1), const(0))
        full = self.memory.full + earlier * 8
        is_loaded = number.compare("sge", self.plan.flight)
        run_if(is_loaded, lambda: await_all([(full, parity)]))

    def next(self, position: Sequence[Any]) -> list[Any]:
        index, parity = (x if isinstance(x, Int) else Int(x) for x in position)
        index = index + 1
        wraps = index.equals(self.plan.slots)
        parity = parity ^ select(wraps, const(1), const(0))
        return [select(wraps, const(0), index).value, parity.value]

    def await_slots(self, positions: Sequence[Sequence[Any]]) -> list[Int]:
        """First byte of each slot, once all are loaded."""
        places = [tuple(map(Int, position)) for position in positions]
        await_all([(self.memory.full + index * 8, parity) for index, parity in places])
        return [self.memory.ring + index * self.plan.slot.bytes for index, _ in places]

    def release(self, positions: Sequence[Sequence[Any]], is_first_lane: Any, read: Int) -> None:
        """Free the slots, by each warp that multiplies.

        read: depends on every load from them, and the addresses of the barriers on it (%ctaid.z is
        0, which the compiler does not know): the loads have ended when the barriers are signalled.
        """
        zero = Int(ptx("mov.u32 $0, %ctaid.z;", out="r", effects=False))
        nothing = read & zero
        ptx("bar.warp.sync -1;")

        def arrive() -> None:
            for index, _ in positions:
                free = self.memory.free + Int(index) * 8 + nothing
                ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", free)

        run_if(is_first_lane, arrive)


def await_all(barriers: Sequence[tuple[Int, Int]]) -> None:
    """Wait for all barriers, of which each has a parity."""
    many = len(barriers)
    test = "mbarrier.try_wait.parity.shared::cta.b64"
    tests = "".join(f" {test} q, [${i}], ${many + i}; and.pred p, p, q;" for i in range(1, many))
    ptx(
        f"{{ .reg .pred p, q; AGAIN: {test} p, [$0], ${many};{tests} @!p bra AGAIN; }}",
        *[barrier for barrier, _ in barriers],
        *[parity for _, parity in barriers],
    )
