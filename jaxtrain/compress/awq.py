"""AWQ: inputs with large activations are scaled up before rounding to 4 bits (Lin et al. 2023,
arXiv:2306.00978).

The scales are (mean |x|)^alpha. Of 20 values of alpha, the one is chosen that changes the matrix's
outputs least on the calibration text. Alpha = 0 is round to nearest, so the error on that text is
never larger than that of absmax.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.weights.int4 import ScaledInt4Weight, int4_codes, int4_scales, pack_int4

POWERS = 20  # alpha = 0, 1/20 .. 19/20


def input_scales(magnitude_K: Float[Array, " K"], alpha: Float[Array, ""]) -> Float[Array, " K"]:
    """magnitude^alpha, divided by the geometric mean of its extremes and rounded to bfloat16.

    magnitude_K: mean |x| of each input; a zero is replaced by the smallest nonzero value.
    """
    least = jnp.min(jnp.where(magnitude_K > 0, magnitude_K, jnp.inf))
    least = jnp.where(jnp.isfinite(least), least, 1.0)
    powers = jnp.maximum(magnitude_K, least) ** alpha
    powers /= jnp.sqrt(jnp.min(powers) * jnp.max(powers))
    return jax.lax.reduce_precision(powers, 8, 7)


def output_error(
    error_KN: Float[Array, "K N"], hessian_KK: Float[Array, "K K"]
) -> Float[Array, ""]:
    """||X E||^2 = tr(E^T X^T X E): the squared change of the outputs, summed over the text."""
    product = jnp.matmul(hessian_KK, error_KN, precision=jax.lax.Precision.HIGHEST)
    return jnp.sum(error_KN * product)


@functools.partial(jax.jit, static_argnums=3)
def best_scales(
    w_KN: Float[Array, "K N"],
    magnitude_K: Float[Array, " K"],
    hessian_KK: Float[Array, "K K"],
    group_size: int,
) -> Float[Array, " K"]:
    """The input scales with the least output error.

    Concatenated matrices are allowed, since columns are rounded independently. Raises UserError as
    `int4.group_of` does.
    """

    def error(alpha: Float[Array, ""]) -> Float[Array, ""]:
        rounded = scaled_int4(w_KN, input_scales(magnitude_K, alpha), group_size)
        return output_error(w_KN - rounded.dequantize(), hessian_KK)

    alphas = jnp.arange(POWERS) / POWERS
    return input_scales(magnitude_K, alphas[jnp.argmin(jax.lax.map(error, alphas))])


def scaled_int4(
    w_KN: Float[Array, "K N"], scales_K: Float[Array, " K"], group_size: int
) -> ScaledInt4Weight:
    """Round diag(scales) W to the nearest codes. Raises UserError as `int4.group_of` does."""
    scaled_KN = w_KN * scales_K[:, None]
    steps_GN = int4_scales(scaled_KN, group_size)
    packed = pack_int4(int4_codes(scaled_KN, steps_GN).astype(jnp.int8), steps_GN, w_KN.dtype.name)
    return ScaledInt4Weight(
        packed.codes, packed.scales, scales_K.astype(jnp.bfloat16), dtype=packed.dtype
    )
