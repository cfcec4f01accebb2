"""Elementwise functions that a cast applies to the arrays that it reads, before quantization.

Products of 16-bit values are exact in float32, so every backend rounds them once. A maximum is
exact in any dtype, and in 16 bits a GPU computes two at a time.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

Function = Callable[..., Array]


def itself(x: Array) -> Array:
    return x


def relu2(h: Array) -> Array:
    """max(h, 0)^2."""
    return jnp.square(_wide(jnp.maximum(h, 0)))


def relu2_grad(da: Array, h: Array) -> Array:
    """Gradient of h, from da, the gradient of relu2(h)."""
    return _wide(da) * _wide(2 * jnp.maximum(h, 0))


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)
