"""Attention of the kernel of `hopper`: blocks attend to splits of a head's keys, warps join them.

A half of a warp has one token at a time; a lane has 8 channels of it. The two halves' tokens are
adjacent, and a step of the block has 2 tokens of each warp.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.decode_layers.hopper import exchange
from jaxtrain_kernels.decode_layers.hopper.plan import JOINED, WORD
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
from jaxtrain_kernels.matmul.streamed.emit import (
    Int,
    const,
    float_const,
    loop,
    ptx,
    run_if,
    select,
    zero,
)  # fmt: skip
from jaxtrain_kernels.matmul.streamed.registers import floats, to_word

if TYPE_CHECKING:
    from jaxtrain_kernels.decode_layers.hopper.block import LayersBlock

STEPS = 2  # of a group, which is loaded at once: the first two groups before the wait
HALF = (1, 2, 4, 8)  # distances of the lanes of half a warp


class Places(NamedTuple):
    """Of the block's keys: first position and end, and pages of the warp's first two groups."""

    begin: Int
    end: Int
    pages: list[Int]


# Words of the keys and of the values of a group of steps, four a token.
Loaded = Sequence[Sequence[Sequence[Any]]]


class SplitAttention:
    """What the block's threads do for attention."""

    def __init__(self, block: "LayersBlock"):
        self.block, self.plan = block, block.plan
        self.refs = block.refs
        self.start, self.count = map(
            Int, ptx("ld.global.v2.b32 {$0, $1}, [$2];", self.refs.start_count, out="rr")
        )

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

    @property
    def attends(self) -> Any:
        return self.block.block < self.plan.shape.heads * self.plan.splits

    # Keys and values of the pages

    def load_places(self, layer: Int) -> Places:
        """The block's split of the keys, and pages of the first steps."""
        at = self.refs.windows + (layer * 4).wide()
        window = Int(ptx("ld.global.b32 $0, [$1];", at, out="r"))
        first = self.start - window
        first = select(first < 0, const(0), first)
        each = (self.start - first + (self.plan.splits - 1)) // self.plan.splits
        begin = first + self.split * each
        end = begin + each
        end = select(end < self.start, end, self.start)
        pages = [self.load_pages(begin, end, const(i)) for i in (0, 1)]
        return Places(begin, end, list(itertools.chain(*pages)))

    def token(self, begin: Int, group: Int, step: int) -> Int:
        block = self.block
        turn = group * STEPS + step
        return begin + (turn * self.plan.warps + block.warp) * 2 + self.half

    def load_pages(self, begin: Int, end: Int, group: Int) -> list[Int]:
        """Pages of the warp's tokens in a group of steps; 0 beyond the end."""
        found = []
        for step in range(STEPS):
            token = self.token(begin, group, step)
            valid = arith.andi(token < end, self.attends)
            at = self.refs.table + ((token // self.plan.page) * 4).wide()
            found.append(Int(load_if(valid, at, 1)))
        return found

    def row(self, layer: Int, page: Int, token: Int) -> Int:
        """Byte of the lane's channels of a token."""
        plan, s = self.plan, self.plan.shape
        row = ((layer * plan.pages + page) * plan.page + token % plan.page) * s.kv_heads
        return (row + self.head).wide() * (s.head_dim * 2) + (self.channel * 2).wide()

    def load(self, layer: Int, begin: Int, end: Int, group: Int, pages: Sequence[Int]) -> Loaded:
        """Load a group of steps, whose pages are the first of `pages`."""
        keys, values = [], []
        for step, page in enumerate(pages[:STEPS]):
            token = self.token(begin, group, step)
            row, valid = self.row(layer, page, token), token < end
            keys.append(load_if(valid, self.refs.keys + row, 4))
            values.append(load_if(valid, self.refs.values_kept + row, 4))
        return keys, values

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
        at = self.refs.turns + ((self.channel % half) * 4).wide()
        load = "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];"
        found = [
            x
            for row in range(2)
            for i in range(2)
            for x in ptx(load, at + (row * half * 4 + i * 16), out="ffff")
        ]
        sign = select_float(self.channel < half, float_const(-1), float_const(1))
        return found[:8] + [mul(x, sign) for x in found[8:]]

    def await_token(
        self, layer: Int, tag: Int, left: Int
    ) -> tuple[list[Any], list[Any], list[Any], Int]:
        """Words of the head's query, key and value, of the lane's 8 channels, and of four gates;
        `load_turns`; words of the value embedding; and `left`."""
        s, block, C = self.plan.shape, self.block, self.plan.shape.head_dim
        turns = self.load_turns()
        own = ptx(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            self.refs.values + ((layer * s.kv_heads + self.head) * C + self.channel).wide() * 2,
            out="rrrr",
        )
        begin = block.vector("qkv")
        row = begin + ((self.head * C + self.channel) * 4).wide()
        firsts = [first * C * 4 + i for first in (0, s.heads, 2 * s.heads) for i in (0, 16)]
        places = [(row, first) for first in firsts]
        places.append((begin + (self.gate_place() * 4).wide(), 0))
        words, left = exchange.poll(places, tag, left)
        return words, turns, own, left

    def value(self, words: list[Any], own: list[Any]) -> list[Any]:
        """The new token's value, of the product's words, gates, and words of the embedding."""
        gates = unpacked(words[4:])
        gate = gates[0]
        for i in range(1, 4):
            gate = select_float((self.head & 3).equals(i), gates[i], gate)
        below = add(float_const(1), power(mul(gate, float_const(-LOG2E))))
        gate = rounded(mul(float_const(3), rounded(divide(float_const(1), below))))
        pairs = zip(unpacked(words[:4]), unpacked(own), strict=True)
        return [rounded(add(x, rounded(mul(gate, v)))) for x, v in pairs]

    def gate_place(self) -> Int:
        """Row of the first of four gates, one of which is the head's."""
        s = self.plan.shape
        return const((s.heads + 2 * s.kv_heads) * s.head_dim) + ((self.head >> 2) << 2)

    def append(self, layer: Int, key: list[Any], value: list[Any], is_first: Any) -> None:
        """Write the new token's key and value to their page."""

        def put() -> None:
            at = self.refs.table + ((self.start // self.plan.page) * 4).wide()
            page = Int(ptx("ld.global.b32 $0, [$1];", at, out="r"))
            row = self.row(layer, page, self.start)
            for ref, x in ((self.refs.keys, key), (self.refs.values_kept, value)):
                words = [to_word(*x[i : i + 2]) for i in range(0, 8, 2)]
                ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", ref + row, *words)

        run_if(arith.andi(is_first, const(0) < self.count), put)

    # SplitAttention

    def attend(self, layer: Int, tag: Int, left: Int, places: Places) -> Int:
        """Attend in blocks that have a split of a head's keys; return `left`."""

        def run(_: Int, carried: list[Any]) -> list[Any]:
            return [self.attend_split(layer, tag, Int(carried[0]), places).value]

        return Int(loop(once_if(self.attends), [left.value], run)[0])

    def attend_split(self, layer: Int, tag: Int, left: Int, places: Places) -> Int:
        begin, end, pages = places
        load = functools.partial(self.load, layer, begin, end)
        loaded, ahead = (load(const(i), pages[i * STEPS :]) for i in (0, 1))
        words, turns, own, left = self.await_token(layer, tag, left)
        query = self.rotate(words[:4], turns)
        # The new token is a key of the last warp of the first split.
        is_own = self.block.warp.equals(self.plan.warps - 1)
        is_own = arith.andi(self.split.equals(0), is_own)
        state = [zero() for _ in range(9)]

        def first(_: Int, state: list[Any]) -> list[Any]:
            key, value = self.rotate(words[4:8], turns), self.value(words[8:], own)
            is_first = self.half.equals(0)
            self.append(layer, key, value, is_first)
            p = select_float(is_first, self.weight(query, key), zero())
            return [p, *(mul(p, v) for v in value)]

        state = loop(once_if(is_own), state, first)
        state = self.add_tokens(query, state, loaded, begin, end, const(0))
        of_group = 2 * STEPS * self.plan.warps
        more = (end - begin + (of_group - 1)) // of_group - 1
        more = select(begin + of_group < end, more, const(0))

        def group(i: Int, carried: list[Any]) -> list[Any]:
            many = 4 * STEPS
            now = [list(itertools.batched(carried[n : n + many], 4)) for n in (0, many)]
            number = i + 1
            following = load(number + 1, self.load_pages(begin, end, number + 1))
            state = self.add_tokens(query, carried[2 * many :], now, begin, end, number)
            return [*flat_words(following), *state]

        found = loop(more, [*flat_words(ahead), *state], group)
        self.store_split(found[8 * STEPS :], tag)
        return left

    def weight(self, query: list[Any], key: list[Any]) -> Any:
        """Exponential of the score of a key. Both are normed, so that the score is below the scale
        times the channels, and needs no largest score (`supports`)."""
        parts = [zero(), zero()]
        for i, (q, k) in enumerate(zip(query, key, strict=True)):
            parts[i % 2] = fma(q, k, parts[i % 2])
        total = over_lanes(add, add(*parts), HALF)
        return power(mul(total, float_const(self.plan.shape.scale * LOG2E)))

    def add_tokens(
        self, query: list[Any], state: list[Any], loaded: Loaded, begin: Int, end: Int, group: Int
    ) -> list[Any]:
        """State with a group of steps: sum of the weights, and weighted sums of 8 channels."""
        weights = [self.weight(query, unpacked(words)) for words in loaded[0]]
        total, *sums = state
        for step, (p, words) in enumerate(zip(weights, loaded[1], strict=True)):
            p = select_float(self.token(begin, group, step) < end, p, zero())
            total = add(total, p)
            sums = [fma(p, v, x) for v, x in zip(unpacked(words), sums, strict=True)]
        return [total, *sums]

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

            def put_total() -> None:
                total = sum_of(load_floats(block.memory.totals, plan.warps))
                for i in range(2):
                    exchange.write_word(part, total, tag, (H + i) * WORD)

            run_if(block.thread.equals(0), put_total)

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


def flat_words(loaded: Loaded) -> list[Any]:
    return [word for tokens in loaded for words in tokens for word in words]


def as_float(word: Any) -> Any:
    return ptx("mov.b32 $0, $1;", word, out="f", effects=False)


def load_if(condition: Any, at: Int, words: int) -> Any:
    """Words of device memory, or zeros."""
    flag = select(condition, const(1), const(0))
    names = [f"${i}" for i in range(words)]
    zeros = "".join(f" mov.b32 {name}, 0;" for name in names)
    vector, given = (f".v{words}", f"{{{', '.join(names)}}}") if words > 1 else ("", names[0])
    return ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, ${words + 1}, 0;{zeros}"
        f" @p ld.global{vector}.b32 {given}, [${words}]; }}",
        at, flag, out="r" * words,
    )  # fmt: skip
