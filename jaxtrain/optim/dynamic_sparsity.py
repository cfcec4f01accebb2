"""Dynamic sparse training: the number of nonzero weights is constant, and the masks change.

SET (Mocanu et al. 2018, arXiv:1707.04780) replaces the smallest weights by random ones, RigL (Evci
et al. 2020, arXiv:1911.11134) by those with the largest dense gradients. In both, a step that
changes the masks also updates the weights, and the share to drop falls along half a cosine.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree
from pydantic import Field

from jaxtrain.optim.masks import (
    Arrays,
    MaskInputs,
    MaskRule,
    Masks,
    keep_largest,
    magnitude,
    with_masks,
)
from jaxtrain.optim.types import Wrapper
from jaxtrain.settings import Settings


class DynamicConfig(Settings):
    """The first update draws random masks. Weights that grow start at zero, and so do their
    moments."""

    sparsity: float = Field(gt=0, lt=1, description="fraction of the weights that is zero")
    density: Literal["uniform", "erdos_renyi"] = Field(
        "erdos_renyi",
        description="distribution of the remaining weights: uniform, the same fraction in each "
        "matrix; erdos_renyi, numbers in proportion to in + out, so that small matrices are "
        "denser",
    )
    every: int = Field(100, ge=1, description="steps between two updates of the masks")
    end: int = Field(
        gt=0, description="step after which the masks are fixed; 3/4 of the run is usual"
    )
    drop: float = Field(
        0.3,
        gt=0,
        le=1,
        description="fraction of the active weights that the first mask update drops",
    )
    seed: int = Field(0, ge=0, description="seed of the random masks and of random growth")


class SETConfig(DynamicConfig):
    """SET (Mocanu et al. 2018): random pruned weights grow."""

    name: Literal["set"] = "set"


class RigLConfig(DynamicConfig):
    """RigL (Evci et al. 2020): the pruned weights with the largest gradients grow."""

    name: Literal["rigl"] = "rigl"


Grow = Callable[[str, MaskInputs], Int[Array, "*L i o"]]  # (name, inputs) -> keys to grow by


def weights_left(c: DynamicConfig, params: Arrays) -> dict[str, int]:
    """Number of nonzero weights of each matrix [i, o] of a stack [.., i, o].

    Erdos-Renyi: proportional to i + o, at most all; what a full matrix cannot take is spread over
    the others.
    """
    sizes = {name: p.shape[-2] * p.shape[-1] for name, p in params.items()}
    if c.density == "uniform":
        return {name: round((1 - c.sparsity) * size) for name, size in sizes.items()}
    copies = {name: p.size // sizes[name] for name, p in params.items()}
    sums = {name: p.shape[-2] + p.shape[-1] for name, p in params.items()}
    left, full = (1 - c.sparsity) * sum(p.size for p in params.values()), set[str]()
    while True:
        budget = left - sum(copies[n] * sizes[n] for n in full)
        factor = budget / max(sum(copies[n] * sums[n] for n in sizes.keys() - full), 1)
        more = {n for n in sizes.keys() - full if factor * sums[n] > sizes[n]}
        if not more:
            return {n: sizes[n] if n in full else round(factor * sums[n]) for n in sizes}
        full |= more


def random_keys(
    c: DynamicConfig, step: Array | int, name: str, shape: tuple[int, ...]
) -> Int[Array, "*L i o"]:
    """Random keys, the same on any number of devices."""
    key = jax.random.fold_in(jax.random.key(c.seed), zlib.crc32(name.encode()))
    bits = jax.random.bits(jax.random.fold_in(key, step), shape, jnp.uint32)
    return (bits >> 1).astype(jnp.int32)


def dynamic_masks(c: DynamicConfig, grow: Grow) -> Wrapper:
    """Wrapper that drops the smallest weights and grows equally many."""

    def due(step: Array, memory: PyTree) -> Array:
        return (step == 1) | ((step % c.every == 0) & (step < c.end))

    def draw(seen: MaskInputs, memory: PyTree) -> tuple[Masks, PyTree]:
        left = weights_left(c, seen.params)
        share = c.drop / 2 * (1 + jnp.cos(jnp.pi * seen.step / c.end))

        def change(name: str) -> Array:
            p, mask = seen.params[name], seen.masks[name]
            dropped = jnp.int32(share * left[name])
            kept = keep_largest(jnp.where(mask, magnitude(p), -1), left[name] - dropped)
            return kept | keep_largest(jnp.where(kept, -1, grow(name, seen)), dropped)

        def begin(name: str) -> Array:
            return keep_largest(random_keys(c, 0, name, seen.params[name].shape), left[name])

        first = lambda: {name: begin(name) for name in seen.params}
        later = lambda: {name: change(name) for name in seen.params}
        return jax.lax.cond(seen.step == 1, first, later), memory

    return with_masks(MaskRule(due, draw))


def set_masks(c: SETConfig) -> Wrapper:
    return dynamic_masks(c, functools.partial(random_growth, c))


def random_growth(c: DynamicConfig, name: str, seen: MaskInputs) -> Array:
    return random_keys(c, seen.step, name, seen.params[name].shape)


def rigl(c: RigLConfig) -> Wrapper:
    return dynamic_masks(c, lambda name, seen: magnitude(seen.grads[name]))
