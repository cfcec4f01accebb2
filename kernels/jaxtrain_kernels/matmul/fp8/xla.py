"""Cast to float8 on any device. On a GPU, XLA fuses it with the transpose into one kernel."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.fp8.functions import Function, itself


def supports(target: Target, *arrays) -> None:
    return None


def cast(arrays, multiplier, dtype, function, *, saturate: bool):
    """function(*arrays) * multiplier in dtype, and its transpose.

    The multiplier, a power of two, is exact in bfloat16. With float32 XLA would store x before its
    rounding to bfloat16 (excess precision), in twice the bytes.
    """
    x_MK = function(*arrays)
    wide = x_MK.astype(jnp.float32) if x_MK.dtype == jnp.float16 else x_MK
    scaled = wide * multiplier.astype(wide.dtype)
    if saturate:
        largest = float(jnp.finfo(dtype).max)
        scaled = jnp.clip(scaled, -largest, largest)
    q_MK = scaled.astype(dtype)
    return q_MK, q_MK.T


def cast_measured(arrays, multiplier, dtype, function):
    """Saturating `cast`, and the amax of the function's values.

    XLA fuses a maximum with a cast, but not with a transpose, which therefore comes after, from one
    byte per value. So x is computed or read once, not twice.
    """
    q_MK, _ = cast(arrays, multiplier, dtype, function, saturate=True)
    q_MK, seen = lax.optimization_barrier((q_MK, fp8_amax(*arrays, function=function)))
    return q_MK, q_MK.T, seen


def fp8_amax(*arrays: Array, function: Function = itself) -> Float[Array, ""]:
    """Amax (largest magnitude) of a function of the arrays, in float32; it only reads them."""
    return jnp.max(jnp.abs(function(*arrays))).astype(jnp.float32)
