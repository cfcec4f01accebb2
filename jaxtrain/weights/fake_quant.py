"""Fake quantization: matrices rounded to int8 or int4 values in every forward pass (QAT).

Jacob et al. 2018 (arXiv:1712.05877), LLM-QAT (arXiv:2305.17888): weights keep their dtype and lie
on a symmetric grid with one scale an output channel. The gradient passes through the rounding
(straight-through estimator, Bengio et al. 2013), so the stored weights train in full precision.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rounded(w: Float[Array, "*L K N"], bits: int) -> Float[Array, "*L K N"]:
    """The nearest values of the grid: an output channel's largest magnitude is 2^(bits-1) - 1."""
    w32 = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(w32), axis=-2, keepdims=True) / (2 ** (bits - 1) - 1)
    steps = jnp.round(w32 / jnp.where(scale > 0, scale, 1.0))
    return (steps * scale).astype(w.dtype)


@jax.custom_jvp
def int8(w: Float[Array, "*L K N"]) -> Float[Array, "*L K N"]:
    """w on the grid of 8 bits; the gradient is that of w."""
    return rounded(w, 8)


@jax.custom_jvp
def int4(w: Float[Array, "*L K N"]) -> Float[Array, "*L K N"]:
    """w on the grid of 4 bits; the gradient is that of w."""
    return rounded(w, 4)


int8.defjvp(lambda primals, tangents: (int8(*primals), tangents[0]))
int4.defjvp(lambda primals, tangents: (int4(*primals), tangents[0]))
