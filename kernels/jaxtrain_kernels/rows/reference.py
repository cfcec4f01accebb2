"""Reference implementation in plain jnp: any dtype."""

import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, op, *arrays) -> None:
    return None


def residual_norm(x_BTD, y_BTD, *, eps):
    """Backend of the public function."""
    s_BTD = x_BTD + y_BTD
    return s_BTD, _norm(s_BTD, s_BTD, eps)


def mixed_norm(x_BTD, y_BTD, x0_BTD, a, b, *, eps):
    """Backend of the public function."""
    s_BTD = x_BTD if y_BTD is None else x_BTD + y_BTD
    s_BTD = (a * s_BTD + b * x0_BTD).astype(x_BTD.dtype)
    return s_BTD, _norm(s_BTD, s_BTD, eps), x0_BTD


def rope_norm(q_BTNH, k_BTKH, cos_BTH, sin_BTH, *, eps):
    """Backend of the public function."""
    return tuple(_norm(_rotated(x, cos_BTH, sin_BTH), x, eps) for x in (q_BTNH, k_BTKH))


def relu2(x_BTF):
    """Backend of the public function."""
    return jnp.where(x_BTF > 0, x_BTF**2, 0)


def _rotated(x_BTNH, cos_BTH, sin_BTH):
    wide = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    h = x_BTNH.shape[-1] // 2
    first, second = x_BTNH[..., :h].astype(wide), x_BTNH[..., h:].astype(wide)
    cos, sin = cos_BTH[:, :, None, h:], sin_BTH[:, :, None, h:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _norm(x, of, eps):
    """x / rms(of) in the dtype of `of`."""
    wide = jnp.promote_types(of.dtype, jnp.float32)
    square = jnp.mean(of.astype(wide) ** 2, axis=-1, keepdims=True)
    return (x.astype(wide) / jnp.sqrt(square + eps)).astype(of.dtype)
