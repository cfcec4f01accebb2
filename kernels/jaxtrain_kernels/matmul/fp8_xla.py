"""The cast to float8 on any device. On a GPU, XLA makes it one kernel with the transpose."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, x_MK) -> None:
    return None


def cast(x_MK, multiplier, dtype, *, saturate: bool):
    """x * multiplier in dtype, and its transpose.

    A power of two is exact in bfloat16. In float32 XLA would keep x in memory before its rounding
    to bfloat16 (excess precision), in twice the bytes.
    """
    wide = x_MK.astype(jnp.float32) if x_MK.dtype == jnp.float16 else x_MK
    scaled = wide * multiplier.astype(wide.dtype)
    if saturate:
        largest = float(jnp.finfo(dtype).max)
        scaled = jnp.clip(scaled, -largest, largest)
    q_MK = scaled.astype(dtype)
    return q_MK, q_MK.T


def cast_measured(x_MK, multiplier, dtype):
    """The same, saturating, and x's largest magnitude.

    XLA puts a maximum into one kernel with a cast, but not with a transpose: that comes after, from
    one byte a value. So x is computed or read once, not twice.
    """
    q_MK, _ = cast(x_MK, multiplier, dtype, saturate=True)
    q_MK, seen = lax.optimization_barrier((q_MK, fp8_amax(x_MK)))
    return q_MK, q_MK.T, seen


def fp8_amax(x: Float[Array, "*M"]) -> Float[Array, ""]:
    """The largest magnitude, in float32."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)
