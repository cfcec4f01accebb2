"""METHODS: the quantization methods of `jaxtrain quantize --method NAME`.

A new method is a function in its own file, an entry of METHODS here, and its name with a line of
help in arguments.METHODS. It returns any class of `weights.stored.STORED`, for instance by
`pack_int4` from 4-bit codes and scales, or an Int8Weight. Loading, decoding, evaluation and export
depend on that class only, not on the method.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.compress.awq import best_scales, scaled_int4
from jaxtrain.compress.calibrate import Inputs
from jaxtrain.compress.fold import Fold
from jaxtrain.compress.gptq import gptq_codes
from jaxtrain.settings import UserError
from jaxtrain.weights.float8_storage import quantize_e4m3
from jaxtrain.weights.int4 import GROUP, group_of, pack_int4, quantize_int4
from jaxtrain.weights.quantized import BLOCK, QuantizedWeight, quantize_int8, quantize_nf4
from jaxtrain.weights.w8a8 import quantize_dynamic_int8, quantize_w8a8, smoothing_scales


class MethodOptions(NamedTuple):
    """Options of the command that a method may read."""

    group_size: int = GROUP  # inputs that share a scale in 4-bit formats
    act_order: bool = False  # GPTQ: round inputs with the largest sum of squares first
    alpha: float = 0.5  # SmoothQuant: share of the activations' range moved into the weights


Quantizer = Callable[
    [Float[Array, "K N"], Inputs | None, MethodOptions],
    QuantizedWeight,
]


class Method(NamedTuple):
    """quantize(matrix [K, N], statistics of its inputs or None, options).

    options: those that it reads. inputs: it needs input statistics of the blocks' matrices;
    hessian: X^T X too. activations: the matmul quantizes its inputs, so no
    dequantized array is equivalent. scales: input scales of concatenated matrices, if they can be
    folded (`fold`).
    """

    quantize: Quantizer
    options: frozenset[str] = frozenset()
    inputs: bool = False
    hessian: bool = False
    activations: bool = False
    scales: Callable[[Array, Inputs, Fold, MethodOptions], Array] | None = None


def nf4(w_KN: Float[Array, "K N"], _: Inputs | None, options: MethodOptions) -> QuantizedWeight:
    """NF4. Raises UserError for a matrix whose size is no multiple of the block size."""
    if w_KN.size % BLOCK:
        K, N = w_KN.shape
        raise UserError(
            f"nf4 packs {BLOCK} values at a time, which a matrix of {K} x {N} does not allow: int8 "
            "takes any shape"
        )
    return quantize_nf4(w_KN)


pack = jax.jit(pack_int4, static_argnums=2)  # its operations one by one are programs each


def gptq(
    w_KN: Float[Array, "K N"], inputs: Inputs | None, options: MethodOptions
) -> QuantizedWeight:
    """GPTQ. A matrix without statistics, such as the head, is rounded to the nearest codes."""
    if inputs is None or inputs.hessian_KK is None:
        return quantize_int4(w_KN, options.group_size)
    group = group_of(len(w_KN), options.group_size)
    codes, steps = gptq_codes(w_KN, inputs.hessian_KK, group, options.act_order)
    return pack(codes, steps, w_KN.dtype.name)


def activation_aware(
    w_KN: Float[Array, "K N"], inputs: Inputs | None, options: MethodOptions
) -> QuantizedWeight:
    """AWQ. A matrix without statistics (such as the head) or with folded scales is rounded to the
    nearest codes."""
    if inputs is None:
        return quantize_int4(w_KN, options.group_size)
    return scaled_int4(w_KN, awq_scales(w_KN, inputs, Fold((), ()), options), options.group_size)


def awq_scales(w_KN: Array, inputs: Inputs, _: Fold, options: MethodOptions) -> Array:
    mean_K = jnp.asarray(inputs.magnitude_K) / inputs.tokens
    return best_scales(w_KN, mean_K, jnp.asarray(inputs.hessian_KK), options.group_size)


def smooth_quant(
    w_KN: Float[Array, "K N"], inputs: Inputs | None, options: MethodOptions
) -> QuantizedWeight:
    """SmoothQuant. A matrix without statistics or with folded scales is not smoothed."""
    if inputs is None:
        return quantize_dynamic_int8(w_KN)
    return quantize_w8a8(w_KN, smooth_scales(w_KN, inputs, Fold((), ()), options))


def smooth_scales(w_KN: Array, inputs: Inputs, fold: Fold, options: MethodOptions) -> Array:
    most_K = fold.pooled(jnp.max(jnp.abs(w_KN), axis=1), jnp.max)
    return smoothing_scales(jnp.asarray(inputs.amax_K), most_K, options.alpha)


GROUPS = frozenset({"group_size"})
METHODS: dict[str, Method] = {
    "int8": Method(lambda w, _, options: quantize_int8(w)),
    "int4": Method(lambda w, _, options: quantize_int4(w, options.group_size), GROUPS),
    "gptq": Method(gptq, GROUPS | {"act_order"}, inputs=True, hessian=True),
    "awq": Method(activation_aware, GROUPS, inputs=True, hessian=True, scales=awq_scales),
    "w8a8": Method(
        smooth_quant, frozenset({"alpha"}), inputs=True, activations=True, scales=smooth_scales
    ),
    "nf4": Method(nf4),
    "float8": Method(lambda w, _, options: quantize_e4m3(w)),
}
