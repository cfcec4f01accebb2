"""Reference implementation in plain jnp: a matmul in float32, rounded to 16 bits, then cast."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.fp8 import reference as casts
from jaxtrain_kernels.matmul.fp8.functions import Function


class ProductOptions(NamedTuple):
    """Arguments of `fp8_product_quantized` that are not arrays."""

    function: Function
    dtype: DTypeLike
    product_dtype: DTypeLike
    keep: bool
    exact: bool


def supports(target: Target, options, *arrays) -> None:
    return None


def product_quantized(options, operands, scale, multiplier):
    """Return (q_MN, q_NM, amax, product_MN or None)."""
    a_MK, b_NK, *others = operands
    product_MN = a_MK.astype(jnp.float32) @ b_NK.astype(jnp.float32).T
    product_MN = (product_MN * scale).astype(options.product_dtype)
    arrays = (product_MN, *others)
    q_MN, q_NM, seen = casts.cast_measured(arrays, multiplier, options.dtype, options.function)
    return q_MN, q_NM, seen, product_MN if options.keep else None
