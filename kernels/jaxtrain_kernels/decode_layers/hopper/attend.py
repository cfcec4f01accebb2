"""Attention of the kernel of `hopper`: blocks attend to splits of a head's keys, warps join them.

A half of a warp has one token at a time; a lane has 8 channels of it. The two halves' tokens are
adjacent, and a step of the block has 2 tokens of each warp.
"""

from typing import TYPE_CHECKING, Any

from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.decode_layers.hopper import exchange
from jaxtrain_kernels.decode_layers.hopper.keys import SplitRange, key_range, token_row
from jaxtrain_kernels.decode_layers.hopper.plan import JOINED, STEPS, WORD
from jaxtrain_kernels.decode_layers.hopper.registers import (
    LOG2E,
    add,
    divide,
    fma,
    inverse_rms,
    load_floats,
    mul,
    over_lanes,
    power,
    rounded,
    select_float,
    sum_of,
)
from jaxtrain_kernels.decode_layers.hopper.ring import await_all
from jaxtrain_kernels.hopper.emit import (
    Int,
    const,
    float_const,
    loop,
    ptx,
    run_if,
    select,
    zero,
)  # fmt: skip
from jaxtrain_kernels.hopper.words import floats, to_word

if TYPE_CHECKING:
    from jaxtrain_kernels.decode_layers.hopper.block import LayersBlock

HALF = (1, 2, 4, 8)  # distances of the lanes of half a warp


class SplitAttention:
    """What the block's threads do for attention."""

    def __init__(self, block: "LayersBlock"):
        self.block, self.plan = block, block.plan
        self.refs = block.refs
        self.start, self.count = block.load_start()

    @property
    def half(self) -> Int:
        return self.block.lane >> 4

    @property
    def channel(self) -> Int:
        return (self.block.lane & 15) * 8

    @property
    def head(self) -> Int:
        return self.block.block // self.plan.splits

    @property
    def split(self) -> Int:
        return self.block.block % self.plan.splits

    def tokens(self, layer: Int) -> SplitRange:
        return key_range(self.block, layer, self.start)

    # The new token

    def rotate(self, words: list[Any], turns: list[Any]) -> list[Any]:
        """Rotate 8 channels, and divide by the root mean square; rounded. turns: 8 cosines, and 8
        sines with the sign of the other half's channels."""
        xs, H = unpacked(words), self.plan.shape.head_dim
        squares = sum_of([mul(x, x) for x in xs])
        factor = inverse_rms(over_lanes(add, squares, HALF), H, self.plan.shape.eps)
        others = [over_lanes(lambda _, y: y, x, (8,)) for x in xs]
        ys = [
            mul(fma(x, cos, mul(other, sin)), factor)
            for x, other, cos, sin in zip(xs, others, turns[:8], turns[8:], strict=True)
        ]
        return [rounded(y) for y in ys]

    def load_turns(self) -> list[Any]:
        half = self.plan.shape.head_dim // 2
        at, load = (
            ((self.channel % half) * 4).wide(),
            "ld.global.v4.f32 {{$0, $1, $2, $3}}, [$4+{}];",
        )
        found = [
            x
            for ref in (self.refs.cos, self.refs.sin)
            for i in (0, 16)
            for x in ptx(load.format(i), ref + at, out="ffff")
        ]
        sign = select_float(self.channel < half, float_const(-1.0), float_const(1.0))
        return found[:8] + [mul(x, sign) for x in found[8:]]

    def await_token(self, tag: Int, left: Int, all_words: bool) -> tuple[list[Any], Int]:
        """Words of the head's query, of the lane's 8 channels, and `left`. all_words: also those of
        key and value, and four gates."""
        s, C, begin = self.plan.shape, self.plan.shape.head_dim, self.block.vector("qkv")
        row = begin + ((self.head * C + self.channel) * 4).wide()
        firsts = (0, s.heads, 2 * s.heads) if all_words else (0,)
        places = [(row, first * C * 4 + i) for first in firsts for i in (0, 16)]
        if all_words:
            places.append((begin + (self.gate_row() * 4).wide(), 0))
        return exchange.poll(places, tag, left)

    def value(self, words: list[Any], own: list[Any]) -> list[Any]:
        """The new token's value, of the product's words, gates, and words of the embedding."""
        gates = unpacked(words[4:])
        gate = gates[0]
        for i in range(1, 4):
            gate = select_float((self.head & 3).equals(i), gates[i], gate)
        below = add(float_const(1.0), power(mul(gate, float_const(-LOG2E))))
        gate = rounded(mul(float_const(3.0), rounded(divide(float_const(1.0), below))))
        pairs = zip(unpacked(words[:4]), unpacked(own), strict=True)
        return [rounded(add(x, rounded(mul(gate, v)))) for x, v in pairs]

    def gate_row(self) -> Int:
        """Row of the first of four gates, one of which is the head's."""
        s = self.plan.shape
        return const((s.heads + 2 * s.kv_heads) * s.head_dim) + ((self.head >> 2) << 2)

    def append(self, layer: Int, key: list[Any], value: list[Any]) -> None:
        """Write the new token's key and value to their page, by half a warp."""
        row = token_row(self.block, layer, self.start) + (self.channel * 2).wide()
        for ref, x in ((self.refs.keys, key), (self.refs.values_kept, value)):
            words = [to_word(*x[i : i + 2]) for i in range(0, 8, 2)]
            ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", ref + row, *words)

    # Attention

    def attend(
        self, layer: Int, tag: Int, left: Int, tokens: SplitRange, position: list[Any]
    ) -> tuple[list[Any], Int]:
        """Attend in blocks that have a split of a head's keys; return the position in the ring of
        keys, and `left`."""
        block, plan = self.block, self.plan
        is_last = self.split.equals(plan.splits - 1)
        attends = block.block < plan.shape.heads * plan.splits
        is_new = arith.andi(arith.andi(is_last, block.warp.equals(0)), attends)
        has_keys = arith.andi(self.split < plan.splits - 1, attends)

        def earlier(_: Int, carried: list[Any]) -> list[Any]:
            return self.attend_earlier(tag, Int(carried[0]), tokens, carried[1:])

        def new(_: Int, carried: list[Any]) -> list[Any]:
            return [self.attend_new(layer, tag, Int(carried[0])).value]

        left_value, *position = loop(once_if(has_keys), [left.value, *position], earlier)
        return position, Int(loop(once_if(is_new), [left_value], new)[0])

    def attend_earlier(
        self, tag: Int, left: Int, tokens: SplitRange, position: list[Any]
    ) -> list[Any]:
        """Attend to the tokens of the pages."""
        block, ring, turns = self.block, self.block.keys, self.load_turns()
        words, left = self.await_token(tag, left, all_words=False)
        query = self.rotate(words, turns)
        row_bytes = self.plan.shape.head_dim * 2
        load = "ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{}];"

        def group(i: Int, carried: list[Any]) -> list[Any]:
            position, (total, *sums) = carried[:2], carried[2:]
            index, parity = map(Int, position)
            await_all(ring.full + index * 8, [(0, parity)])
            own = block.warp * 2 + self.half
            at = ring.first + index * ring.bytes + (own * row_bytes + self.channel * 2)
            found, read = [], const(0)
            for half in range(2):
                for step in range(STEPS):
                    row = half * self.plan.tokens + step * 2 * self.plan.warps
                    found.append(ptx(load.format(row * row_bytes), at, out="rrrr"))
                    read = read | Int(found[-1][0])
            ring.release(ring.free + index * 8, [0], block.lane.equals(0), read)
            weights = [self.weight(query, unpacked(words)) for words in found[:STEPS]]
            token = tokens.begin + i * self.plan.tokens + own
            for step, (p, words) in enumerate(zip(weights, found[STEPS:], strict=True)):
                valid = token + step * 2 * self.plan.warps < tokens.end
                # What a slot has beyond the end is of another call.
                xs = [select_float(valid, v, zero()) for v in unpacked(words)]
                p = select_float(valid, p, zero())
                total = add(total, p)
                sums = [fma(p, v, x) for v, x in zip(xs, sums, strict=True)]
            return [*ring.next(position), total, *sums]

        carried = [*position, *(zero() for _ in range(9))]
        found = loop(tokens.groups, carried, group)
        self.store_split(found[2:], tag)
        return [left.value, *found[:2]]

    def attend_new(self, layer: Int, tag: Int, left: Int) -> Int:
        """Append the new token to the pages, and attend to it, by one warp."""
        s, plan, turns = self.plan.shape, self.plan, self.load_turns()
        own = ptx(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            self.refs.values
            + ((layer * s.kv_heads + self.head) * s.head_dim + self.channel).wide() * 2,
            out="rrrr",
        )
        words, left = self.await_token(tag, left, all_words=True)
        query, key = self.rotate(words[:4], turns), self.rotate(words[4:8], turns)
        value, p = self.value(words[8:], own), self.weight(query, key)
        part = const(plan.places["parts"]) + self.block.block * plan.parts_bytes
        part = self.refs.words + part.wide()

        def write() -> None:
            for i, v in enumerate(value):
                at = part + (self.channel * WORD).wide()
                exchange.write_word(at, mul(p, v), tag, i * WORD)
            write_totals = lambda: self.write_totals(part, p, tag)
            run_if(self.block.lane.equals(0), write_totals)
            run_if(const(0) < self.count, lambda: self.append(layer, key, value))

        run_if(self.half.equals(0), write)
        return left

    def write_totals(self, part: Int, total: Any, tag: Int) -> None:
        for i in range(2):
            exchange.write_word(part, total, tag, (self.plan.shape.head_dim + i) * WORD)

    def weight(self, query: list[Any], key: list[Any]) -> Any:
        """Exponential of the score of a key. Both are normed, so that the score is below the scale
        times the channels, and needs no largest score (`supports`)."""
        parts = [zero(), zero()]
        for i, (q, k) in enumerate(zip(query, key, strict=True)):
            parts[i % 2] = fma(q, k, parts[i % 2])
        total = over_lanes(add, add(*parts), HALF)
        return power(mul(total, float_const(self.plan.shape.scale * LOG2E)))

    def store_split(self, state: list[Any], tag: Int) -> None:
        """Add the block's warps, and write the split for the blocks that join all splits."""
        block, plan, H = self.block, self.plan, self.plan.shape.head_dim
        total, *sums = (over_lanes(add, x, (16,)) for x in state)
        at = block.memory.heads + (block.warp * H + self.channel) * 4

        def put() -> None:
            for i in (0, 4):
                store = f"st.shared.v4.f32 [$0+{4 * i}], {{$1, $2, $3, $4}};"
                ptx(store, at, *sums[i : i + 4])

        run_if(self.half.equals(0), put)
        totals = block.memory.totals + block.warp * 4
        run_if(block.lane.equals(0), lambda: ptx("st.shared.f32 [$0], $1;", totals, total))
        block.sync()
        part = const(self.plan.places["parts"]) + block.block * plan.parts_bytes
        part = self.refs.words + part.wide()

        def write() -> None:
            column = block.memory.heads + block.thread * 4
            load = "ld.shared.f32 $0, [$1+{}];"
            found = [ptx(load.format(warp * H * 4), column, out="f") for warp in range(plan.warps)]
            exchange.write_word(part + (block.thread * WORD).wide(), sum_of(found), tag)

            def write_total() -> None:
                total = sum_of(load_floats(block.memory.totals, plan.warps))
                self.write_totals(part, total, tag)

            run_if(block.thread.equals(0), write_total)

        run_if(block.thread < H, write)

    def join(self, tag: Int, left: Int) -> Int:
        """Join the splits of some channels of a head, by one warp of a block; return `left`. Blocks
        without a split of the keys are chosen first."""
        s, block = self.plan.shape, self.block
        task = const(self.plan.blocks - 1) - block.block
        joins = task < s.heads * s.head_dim // JOINED
        joins = arith.andi(joins, block.warp.equals(self.plan.warps - 1))

        def run(_: Int, carried: list[Any]) -> list[Any]:
            return [self.join_channels(task, tag, Int(carried[0])).value]

        return Int(loop(once_if(joins), [left.value], run)[0])

    def join_channels(self, task: Int, tag: Int, left: Int) -> Int:
        """Lane (c, i), c < 8 and i < 4, adds two channels of splits i, i + 4, ..., and the lanes of
        one c add theirs."""
        plan, lane, each = self.plan, self.block.lane, self.plan.shape.head_dim // JOINED
        head, first = task // each, (task % each) * JOINED
        channel, turn = first + (lane & 7) * 2, lane >> 3
        begin = self.block.vector("parts")
        valid, places = [], []
        for i in range(-(-plan.splits // 4)):
            split = turn + 4 * i
            is_valid = split < plan.splits
            valid.append(is_valid)
            split = select(is_valid, split, const(plan.splits - 1))
            part = begin + ((head * plan.splits + split) * plan.parts_bytes).wide()
            places += [(part + (channel * WORD).wide(), 0), (part, plan.shape.head_dim * WORD)]
        words, left = exchange.poll(places, tag, left)
        sums = []
        for n in (0, 1, 2):
            numbers = [as_float(word) for word in words[n::4]]
            pairs = zip(valid, numbers, strict=True)
            sums.append(sum_of([select_float(is_valid, x, zero()) for is_valid, x in pairs]))
        *sums, total = (over_lanes(add, x, (8, 16)) for x in sums)
        word = to_word(*(divide(x, total) for x in sums))
        at = self.block.vector("heads") + ((head * plan.shape.head_dim + channel) * 4).wide()
        run_if(turn.equals(0), lambda: exchange.write_word(at, word, tag))
        return left


def once_if(condition: Any) -> Int:
    """Turns of a loop that runs once, or not at all."""
    return select(condition, const(1), const(0))


def unpacked(words: Any) -> list[Any]:
    return [x for word in words for x in floats(word)]


def as_float(word: Any) -> Any:
    return ptx("mov.b32 $0, $1;", word, out="f", effects=False)
