"""Products of a slot's codes in a warp's registers, on tensor cores."""

from typing import Any

from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.hopper.emit import Int, const, float_const, ptx, zero
from jaxtrain_kernels.hopper.words import LOAD, bf16_of_int8, floats, mma
from jaxtrain_kernels.matmul.streamed.order import GROUP, PIECE, half_words, scale_words

LOG2E = 1.4426950408889634
MINUS_136 = 0xC308C308 - (1 << 32)  # twice, in bfloat16


def add_int8(
    begin: Int, half: int, lane: Int, xs: list[list[Any]], sums: list[Any], read: Int
) -> tuple[list[Any], Int]:
    """Add the products of a half of a slot to two accumulators of four. xs: words of each piece.
    Returns the sums, and `read` joined with a word of each load, so that it depends on all."""
    codes = begin + (lane * 16 + half * (4 * half_words("int8")))
    words = [ptx(LOAD, codes + 512 * b, out="rrrr") for b in range(len(xs))]
    for w, x in zip(words, xs, strict=True):
        read = read | Int(w[0])
        for i in range(2):
            a = [bf16_of_int8(w[2 * i + n], shift) for n in range(2) for shift in (0, 8)]
            four = slice(4 * i, 4 * i + 4)
            sums[four] = mma(a, x[2 * i : 2 * i + 2], sums[four])
    return sums, read


def add_int4(
    begin: Int,
    half: int,
    lane: Int,
    xs: list[list[Any]],
    offsets: list[list[Any]],
    sums: list[Any],
    read: Int,
) -> tuple[list[Any], Int]:
    """Add the products of a half of a slot, times the scales of its groups, to four sums.
    offsets: `offsets_of_groups` of the inputs. Returns what `add_int8` does."""
    codes, blocks = begin + (lane * 16 + half * (4 * half_words("int4"))), len(xs) // 2
    words = [ptx(LOAD, codes + 512 * b, out="rrrr") for b in range(blocks)]
    of_scales = 4 * (2 * half_words("int4") + half * scale_words("int4"))
    each = GROUP // PIECE // 2
    for group in range(blocks // each):
        at = begin + (of_scales + 32 * group) + (lane >> 2) * 4
        pair = ptx("ld.shared.b32 $0, [$1];", at, out="r")
        scales, read = floats(pair), read | Int(pair)
        parts = [offsets[group] * 2, [zero() for _ in range(4)]]
        for block in range(group * each, (group + 1) * each):
            read = read | Int(words[block][0])
            for i, x in enumerate(zip(*xs[2 * block : 2 * block + 2], strict=True)):
                a = [_bf16_of_4(word, 4 * i) for word in words[block]]
                parts[i % 2] = mma(a, list(x), parts[i % 2])
        for i in range(4):
            part = arith.addf(parts[0][i], parts[1][i])
            sums[i] = ptx(
                "fma.rn.f32 $0, $1, $2, $3;", part, scales[i // 2], sums[i], out="f",
                effects=False,
            )  # fmt: skip
    return sums, read


def offsets_of_groups(xs: list[list[Any]]) -> list[list[Any]]:
    """Sums of -136 times each group's inputs, of the lane's two rows; `_bf16_of_4` adds 136."""
    a, each, found = [const(MINUS_136).value] * 4, GROUP // PIECE, []
    for group in range(len(xs) // each):
        parts = [[zero() for _ in range(4)] for _ in range(2)]
        for x in xs[group * each : (group + 1) * each]:
            for i in range(2):
                parts[i] = mma(a, x[2 * i : 2 * i + 2], parts[i])
        found.append([arith.addf(parts[0][i], parts[1][i]) for i in range(2)])
    return found


def gated(activation: str, gate: Any, up: Any) -> Any:
    """SwiGLU or GeGLU: gate times the logistic function of z, times up; z is the gate, or for GELU
    by tanh a polynomial of it."""
    z = gate
    if activation == "geglu":
        cubic = arith.mulf(arith.mulf(gate, gate), float_const(2 * 0.7978845608028654 * 0.044715))
        z = arith.mulf(gate, arith.addf(cubic, float_const(2 * 0.7978845608028654)))
    power = ptx(
        "ex2.approx.f32 $0, $1;", arith.mulf(z, float_const(-LOG2E)), out="f", effects=False
    )
    below = arith.addf(float_const(1), power)
    return arith.mulf(ptx("div.full.f32 $0, $1, $2;", gate, below, out="f", effects=False), up)


def _bf16_of_4(word: Any, shift: int) -> Any:
    """4-bit codes of one column and two inputs, as bfloat16: 128 + bits, which are the code + 8."""
    first = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return ptx(
        "{ .reg .b32 t; " + first + " lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
        word, out="r", effects=False,
    )  # fmt: skip
