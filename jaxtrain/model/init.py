"""Initial values: the distributions, and the schemes that assign them to a model's parts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.params import Initializer


def normal(std: float) -> Initializer:
    return lambda key, shape: std * jax.random.normal(key, shape)


def uniform(low: float, high: float) -> Initializer:
    return lambda key, shape: jax.random.uniform(key, shape, minval=low, maxval=high)


def constant(value: float | np.ndarray) -> Initializer:
    return lambda key, shape: jnp.broadcast_to(jnp.asarray(value, jnp.float32), shape)


class Scheme(NamedTuple):
    """An initializer for each kind of matrix."""

    embed: Initializer
    head: Initializer
    qkv: Initializer
    attention_out: Initializer
    up: Initializer
    down: Initializer
    value_embed: Initializer


def speedrun(c: ResolvedModel) -> Scheme:
    """nanochat: uniform in, zero out, so that each block starts as the identity."""
    s = math.sqrt(3 / c.width)
    return Scheme(
        embed=normal(0.8),
        head=normal(0.001),
        qkv=uniform(-s, s),
        attention_out=constant(0.0),
        up=uniform(-0.4 * s, 0.4 * s),
        down=constant(0.0),
        value_embed=uniform(-s, s),
    )


def gpt2(c: ResolvedModel) -> Scheme:
    """GPT-2 and Llama: N(0, 0.02), output matrices scaled by 1/sqrt(2 depth)."""
    out = normal(0.02 / math.sqrt(2 * c.depth))
    std = normal(0.02)
    return Scheme(std, std, std, out, std, out, std)


SCHEMES = {"speedrun": speedrun, "gpt2": gpt2}
