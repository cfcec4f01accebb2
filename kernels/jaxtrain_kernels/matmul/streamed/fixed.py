"""Products of one row with int4 codes on tensor cores for 8-bit integers, in `streamed`.

A byte of codes is an operand as it is: 16 high + low, for codes h and l with 8 added to each. Its
lower 4 bits are another: (16 h + l) x_h + l (16 x_l - x_h) is 16 times h x_h + l x_l. So 8 codes of
a lane need one instruction, where 7 turn them into bfloat16. The inputs are integers below 2^18,
which one power of two scales for a warp and product: what is below 2^-18 of the largest is lost.
Three digits of base 256 are in three of the product's 8 columns, of which one row needs only one.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.hopper.emit import Int, const, float_const, ptx, select, zero
from jaxtrain_kernels.hopper.words import LOAD, floats
from jaxtrain_kernels.matmul.streamed.order import GROUP, PIECE, half_words, scale_words
from jaxtrain_kernels.matmul.streamed.plan import DIGIT_WORDS, DIGITS

UNIT = 12582912.0  # a float32 whose lowest bit is 1
UNIT_BITS = 0x4B400000
EIGHTS = 0x88888888 - (1 << 32)  # codes of 0


def scale_of(words: list[Any]) -> list[Any]:
    """The power of two that scales the warp's bfloat16 inputs, and its inverse over 16; NaN if one
    of them is not finite."""
    largest = " ".join(
        f"and.b32 a, ${i}, 0x7FFF0000; max.u32 m, m, a; shl.b32 a, ${i}, 16;"
        " and.b32 a, a, 0x7FFF0000; max.u32 m, m, a;"
        for i in range(2, 2 + len(words))
    )
    return ptx(
        "// scale\n{ .reg .pred p; .reg .b32 a, m, e; mov.b32 m, 0; "
        + largest
        + " redux.sync.max.u32 m, m, -1; shr.u32 e, m, 23; max.u32 e, e, 22;"
        " setp.eq.u32 p, e, 255; sub.u32 a, 271, e; shl.b32 a, a, 23; mov.b32 $0, a;"
        " sub.u32 a, e, 21; shl.b32 a, a, 23; selp.b32 a, 0x7FC00000, a, p; mov.b32 $1, a; }",
        *words, out="ff", early=True,
    )  # fmt: skip


def digits(words: list[Any], scale: Any) -> list[list[Any]]:
    """Of each digit, the bytes of a lane's 8 inputs that belong to bytes of codes, and to their
    lower halves."""
    code = ["// digits\n{ .reg .b32 a, b, c, d, x<8>, u<8>; .reg .f32 f;"]
    first = 2 * DIGITS
    for i in range(8):
        word, take = f"${first + i // 2}", "and.b32 a, {}, 0xFFFF0000;"
        take = take if i % 2 else "shl.b32 a, {}, 16;"
        code.append(take.format(word) + f" mov.b32 f, a; fma.rn.f32 f, f, ${first + 4}, {_hex()};")
        code.append(f"mov.b32 a, f; sub.s32 x{i}, a, {UNIT_BITS};")
    for n, (low, high) in enumerate(((0, 2), (4, 6), (1, 3), (5, 7))):  # nibbles of byte n
        code.append(f"add.s32 u{n}, x{high}, 0x808080; shl.b32 a, x{low}, 4;")
        code.append(f"sub.s32 a, a, x{high}; add.s32 u{4 + n}, a, 0x808080;")
    for digit in range(DIGITS):
        pick = f"0x{4 + digit}{digit}"
        for kind in range(2):
            u = [f"u{4 * kind + n}" for n in range(4)]
            code.append(f"prmt.b32 a, {u[0]}, {u[1]}, {pick}; prmt.b32 b, {u[2]}, {u[3]}, {pick};")
            code.append(f"prmt.b32 a, a, b, 0x5410; xor.b32 ${2 * digit + kind}, a, 0x80808080;")
    found = ptx(" ".join(code) + " }", *words, scale, out="r" * first, effects=False, early=True)
    return [found[2 * digit : 2 * digit + 2] for digit in range(DIGITS)]


def _hex() -> str:
    return f"0f{UNIT_BITS:08X}"


class FixedInputs:
    """memory: of the warp in shared memory."""

    def __init__(self, memory: Int, lane: Int):
        self.memory, self.lane = memory, lane
        digit = (lane >> 2) & 3
        self.digit = select(digit < DIGITS, digit, const(DIGITS - 1))

    def pieces(self, words: list[Any], scale: Any) -> list[list[Any]]:
        """Operands of the 8 pieces of each load of the warp: for bytes of codes, for lower
        halves."""
        found = []
        for n in range(0, len(words), 4):
            self.put(words[n : n + 4], scale)
            begin = self.memory + self.digit * (DIGIT_WORDS * 4) + (self.lane & 3) * 4
            load = lambda at: ptx("ld.shared.b32 $0, [$1];", at, out="r")
            found += [[load(begin + 16 * i + 128 * kind) for kind in range(2)] for i in range(8)]
        return found

    def put(self, words: list[Any], scale: Any) -> None:
        """Write a load's digits to shared memory, when those of the load before are read."""
        ptx("bar.warp.sync -1;")
        for digit, pair in enumerate(digits(words, scale)):
            for kind, word in enumerate(pair):
                at = self.memory + (digit * DIGIT_WORDS + kind * 32) * 4 + self.lane * 4
                ptx("st.shared.b32 [$0], $1;", at, word)
        ptx("bar.warp.sync -1;")

    def weigh(self, four: list[Any], inverse: Any) -> list[Any]:
        """Sums of two columns of codes, whose digits two lanes have."""
        t = self.lane & 3
        is_first, is_second = t.equals(0), t.equals(1)
        choose = lambda c, x, y: select(c, Int(x), Int(y)).value
        third = choose(is_second, float_const(65536.0), zero())
        weights = [
            choose(is_first, float_const(1.0), third),
            choose(is_first, float_const(256.0), zero()),
        ]
        found = []
        for pair in (four[:2], four[2:]):
            total = zero()
            for x, weight in zip(pair, weights, strict=True):
                total = arith.addf(total, arith.mulf(x, weight))
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, 1))
            found += [arith.mulf(total, inverse), zero()]
        return found


def starts_of_groups(xs: list[list[Any]]) -> list[list[Any]]:
    """Accumulators before each group's products: what codes of 0 add, which are 8s, is missing."""
    each, found = GROUP // PIECE, []
    for group in range(len(xs) // each):
        sums = [const(0).value] * 4
        for n in range(group * each, (group + 1) * each, 2):
            sums = _add_bytes([const(EIGHTS).value] * 4, xs[n : n + 2], sums)
        found.append([(const(UNIT_BITS) - Int(x)).value for x in sums[:2]])
    return found


def add_int4_fixed(
    begin: Int,
    half: int,
    lane: Int,
    xs: list[list[Any]],
    starts: list[list[Any]],
    sums: list[Any],
    read: Int,
) -> tuple[list[Any], Int]:
    """As `add_int4`, with operands of `FixedInputs` and `starts_of_groups`. The sums are of two
    digits for each of two columns of codes, not weighed."""
    codes, blocks = begin + (lane * 16 + half * (4 * half_words("int4"))), len(xs) // 2
    words = [ptx(LOAD, codes + 512 * b, out="rrrr") for b in range(blocks)]
    of_scales = 4 * (2 * half_words("int4") + half * scale_words("int4"))
    each = GROUP // PIECE // 2
    for group in range(blocks // each):
        at = begin + (of_scales + 32 * group) + (lane >> 2) * 4
        pair = ptx("ld.shared.b32 $0, [$1];", at, out="r")
        scales, read, found = floats(pair), read | Int(pair), starts[group] * 2
        for block in range(group * each, (group + 1) * each):
            read = read | Int(words[block][0])
            found = _add_bytes(words[block], xs[2 * block : 2 * block + 2], found)
        for i in range(4):
            part = arith.subf(arith.bitcast(ir.F32Type.get(), found[i]), float_const(UNIT))
            sums[i] = ptx(
                "fma.rn.f32 $0, $1, $2, $3;", part, scales[i // 2], sums[i], out="f",
                effects=False,
            )  # fmt: skip
    return sums, read


def _add_bytes(words: list[Any], xs: list[list[Any]], sums: list[Any]) -> list[Any]:
    """Products of 16 columns and 64 inputs, which two pieces have."""
    low = "and.b32 $0, $1, 0x0F0F0F0F;"
    halves = [ptx(low, word, out="r", effects=False) for word in words]
    for kind, a in enumerate((words, halves)):
        sums = ptx(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3},"
            " {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            *a, xs[0][kind], xs[1][kind], *sums, out="rrrr", effects=False,
        )  # fmt: skip
    return sums
