"""Arithmetic of one thread in float32, and words of two bfloat16."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith

from jaxtrain_kernels.hopper.emit import Int, float_const, ptx
from jaxtrain_kernels.hopper.words import floats, to_word

LOG2E = 1.4426950408889634


def add(x: Any, y: Any) -> Any:
    return arith.addf(x, y)


def mul(x: Any, y: Any) -> Any:
    return arith.mulf(x, y)


def fma(x: Any, y: Any, z: Any) -> Any:
    return ptx("fma.rn.f32 $0, $1, $2, $3;", x, y, z, out="f", effects=False)


def power(x: Any) -> Any:
    """2 to the power of x."""
    return ptx("ex2.approx.f32 $0, $1;", x, out="f", effects=False)


def rsqrt(x: Any) -> Any:
    return ptx("rsqrt.approx.f32 $0, $1;", x, out="f", effects=False)


def divide(x: Any, y: Any) -> Any:
    return ptx("div.full.f32 $0, $1, $2;", x, y, out="f", effects=False)


def select_float(condition: Any, yes: Any, no: Any) -> Any:
    """`select` of floats."""
    return arith.select(condition, yes, no)


def sum_of(xs: Sequence[Any]) -> Any:
    """Sum of numbers in pairs, of pairs, ..."""
    while len(xs) > 1:
        pairs = [add(*pair) for pair in zip(xs[::2], xs[1::2], strict=False)]
        xs = pairs + list(xs[len(pairs) * 2 :])
    return xs[0]


def over_lanes(combine: Callable[[Any, Any], Any], x: Any, distances: Sequence[int]) -> Any:
    """Combine the values of lanes at these distances."""
    for distance in distances:
        x = combine(x, mgpu.utils.shfl_bfly(x, distance))
    return x


def rounded(x: Any) -> Any:
    """Round to bfloat16."""
    return floats(to_word(x, x))[0]


def add_words(x: Any, y: Any) -> Any:
    """Sums of two bfloat16, rounded."""
    return to_word(*(add(a, b) for a, b in zip(floats(x), floats(y), strict=True)))


def load_floats(at: Int, count: int) -> list[Any]:
    """Adjacent numbers in shared memory."""
    each = 4 if count % 4 == 0 else 2 if count % 2 == 0 else 1
    found = []
    for i in range(0, count, each):
        names = ", ".join(f"${n}" for n in range(each))
        names = f"{{{names}}}" if each > 1 else names
        vector = f".v{each}" if each > 1 else ""
        one = ptx(f"ld.shared{vector}.f32 {names}, [${each}+{4 * i}];", at, out="f" * each)
        found += one if each > 1 else [one]
    return found


def inverse_rms(sum_of_squares: Any, size: int, eps: float) -> Any:
    return rsqrt(add(mul(sum_of_squares, float_const(1 / size)), float_const(eps)))
