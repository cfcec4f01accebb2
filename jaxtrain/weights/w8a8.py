"""W8A8: 8-bit weights and 8-bit activations, integer matmuls with int32 accumulation.

SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): input k of the matrix is divided by a scale and
row k of the matrix is multiplied by it. Then outlier inputs leave enough steps for the others.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.parallel.axes import gather_fsdp
from jaxtrain.weights.int8_training import int8_products, quantize_absmax
from jaxtrain.weights.quantized import QuantizedWeight, frozen_backward, int8_codes, int8_values


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["dtype"]
)
@dataclasses.dataclass(frozen=True)
class DynamicInt8Weight(QuantizedWeight):
    """codes int8 [.., K, N], scales float32 [.., N]. Inputs are rounded to int8 as well, with one
    scale per token."""

    ALONG: ClassVar[Mapping[str, str]] = {"codes": "KN", "scales": "N"}
    codes: Any
    scales: Any

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        return w8a8_matmul(x, self)

    def smooth(self, x_MK: Float[Array, "M K"]) -> Float[Array, "M K"]:
        """The inputs to round; `W8A8Weight` divides them by its input scales."""
        return x_MK

    def dequantize(self) -> Float[Array, "*E K N"]:
        """The matrix alone, since an array cannot represent the rounding of the inputs."""
        return int8_values(self.codes, self.scales).astype(self.dtype)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "input_scales"],
    meta_fields=["dtype"],
)
@dataclasses.dataclass(frozen=True)
class W8A8Weight(DynamicInt8Weight):
    """codes int8 [.., K, N] of diag(input_scales) W, scales float32 [.., N], input_scales bfloat16
    [.., K]."""

    ALONG: ClassVar[Mapping[str, str]] = {"codes": "KN", "scales": "N", "input_scales": "K"}
    input_scales: Any

    @override
    def smooth(self, x_MK: Float[Array, "M K"]) -> Float[Array, "M K"]:
        return x_MK / self.input_scales[None].astype(jnp.float32)

    @override
    def dequantize(self) -> Float[Array, "*E K N"]:
        """The matrix alone, since an array cannot represent the rounding of the inputs."""
        scaled = int8_values(self.codes, self.scales)
        return (scaled / self.input_scales[..., None].astype(jnp.float32)).astype(self.dtype)


@jax.custom_vjp
def w8a8_matmul(x: Float[Array, "*B K"], w: DynamicInt8Weight) -> Float[Array, "*B N"]:
    """x w in int8. The gradient of x uses the dequantized matrix."""
    return _forward(x, w)[0]


def _forward(x: Array, saved: DynamicInt8Weight) -> tuple[Array, DynamicInt8Weight]:
    w = gather_fsdp(saved)
    x_MK = w.smooth(x.reshape(-1, x.shape[-1]).astype(jnp.float32))
    codes_MK, scales_M = quantize_absmax(x_MK, 1)
    y_MN = int8_products(codes_MK, w.codes) * scales_M[:, None] * w.scales[None]
    return y_MN.astype(x.dtype).reshape(*x.shape[:-1], -1), saved


w8a8_matmul.defvjp(_forward, frozen_backward)


def smoothing_scales(
    amax_K: Float[Array, " K"], most_K: Float[Array, " K"], alpha: float
) -> Float[Array, " K"]:
    """amax^alpha / most^(1 - alpha) of each input, rounded to bfloat16; 1 if either is 0.

    amax_K: max |x| of each input. most_K: max |w| of its row. alpha: 0 equalizes only the rows of
    the weights, 1 only the inputs.
    """
    seen = (amax_K > 0) & (most_K > 0)
    one = lambda x_K: jnp.where(seen, x_K, 1.0)
    scales_K = one(amax_K) ** alpha / one(most_K) ** (1 - alpha)
    return jax.lax.reduce_precision(scales_K, 8, 7)


def quantize_dynamic_int8(w_KN: Float[Array, "K N"]) -> DynamicInt8Weight:
    """Quantize one matrix, with one scale per column."""
    codes, scales = int8_codes(w_KN.astype(jnp.float32))
    return DynamicInt8Weight(codes.astype(jnp.int8), scales, dtype=w_KN.dtype.name)


def quantize_w8a8(w_KN: Float[Array, "K N"], input_scales_K: Float[Array, " K"]) -> W8A8Weight:
    """Multiply row k by input_scales[k], then quantize the matrix with one scale per column."""
    codes, scales = int8_codes(w_KN.astype(jnp.float32) * input_scales_K[:, None])
    return W8A8Weight(
        codes.astype(jnp.int8), scales, input_scales_K.astype(jnp.bfloat16), dtype=w_KN.dtype.name
    )
