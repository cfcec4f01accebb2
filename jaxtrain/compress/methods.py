"""METHODS: how a matrix becomes a quantized one, for `jaxtrain quantize --method NAME`.

A new method is a function in a file of its own, a row of METHODS here, and its name with a line of
help in arguments.METHODS. It returns any form of `weights.stored.STORED`: with `pack_int4` for
4-bit codes and scales, or an Int8Weight of them. What loads, decodes, evaluates and exports the
quantized model knows forms, not methods.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxtrain.settings import UserError
from jaxtrain.weights.float8_storage import quantize_e4m3
from jaxtrain.weights.int4 import GROUP, quantize_int4
from jaxtrain.weights.quantized import BLOCK, QuantizedWeight, quantize_int8, quantize_nf4


class Statistics(NamedTuple):
    """What a matrix read over the tokens of a calibration text, float32."""

    gram_KK: Float[Array, "K K"]  # sum over tokens of x x^T
    magnitude_K: Float[Array, " K"]  # mean over tokens of |x|
    tokens: int


class MethodOptions(NamedTuple):
    """Options of the command that a method may read."""

    group_size: int = GROUP  # inputs that share a scale, of 4-bit forms


Quantizer = Callable[
    [Float[Array, "K N"], Statistics | None, MethodOptions],
    QuantizedWeight,
]


class Method(NamedTuple):
    """quantize(matrix [K, N], its statistics or None, options); needs_statistics: not None."""

    quantize: Quantizer
    needs_statistics: bool = False


def nf4(w_KN: Float[Array, "K N"], _: Statistics | None, options: MethodOptions) -> QuantizedWeight:
    """Raises UserError for a matrix that has no whole number of blocks."""
    if w_KN.size % BLOCK:
        K, N = w_KN.shape
        raise UserError(
            f"nf4 packs {BLOCK} values at a time, which a matrix of {K} x {N} does not allow: int8 "
            "takes any shape"
        )
    return quantize_nf4(w_KN)


METHODS: dict[str, Method] = {
    "int8": Method(lambda w, _, options: quantize_int8(w)),
    "int4": Method(lambda w, _, options: quantize_int4(w, options.group_size)),
    "nf4": Method(nf4),
    "float8": Method(lambda w, _, options: quantize_e4m3(w)),
}
