"""Reference implementation in plain jnp: the dequantized matrix, rounded to x's dtype."""

import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, form: str, x_MK, codes, scales) -> None:
    return None


def w8a16_matmul(x_MK, codes_KN, scales_N):
    """Backend of the public function."""
    w_KN = codes_KN.astype(jnp.float32) * scales_N[None].astype(jnp.float32)
    return _product(x_MK, w_KN)


def w4a16_matmul(x_MK, codes_HN, scales_GN, offsets_GN=None):
    """Backend of the public function."""
    (H, N), G = codes_HN.shape, scales_GN.shape[0]
    both_KN = jnp.stack([codes_HN & 15, codes_HN >> 4], axis=1).reshape(2 * H, N)
    groups = both_KN.astype(jnp.float32).reshape(G, -1, N) - 8
    w_KN = (groups * scales_GN[:, None].astype(jnp.float32)).reshape(2 * H, N)
    if offsets_GN is None:
        return _product(x_MK, w_KN)
    rounded_KN = w_KN.astype(x_MK.dtype).astype(jnp.float32)
    whole_KN = rounded_KN + jnp.repeat(offsets_GN, 2 * H // G, axis=0)
    return (x_MK.astype(jnp.float32) @ whole_KN).astype(x_MK.dtype)


def _product(x_MK, w_KN):
    rounded = w_KN.astype(x_MK.dtype).astype(jnp.float32)
    return (x_MK.astype(jnp.float32) @ rounded).astype(x_MK.dtype)
