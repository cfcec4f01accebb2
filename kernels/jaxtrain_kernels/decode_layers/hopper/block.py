"""One block of the kernel of `hopper`, as operations of each thread.

Each warp has its own inputs of all products, of which it polls only the words that it needs, and
its part of the residual stream, which all blocks keep in registers: lane (g, t) has inputs 4 t ..
4 t + 3 of each chunk's 16 inputs g // 2.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, gpu

from jaxtrain_kernels.decode_layers.hopper import exchange
from jaxtrain_kernels.decode_layers.hopper.attend import SplitAttention
from jaxtrain_kernels.decode_layers.hopper.keys import load_keys
from jaxtrain_kernels.decode_layers.hopper.order import CHUNK_BYTES, INPUTS, ROWS
from jaxtrain_kernels.decode_layers.hopper.plan import (
    KEY_SLOTS,
    LayersMemory,
    LayersRefs,
    StreamedPlan,
    StreamedProduct,
)
from jaxtrain_kernels.decode_layers.hopper.registers import (
    add,
    add_words,
    fma,
    inverse_rms,
    load_floats,
    mul,
    over_lanes,
    select_float,
    sum_of,
)
from jaxtrain_kernels.decode_layers.hopper.ring import SlotRing, await_all, fence_init
from jaxtrain_kernels.hopper.emit import (
    Int,
    address,
    const,
    int_type,
    loop,
    ptx,
    run_if,
    select,
    zero,
)  # fmt: skip
from jaxtrain_kernels.hopper.words import floats, mma, to_word

BATCH_CHUNKS = 12  # that a warp reads at once
NAN_WORD = 0x7FC07FC0  # two bfloat16


class Carried(NamedTuple):
    """What the loop over layers carries. keys: position in the ring of keys. left: see
    `exchange.poll`. stream: words of the residual stream."""

    keys: list[Any]
    left: Int
    stream: list[Any]


class LayersBlock:
    """A block's registers, and what its threads do."""

    def __init__(self, plan: StreamedPlan, refs: LayersRefs, memory: Any):
        self.plan, self.products = plan, plan.products
        self.refs = LayersRefs(*map(address, refs))
        starts = itertools.accumulate(plan.shared_bytes, initial=0)
        first = address(memory)
        self.memory = LayersMemory(
            *(first + at for at, _ in zip(starts, LayersMemory._fields, strict=False))
        )
        m = self.memory
        self.ring = SlotRing(m.ring, m.full, m.free, plan.slots, plan.slot.bytes, 1, plan.warps)
        keys = m.keys, m.keys_full, m.keys_free
        self.keys = SlotRing(*keys, KEY_SLOTS, plan.key_bytes, 32, plan.warps)
        self._thread, self._warp = Int(mgpu.utils.thread_idx()), Int(mgpu.utils.warp_idx())
        self._block = Int(arith.index_cast(int_type(), gpu.block_id(gpu.Dimension.x)))
        self.thread, self.warp, self.block = self._thread, self._warp, self._block
        self.places = plan.places
        # Of the layer, as its code is written: product, slot, and parities of the ring's turns.
        self.phase, self.slot, self.parities = 0, 0, (const(0), const(1))

    def hide(self, left: Int) -> None:
        """Derive thread and block from a number that changes in the loop over layers, so that the
        compiler does not compute what depends on them before the loop: it would fill the registers.
        """
        nothing = left >> 31
        self.thread, self.warp = self._thread | nothing, self._warp | nothing
        self.block = self._block | nothing

    @property
    def lane(self) -> Int:
        return self.thread & 31

    def run(self) -> None:
        is_loader = arith.andi(self.warp.equals(self.plan.warps), self.lane.equals(0))
        run_if(is_loader, self.init)
        ptx("bar.sync 0;")
        run_if(is_loader, self.load)
        run_if(self.warp.equals(self.plan.warps + 1), lambda: load_keys(self))
        run_if(self.warp < self.plan.warps, self.compute)

    def init(self) -> None:
        self.ring.init()
        self.keys.init()
        fence_init()

    def load(self) -> None:
        """Load all weights, by one thread."""

        def layer(index: Int, carried: list[Any]) -> list[Any]:
            for begin, count in self.sources(index):
                carried = self.ring.load(count, self.plan.flight, carried, begin)
            return carried

        loop(const(self.plan.shape.depth), [const(0).value, *self.ring.start], layer)

    def load_start(self) -> tuple[Int, Int]:
        """Position of the new token, and whether there is one."""
        places = self.refs.start, self.refs.count
        start, count = (Int(ptx("ld.global.b32 $0, [$1];", at, out="r")) for at in places)
        return start, count

    def sync(self) -> None:
        """Wait for all warps that multiply."""
        ptx(f"bar.sync 1, {32 * self.plan.warps};")

    def first_units(self, p: StreamedProduct) -> tuple[Int, Int]:
        """The first unit that the block multiplies, and the first whose results it writes: it
        writes those before the next block's."""
        own = (self.block * p.units) // self.plan.blocks
        last = const(p.units - p.most)
        return select(own < p.units - p.most, own, last), own

    def sources(self, layer: Int) -> list[tuple[Int, int]]:
        """First byte and number of the block's slots of each product of a layer."""
        found = []
        for name, p in self.products.items():
            unit = (layer * p.units + self.first_units(p)[0]).wide()
            begin = getattr(self.refs, name) + unit * (p.slots * self.plan.slot.bytes)
            found.append((begin, p.most * p.slots))
        return found

    # Inputs

    def first_input(self, inputs: int) -> tuple[Int, int]:
        """First of the lane's four adjacent inputs in its first chunk, and number of chunks."""
        chunks, lane = inputs // INPUTS // self.plan.warps, self.lane
        first = self.warp * (chunks * INPUTS) + (lane >> 3) * 16 + (lane & 3) * 4
        return first, chunks

    def vector(self, name: str) -> Int:
        return self.refs.words + const(self.places[name]).wide()

    def poll(self, name: str, inputs: int, tag: Int, left: Int) -> tuple[list[Any], Int]:
        """Words of the lane's inputs, two a chunk."""
        first, chunks = self.first_input(inputs)
        begin = self.vector(name) + (first * 4).wide()
        return exchange.poll([(begin, 4 * INPUTS * i) for i in range(chunks)], tag, left)

    def load_stream(self) -> list[Any]:
        """Words of x0."""
        first, chunks = self.first_input(self.width)
        begin = self.refs.x0 + (first * 2).wide()
        load = "ld.global.v2.b32 {$0, $1}, [$2];"
        found = [ptx(load, begin + 2 * INPUTS * i, out="rr") for i in range(chunks)]
        return list(itertools.chain(*found))

    @property
    def width(self) -> int:
        return self.plan.shape.width

    def store_squares(self, stream: Sequence[Any]) -> None:
        """Write the sum of the squares of the warp's inputs to shared memory."""
        total = zero()
        for x in itertools.chain(*map(floats, stream)):
            total = fma(x, x, total)
        total = over_lanes(add, total, (1, 2, 8, 16))
        at = self.squares_place() + self.warp * 4
        run_if(self.lane.equals(0), lambda: ptx("st.shared.f32 [$0], $1;", at, total))

    # Products

    def squares_place(self) -> Int:
        return self.memory.squares + (self.phase % 2) * (-(-self.plan.warps // 4) * 16)

    def sums_place(self) -> Int:
        return self.memory.sums + (self.phase % 2) * self.plan.sums_bytes

    def batches(self, p: StreamedProduct) -> list[list[tuple[int, int]]]:
        """(unit, slot) of the product in turn: what is loaded before the wait for its inputs, and
        what a warp loads at once after it."""
        slots = [(unit, slot) for unit in range(p.most) for slot in range(p.slots)]
        most = max(1, min(BATCH_CHUNKS // self.plan.slot.chunks, self.plan.slots // 2))
        first, rest = slots[:most], slots[most:]
        each = -(-len(rest) // max(1, -(-len(rest) // most)))
        return [first, *map(list, itertools.batched(rest, each))] if rest else [first]

    def load_weights(self, count: int) -> list[list[Any]]:
        """Words of the warp's chunks of the next slots, which it frees."""
        ring, chunks = self.ring, self.plan.slot.chunks
        turns = [divmod(self.slot + i, ring.slots) for i in range(count)]
        self.slot += count
        await_all(ring.full, [(index * 8, self.parities[turn % 2]) for turn, index in turns])
        own = ring.first + self.warp * (chunks * CHUNK_BYTES) + self.lane * 16
        load, read, found = "ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{}];", const(0), []
        for _, index in turns:
            at = [index * ring.bytes + i * CHUNK_BYTES for i in range(chunks)]
            found.append([ptx(load.format(x), own, out="rrrr") for x in at])
            for words in found[-1]:
                read = read | Int(words[0])
        freed = [index * 8 for _, index in turns]
        ring.release(ring.free, freed, self.lane.equals(0), read)
        return found

    def load_ahead(self, name: str) -> list[list[Any]]:
        """Load the first weights of a product, before the wait for its inputs: so they are not
        loaded after it, and the ring has room for others."""
        return self.load_weights(len(self.batches(self.products[name])[0]))

    def multiply(
        self, name: str, ahead: list[list[Any]], inputs: Sequence[Any], stream: Sequence[Any]
    ) -> None:
        """Write the warp's sums of the block's rows to shared memory. ahead: of `load_ahead`.
        inputs: words, two a chunk. stream: to be normed."""
        p, chunks, found = self.products[name], self.plan.slot.chunks, ahead
        sums: list[Any] = [zero() for _ in range(4)]
        for number, batch in enumerate(self.batches(p)):
            if number:
                found = self.load_weights(len(batch))
            ended = []
            for (unit, slot), each in zip(batch, found, strict=True):
                for i, words in enumerate(each):
                    at = 2 * (slot * chunks + i)
                    sums = mma(words, inputs[at : at + 2], sums)
                if slot == p.slots - 1:
                    ended.append((unit, sums))
                    sums = [zero() for _ in range(4)]
            if stream and not number:
                self.store_squares(stream)
            self.store_sums(ended)

    def store_sums(self, units: Sequence[tuple[int, list[Any]]]) -> None:
        """Write the warp's sums of units to shared memory. Output r has a sum in lanes (r, 0) and
        (4 + r, 1), of the mma's rows g, and in (r, 2) and (4 + r, 3), of rows 8 + g."""
        lane = self.lane
        lower = (lane & 2).equals(0)
        totals = [over_lanes(add, select_float(lower, x[0], x[2]), (2, 17)) for _, x in units]
        row = self.sums_place() + ((lane >> 2) * self.plan.warps + self.warp) * 4
        is_first = arith.andi((lane & 3).equals(0), lane < 16)

        def put() -> None:
            for (unit, _), total in zip(units, totals, strict=True):
                offset = unit * (ROWS * self.plan.warps * 4)
                ptx(f"st.shared.f32 [$0+{offset}], $1;", row, total)

        run_if(is_first, put)

    def finish(self, name: str, tag: Int, left: Int) -> None:
        """Add the warps' sums of the block's rows, and write its own rows for all blocks."""
        p, s, count = self.products[name], self.plan.shape, self.plan.warps
        is_normed, thread = name in ("qkv", "up"), self.thread
        squares, sums = self.squares_place(), self.sums_place() + thread * (8 * count)
        self.phase += 1
        first, own = self.first_units(p)
        last, unit = ((self.block + 1) * p.units) // self.plan.blocks, first + (thread >> 1)
        inside = arith.andi(thread < 2 * p.most, unit.compare("sge", own))
        inside = arith.andi(inside, unit < last)
        at = self.vector(name) + ((unit * ROWS + (thread & 1) * 2) * 4).wide()
        run_if(left.equals(0), self.report_timeout)
        self.sync()

        def write() -> None:
            parts = load_floats(sums, 2 * count)
            ys = [sum_of(parts[:count]), sum_of(parts[count:])]
            if is_normed:
                total = sum_of(load_floats(squares, count))
                factor = inverse_rms(total, s.width, s.eps)
                ys = [mul(y, factor) for y in ys]
            word = to_word(*ys)
            if name == "up":
                word = to_word(*(_squared_relu(y) for y in floats(word)))
            exchange.write_word(at, word, tag)

        run_if(inside, write)

    def report_timeout(self) -> None:
        """Tell the block that stores the stream, before it can have anything that depends on it."""
        ptx("st.relaxed.gpu.global.b32 [$0], $1;", self.vector("timed_out"), const(1))
        ptx("fence.acq_rel.gpu;")

    # Layers

    def compute(self) -> None:
        spins = const(self.plan.spins)
        self.x0 = self.load_stream()
        self.attention = SplitAttention(self)
        start = self.keys.start, spins, self.x0
        found = loop(const(self.plan.shape.depth), self.flat(Carried(*start)), self.layer)
        carried = self.carried(found)
        self.hide(carried.left)
        run_if(self.block.equals(0), lambda: self.store_end(carried))

    def flat(self, c: Carried) -> list[Any]:
        return [*c.keys, c.left.value, *c.stream]

    def carried(self, values: Sequence[Any]) -> Carried:
        return Carried(list(values[:2]), Int(values[2]), list(values[3:]))

    def layer(self, layer: Int, values: list[Any]) -> list[Any]:
        keys, left, stream = self.carried(values)
        self.hide(left)
        self.slot, parity = 0, layer & (self.plan.turns % 2)
        self.parities = parity, parity ^ 1
        tag, s = layer + 1, self.plan.shape
        load = "ld.global.v2.f32 {$0, $1}, [$2];"
        scales = ptx(load, self.refs.scales + (layer * 8).wide(), out="ff")
        tokens = self.attention.tokens(layer)
        ahead = self.load_ahead("qkv")
        # Words of the layer before the first are zeros, as all are before a call.
        branch, left = self.poll("down", s.width, layer, left)
        stream = [add_words(x, y) for x, y in zip(stream, branch, strict=True)]
        is_middle = arith.andi((layer - 1).equals(s.middle), self.block.equals(0))
        run_if(is_middle, lambda: self.store_stream(self.refs.middle, stream))
        stream = [self.scaled(scales, x, x0) for x, x0 in zip(stream, self.x0, strict=True)]
        self.product("qkv", ahead, stream, tag, left, stream)
        keys, left = self.attention.attend(layer, tag, left, tokens, keys)
        left = self.attention.join(tag, left)
        ahead = self.load_ahead("out")
        heads, left = self.poll("heads", s.heads * s.head_dim, tag, left)
        self.product("out", ahead, heads, tag, left)
        ahead = self.load_ahead("up")
        branch, left = self.poll("out", s.width, tag, left)
        stream = [add_words(x, y) for x, y in zip(stream, branch, strict=True)]
        self.product("up", ahead, stream, tag, left, stream)
        ahead = self.load_ahead("down")
        hidden, left = self.poll("up", s.hidden, tag, left)
        self.product("down", ahead, hidden, tag, left)
        return self.flat(Carried(keys, left, stream))

    def product(
        self, name: str, ahead: list[list[Any]], inputs: Sequence[Any], tag: Int, left: Int,
        stream: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """Multiply, and write the results. stream: to be normed."""
        self.multiply(name, ahead, inputs, stream)
        self.finish(name, tag, left)

    def scaled(self, scales: Sequence[Any], x: Any, x0: Any) -> Any:
        pairs = zip(floats(x), floats(x0), strict=True)
        return to_word(*(fma(scales[0], a, mul(scales[1], b)) for a, b in pairs))

    def store_stream(self, result: Int, stream: Sequence[Any]) -> None:
        """Write the residual stream to a result, by one block."""

        def put() -> None:
            first, _ = self.first_input(self.width)
            at = result + (first * 2).wide()
            for i, pair in enumerate(itertools.batched(stream, 2)):
                ptx("st.global.v2.b32 [$0], {$1, $2};", at + 2 * INPUTS * i, *pair)

        run_if((self.lane & 4).equals(0), put)

    def store_end(self, c: Carried) -> None:
        """Store the stream after the last layer, and whether a warp timed out, when the stream is
        NaN: by one block."""
        s, is_first = self.plan.shape, self.thread.equals(0)
        store = functools.partial(ptx, "st.global.b32 [$0], $1;", self.refs.timed_out)
        run_if(is_first, lambda: store(const(0)))
        branch, left = self.poll("down", s.width, const(s.depth), c.left)
        at = self.vector("timed_out")
        reported = Int(ptx("ld.relaxed.gpu.global.b32 $0, [$1];", at, out="r"))
        timed_out = arith.ori(left.equals(0), reported.equals(1))
        self.sync()
        run_if(timed_out, lambda: store(const(1)))
        stream = [add_words(x, y) for x, y in zip(c.stream, branch, strict=True)]
        stream = [select(timed_out, const(NAN_WORD), Int(x)) for x in stream]
        self.store_stream(self.refs.last, stream)
        if s.middle == s.depth - 1:
            self.store_stream(self.refs.middle, stream)


def _squared_relu(y: Any) -> Any:
    positive = ptx("max.f32 $0, $1, $2;", y, zero(), out="f", effects=False)
    return mul(positive, positive)
