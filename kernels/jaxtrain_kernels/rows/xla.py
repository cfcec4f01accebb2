"""XLA backend for any device, in the form that fuses best: one pass to reduce, one for the rest."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, op, *arrays) -> None:
    return None


def residual_norm(x_BTD, y_BTD, *, eps):
    """Backend of the public function."""
    s_BTD = x_BTD + y_BTD
    return s_BTD, _norm(s_BTD, eps)


def mixed_norm(x_BTD, y_BTD, x0_BTD, a, b, *, eps):
    """Backend of the public function."""
    s_BTD = x_BTD if y_BTD is None else x_BTD + y_BTD
    s_BTD = (a * s_BTD + b * x0_BTD).astype(x_BTD.dtype)
    return s_BTD, _norm(s_BTD, eps), x0_BTD


def rope_norm(q_BTNH, k_BTKH, cos_BTH, sin_BTH, *, eps):
    """Backend of the public function. A rotation keeps the norm, so x itself gives the RMS."""

    def one(x_BTNH):
        x32 = x_BTNH.astype(jnp.float32)
        # XLA fuses a reversal of the halves, but not a concatenation.
        halves = x32.reshape(*x32.shape[:-1], 2, -1)
        swapped = halves[..., ::-1, :].reshape(x32.shape)
        turned = x32 * cos_BTH[:, :, None] + swapped * sin_BTH[:, :, None]
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
        return (turned * scale).astype(x_BTNH.dtype)

    return one(q_BTNH), one(k_BTKH)


def relu2(x_BTF):
    """Backend of the public function."""
    return jnp.square(jax.nn.relu(x_BTF))


def _norm(x, eps):
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype)
