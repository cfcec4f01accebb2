"""Int8 training: int8 matmuls with int32 accumulation, forward and backward.

Each row of the left factor and each column of the right one has a scale, its largest magnitude /
127 (absmax). Output gradients are rounded stochastically, as in AQT and Jetfire (Xi et al. 2024,
arXiv:2403.12422). `switchback` computes the weight gradient, which has the longest sum (over
tokens), in the compute dtype (Wortsman et al. 2023, arXiv:2304.13013).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from jaxtrain.weights.contract import Weight
from jaxtrain.weights.formats import random_fraction

LONGEST = 2**17  # terms of 127 x 127 that int32 can sum without overflow


class Int8Options(NamedTuple):
    """switchback: the weight gradient is not in int8."""

    switchback: bool
    stochastic_rounding: bool


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w_KN", "key"], meta_fields=["options"]
)
@dataclasses.dataclass(frozen=True)
class Int8TrainingWeight(Weight):
    """A matrix, or a stack of them, that multiplies in int8. key: for stochastic rounding."""

    w_KN: Any
    key: Any
    options: Int8Options

    def matmul(self, x: Float[Array, "*B T K"]) -> Float[Array, "*B T N"]:
        return int8_matmul(self.options, x, self.w_KN, self.key)

    def dequantize(self) -> Float[Array, "K N"]:
        """The array itself: int8 is its matmul format, not its storage format."""
        return self.w_KN


def int8_training(
    w_KN: Float[Array, "*L K N"],
    key: Array | None = None,
    *,
    switchback: bool = False,
    stochastic_rounding: bool = True,
) -> Int8TrainingWeight:
    """The matrix with int8 matmuls; switchback: except for the weight gradient."""
    return Int8TrainingWeight(w_KN, key, Int8Options(switchback, stochastic_rounding))


def quantize_absmax(
    x: Float[Array, "M K"], axis: int, key: Array | None = None
) -> tuple[Int8[Array, "M K"], Float[Array, "*S"]]:
    """(codes -127 .. 127, scales along the other dim): one scale along the contracted axis.

    axis: the contracted one. A scale is NaN or infinite if one of its values is, and so is the
    product.
    """
    x32 = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x32), axis=axis) / 127
    steps = x32 / jnp.expand_dims(jnp.where(scales > 0, scales, 1.0), axis)
    whole = jnp.round(steps) if key is None else jnp.floor(steps + random_fraction(key, x.shape))
    return jnp.clip(whole, -127, 127).astype(jnp.int8), scales


def int8_dot(
    a: Float[Array, "M K"],
    b: Float[Array, "K N"],
    key_a: Array | None = None,
    key_b: Array | None = None,
) -> Float[Array, "M N"]:
    """a b in int8. key_a, key_b: to round that factor stochastically; None: to nearest."""
    (codes_a, scales_M), (codes_b, scales_N) = (
        quantize_absmax(a, 1, key_a),
        quantize_absmax(b, 0, key_b),
    )
    total = int8_products(codes_a, codes_b)
    return (total * scales_M[:, None] * scales_N[None]).astype(a.dtype)


def int8_products(a: Int8[Array, "M K"], b: Int8[Array, "K N"]) -> Float[Array, "M N"]:
    """a b as float32, summed in int32 over as many terms as fit."""
    total = jnp.zeros((), jnp.float32)
    for start in range(0, a.shape[1], LONGEST):
        part = slice(start, start + LONGEST)
        summed = jnp.matmul(a[:, part], b[part], preferred_element_type=jnp.int32)
        total += summed.astype(jnp.float32)
    return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def int8_matmul(
    options: Int8Options,
    x: Float[Array, "*B T K"],
    w_KN: Float[Array, "K N"],
    key: Array | None,
) -> Float[Array, "*B T N"]:
    """x w in int8, with one scale per token and one per output channel."""
    return _forward(options, x, w_KN, key)[0]


def _forward(
    options: Int8Options, x: Array, w_KN: Array, key: Array | None
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    y_MN = int8_dot(x.reshape(-1, x.shape[-1]), w_KN)
    return y_MN.reshape(*x.shape[:-1], -1), (x, w_KN, key)


def _backward(
    options: Int8Options, saved: tuple[Array, Array, Array | None], dy: Array
) -> tuple[Array, Array, None]:
    x, w_KN, key = saved
    keys = (None, None)
    if options.stochastic_rounding and key is not None:
        keys = jax.random.split(key)
    x_MK, dy_MN = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dx = int8_dot(dy_MN, w_KN.T, keys[0]).reshape(x.shape)
    dw = x_MK.T @ dy_MN if options.switchback else int8_dot(x_MK.T, dy_MN, None, keys[1])
    return dx, dw.astype(w_KN.dtype), None


int8_matmul.defvjp(_forward, _backward)
