"""Matmul of one row as a multiplication and a sum: one pass over the codes on a GPU.

On a CPU a matmul is faster, and with more rows a reduction would read the codes once per row.
"""

import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.integers.halves import group_sums, scaled_halves


def supports(target: Target, form: str, x_MK, codes, scales) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    if target.platform not in ("cuda", "rocm"):
        return f"needs a GPU, found {target.platform}"
    return None if len(x_MK) == 1 else f"needs one row, got {len(x_MK)}"


def w8a16_matmul(x_MK, codes_KN, scales_N):
    """Backend of the public function."""
    values = (codes_KN.astype(jnp.float32) * scales_N[None]).astype(x_MK.dtype)
    products_KN = x_MK[0, :, None].astype(jnp.float32) * values.astype(jnp.float32)
    return products_KN.sum(0)[None].astype(x_MK.dtype)


def w4a16_matmul(x_MK, codes_HN, scales_GN, offsets_GN=None):
    """Backend of the public function."""
    x_GH2 = x_MK.astype(jnp.float32).reshape(len(scales_GN), -1, 2)
    even, odd = scaled_halves(codes_HN, scales_GN, x_MK.dtype)
    products = even.astype(jnp.float32) * x_GH2[..., 0, None]
    products += odd.astype(jnp.float32) * x_GH2[..., 1, None]
    y_N = products.sum((0, 1))
    if offsets_GN is not None:
        y_N += (group_sums(x_MK, len(offsets_GN))[0, :, None] * offsets_GN).sum(0)
    return y_N[None].astype(x_MK.dtype)
