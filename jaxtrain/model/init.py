"""Initialization: distributions, and schemes that assign them to the parameters of a model."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.model.config import ResolvedModel
from jaxtrain.weights.params import Initializer


def normal(std: float) -> Initializer:
    return Initializer(lambda key, shape: std * jax.random.normal(key, shape))


def uniform(low: float, high: float) -> Initializer:
    return Initializer(lambda key, shape: jax.random.uniform(key, shape, minval=low, maxval=high))


def constant(value: float | np.ndarray) -> Initializer:
    return Initializer(lambda key, shape: jnp.broadcast_to(jnp.asarray(value, jnp.float32), shape))


def fan_in(gain: float = 1.0) -> Initializer:
    """N(0, gain^2 / in): preserves the scale of the activations (LeCun et al. 1998)."""
    return Initializer(lambda key, shape: normal(gain / math.sqrt(shape[-2]))(key, shape))


def xavier(gain: float = 1.0) -> Initializer:
    """N(0, 2 gain^2 / (in + out)) (Glorot & Bengio 2010)."""
    return Initializer(
        lambda key, shape: normal(gain * math.sqrt(2 / (shape[-2] + shape[-1])))(key, shape)
    )


def orthogonal_matrix(gain: float = 1.0) -> Initializer:
    """gain x a random matrix with orthonormal rows or columns (Saxe et al. 2014)."""
    return Initializer(
        lambda key, shape: gain * jax.random.orthogonal(key, shape[-2], shape[:-2], m=shape[-1])
    )


class Scheme(NamedTuple):
    """An initializer for each kind of matrix.

    `branch_scale`: initial value of the learned scalar on attention and feed-forward outputs.
    """

    embed: Initializer
    head: Initializer
    qk: Initializer
    v: Initializer
    attention_out: Initializer
    up: Initializer
    down: Initializer
    value_embed: Initializer
    branch_scale: float | None = None


def speedrun(c: ResolvedModel) -> Scheme:
    """nanochat: uniform input matrices, zero output ones: each block starts as the identity."""
    s = math.sqrt(3 / c.width)
    return Scheme(
        embed=normal(0.8),
        head=normal(0.001),
        qk=uniform(-s, s),
        v=uniform(-s, s),
        attention_out=constant(0.0),
        up=uniform(-0.4 * s, 0.4 * s),
        down=constant(0.0),
        value_embed=uniform(-s, s),
    )


def gpt2(c: ResolvedModel) -> Scheme:
    """GPT-2 and Llama: N(0, 0.02), output matrices scaled by 1/sqrt(2 depth)."""
    out = normal(0.02 / math.sqrt(2 * c.depth))
    std = normal(0.02)
    return Scheme(std, std, std, std, out, std, out, std)


def matrices(c: ResolvedModel, inside: Initializer, out: Initializer) -> Scheme:
    """Use `inside` for matrices that read the stream and `out` for those that add to it."""
    table = normal(1 / math.sqrt(c.width))
    return Scheme(table, fan_in(), inside, inside, out, inside, out, table)


def depth_scaled(c: ResolvedModel) -> Scheme:
    """Scale output matrices by 1/sqrt(2 depth): all branches together add the variance of one
    (GPT-2's factor, at any width)."""
    return matrices(c, fan_in(), fan_in(1 / math.sqrt(2 * c.depth)))


def orthogonal(c: ResolvedModel) -> Scheme:
    """Orthogonal matrices (Saxe et al. 2014), the output ones scaled by 1/sqrt(2 depth)."""
    return matrices(c, orthogonal_matrix(), orthogonal_matrix(1 / math.sqrt(2 * c.depth)))


def mup(c: ResolvedModel) -> Scheme:
    """muP (Yang et al. 2022, table 3): the best learning rates at base_width are best at any width.

    Variance 1/in inside, 1/in^2 in the head, independent of the width in the embeddings. The
    learning rates' factors are `optim.param_groups.MUP_RULES`. Head dim and depth stay; the number
    of heads grows with the width.
    """
    m = c.width / c.base_width
    wide = lambda init, *wider: dataclasses.replace(init, wider=wider)
    inside, out = wide(fan_in(), m, m), wide(fan_in(1 / math.sqrt(2 * c.depth)), m, m)
    table = wide(normal(1.0), 1.0, m)
    head = wide(fan_in(1 / math.sqrt(m)), m, 1.0)
    return matrices(c, inside, out)._replace(embed=table, head=head, value_embed=table)


# ---- without norms in the blocks, and without warm-up ------------------------------------------


def fixup(c: ResolvedModel) -> Scheme:
    """Fixup (Zhang et al. 2019): output matrices and head are zero; the others are scaled by
    1/sqrt(branches).

    That is branches^(-1/(2m-2)) with m = 2 matrices per branch. Its scalar biases are left out.
    """
    inside = fan_in(1 / math.sqrt(2 * c.depth))
    return matrices(c, inside, constant(0.0))._replace(head=constant(0.0), branch_scale=1.0)


def tfixup(c: ResolvedModel) -> Scheme:
    """T-Fixup (Huang et al. 2020): Xavier; value, output and FFN matrices times 0.67 depth^-1/4.

    A layer has two branches, as in the paper's encoder. Embeddings are scaled by (9 depth)^-1/4.
    """
    value = xavier(0.67 * c.depth**-0.25)
    table = normal((9 * c.depth) ** -0.25 / math.sqrt(c.width))
    return matrices(c, value, value)._replace(qk=xavier(), embed=table, value_embed=table)


def rezero(c: ResolvedModel) -> Scheme:
    """ReZero (Bachlechner et al. 2020): each branch is added times a scalar that starts at 0."""
    return matrices(c, xavier(), xavier())._replace(branch_scale=0.0)


def skipinit(c: ResolvedModel) -> Scheme:
    """SkipInit (De & Smith 2020): as ReZero, but the scalar starts at 1/sqrt(branches)."""
    return matrices(c, fan_in(), fan_in())._replace(branch_scale=1 / math.sqrt(2 * c.depth))


SCHEMES = {
    "speedrun": speedrun,
    "gpt2": gpt2,
    "depth_scaled": depth_scaled,
    "orthogonal": orthogonal,
    "mup": mup,
    "fixup": fixup,
    "tfixup": tfixup,
    "rezero": rezero,
    "skipinit": skipinit,
}
