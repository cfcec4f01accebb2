"""Matmuls with the dequantized matrix in x's dtype, on any device."""

import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.integers.halves import group_sums, scaled_halves


def supports(target: Target, form: str, x_MK, codes, scales) -> None:
    return None


def w8a16_matmul(x_MK, codes_KN, scales_N):
    """Backend of the public function. In float32 the scales multiply the result, not each value."""
    if x_MK.dtype == jnp.float32:
        return (x_MK @ codes_KN.astype(x_MK.dtype)) * scales_N[None]
    values = codes_KN.astype(jnp.float32) * scales_N[None]
    return x_MK @ values.astype(x_MK.dtype)


def w4a16_matmul(x_MK, codes_HN, scales_GN, offsets_GN=None):
    """Backend of the public function: one matmul of the even inputs and one of the odd ones, which
    costs less than interleaving them."""
    x_MH2 = x_MK.reshape(len(x_MK), -1, 2)
    halves = scaled_halves(codes_HN, scales_GN, x_MK.dtype)
    even, odd = (
        jnp.matmul(x_MH2[..., i], half.reshape(codes_HN.shape), preferred_element_type=jnp.float32)
        for i, half in enumerate(halves)
    )
    y_MN = even + odd
    if offsets_GN is not None:
        y_MN += group_sums(x_MK, len(offsets_GN)) @ offsets_GN
    return y_MN.astype(x_MK.dtype)
