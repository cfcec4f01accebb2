"""8-bit weights and 8-bit activations: a product of integers, summed in int32.

SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): input k of the matrix is divided by a scale and
row k of the matrix is multiplied by it. Then a few large inputs leave the others enough steps.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.weights.int8_training import int8_products, quantize_absmax
from jaxtrain.weights.quantized import QuantizedWeight, frozen_backward, int8_codes, int8_values


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "input_scales"],
    meta_fields=["dtype"],
)
@dataclasses.dataclass(frozen=True)
class W8A8Weight(QuantizedWeight):
    """codes int8 [.., K, N] of diag(input_scales) W, scales float32 [.., N], input_scales bfloat16
    [.., K]. Its inputs are rounded to int8 as well, a scale a token."""

    codes: Any
    scales: Any
    input_scales: Any

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        return w8a8_matmul(x, self)

    def dequantize(self) -> Float[Array, "*E K N"]:
        """Without the rounding of the inputs, which no array can hold."""
        scaled = int8_values(self.codes, self.scales)
        return (scaled / self.input_scales[..., None].astype(jnp.float32)).astype(self.dtype)


@jax.custom_vjp
def w8a8_matmul(x: Float[Array, "*B K"], w: W8A8Weight) -> Float[Array, "*B N"]:
    """x w. The gradient of x is that of the dequantized matrix."""
    x_MK = x.reshape(-1, x.shape[-1]).astype(jnp.float32) / w.input_scales[None].astype(jnp.float32)
    codes_MK, scales_M = quantize_absmax(x_MK, 1)
    y_MN = int8_products(codes_MK, w.codes) * scales_M[:, None] * w.scales[None]
    return y_MN.astype(x.dtype).reshape(*x.shape[:-1], -1)


w8a8_matmul.defvjp(lambda x, w: (w8a8_matmul(x, w), w), frozen_backward)


def smoothing_scales(
    amax_K: Float[Array, " K"], w_KN: Float[Array, "K N"], alpha: float
) -> Float[Array, " K"]:
    """amax^alpha / max|w|^(1 - alpha) of each input, as bfloat16 holds it; 1 where either is 0.

    amax_K: max |x| of each input. alpha: 0 evens out the rows of the weights alone, 1 the inputs.
    """
    most_K = jnp.max(jnp.abs(w_KN), axis=1)
    seen = (amax_K > 0) & (most_K > 0)
    one = lambda x_K: jnp.where(seen, x_K, 1.0)
    scales_K = one(amax_K) ** alpha / one(most_K) ** (1 - alpha)
    return jax.lax.reduce_precision(scales_K, 8, 7)


def quantize_w8a8(w_KN: Float[Array, "K N"], input_scales_K: Float[Array, " K"]) -> W8A8Weight:
    """One matrix, a scale a column, its row k multiplied by input_scales[k] first."""
    codes, scales = int8_codes(w_KN.astype(jnp.float32) * input_scales_K[:, None])
    return W8A8Weight(
        codes.astype(jnp.int8), scales, input_scales_K.astype(jnp.bfloat16), dtype=w_KN.dtype.name
    )
