"""Reference implementation in plain jnp: rounding to float8 and back, matmuls in float32."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, *arrays) -> None:
    return None


def cast(arrays, multiplier, dtype, function, *, saturate: bool):
    """function(*arrays) * multiplier in dtype, and its transpose."""
    largest = float(jnp.finfo(dtype).max)
    wide = function(*(x.astype(jnp.float32) for x in arrays)) * multiplier
    q_MK = (jnp.clip(wide, -largest, largest) if saturate else wide).astype(dtype)
    return q_MK, jnp.swapaxes(q_MK, 0, 1)


def cast_measured(arrays, multiplier, dtype, function):
    """Saturating `cast`, and the amax of the function's values."""
    q_MK, q_KM = cast(arrays, multiplier, dtype, function, saturate=True)
    seen = jnp.max(jnp.abs(function(*(x.astype(jnp.float32) for x in arrays))))
    return q_MK, q_KM, seen


def rounded(x, dtype):
    """x rounded to float8 with the smallest power-of-two scale that fits its amax, in float32."""
    x = x.astype(jnp.float32)
    amax, largest = jnp.max(jnp.abs(x)), float(jnp.finfo(dtype).max)
    fraction, exponent = jnp.frexp(jnp.maximum(amax, 2.0**-48) / largest)
    scale = jnp.ldexp(1.0, exponent - (fraction == 0.5))
    return (x / scale).astype(dtype).astype(jnp.float32) * scale


@jax.custom_vjp
def fp8_matmul(x_MK, w_KN):
    """Reference of the public function, with scales from the current tensors."""
    return _forward(x_MK, w_KN)[0]


def _forward(x_MK, w_KN):
    x, w = rounded(x_MK, jnp.float8_e4m3fn), rounded(w_KN, jnp.float8_e4m3fn)
    return (x @ w).astype(x_MK.dtype), (x, w, x_MK[:0], w_KN[:0])


def _backward(saved, dy_MN):
    x, w, like_x, like_w = saved
    dy = rounded(dy_MN, jnp.float8_e5m2)
    return (dy @ w.T).astype(like_x.dtype), (x.T @ dy).astype(like_w.dtype)


fp8_matmul.defvjp(_forward, _backward)
