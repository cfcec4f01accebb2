"""Words of two bfloat16 in a thread's registers, and their products on tensor cores."""

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.hopper.emit import ptx

LOAD = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"


def floats(word: Any) -> list:
    """The lower and the upper bfloat16 of a word, in float32."""
    shift = "shl.b32 $0, $1, 16;", "and.b32 $0, $1, -65536;"
    bits = [ptx(code, word, out="r", effects=False) for code in shift]
    return [arith.bitcast(ir.F32Type.get(), x) for x in bits]


def to_word(low: Any, high: Any) -> Any:
    """A word of two float32, rounded to bfloat16."""
    return ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, out="r", effects=False)


def mma(a: Sequence[Any], b: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
    """Sums [16, 8] plus the products of bfloat16 operands [16, 16] and [16, 8]."""
    return ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3},"
        " {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        *a, *b, *sums, out="ffff", effects=False,
    )  # fmt: skip


def bf16_of_int8(word: Any, shift: int) -> Any:
    """int8 codes of one column and two inputs, as bfloat16: bytes 0 and 2 of the word, or 1 and 3.

    A byte's lower 7 bits are the mantissa of 128 + bits; its top bit is the lowest of the exponent
    of 128, or of 256. Their difference is the code.
    """
    first = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return ptx(
        "{ .reg .b32 t, m, s; " + first + " lop3.b32 m, t, 0x007F007F, 0x43004300, 0xEA;"
        " lop3.b32 s, t, 0x00800080, 0x43004300, 0xEA; sub.rn.bf16x2 $0, m, s; }",
        word, out="r", effects=False,
    )  # fmt: skip
