"""Early-bird tickets (You et al. 2019, arXiv:1909.11957): prune when the masks have settled."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from jaxtrain.optim.gradual_pruning import MagnitudeConfig, magnitude_masks
from jaxtrain.optim.masks import Arrays, MaskInputs, MaskRule, Masks, with_masks
from jaxtrain.optim.types import Wrapper


class EarlyBirdConfig(MagnitudeConfig):
    """Early-bird tickets: all weights train until the magnitude masks hardly change. Then the
    masked weights become zero for the rest of the run; weights are not reset."""

    name: Literal["early_bird"] = "early_bird"
    every: int = Field(100, ge=1, description="steps between two masks that are compared")
    epsilon: float = Field(
        0.1,
        gt=0,
        le=1,
        description="mask distance, the fraction of entries that differ, below which the masks "
        "count as settled",
    )
    patience: int = Field(
        5, ge=1, description="number of consecutive mask distances that must be below epsilon"
    )


class Tickets(NamedTuple):
    previous: Masks  # candidate masks of the last comparison
    distance: Float[Array, ""]  # share of entries changed since the previous masks; 1 at first
    calm: Int[Array, ""]  # number of consecutive distances below epsilon
    drawn: Bool[Array, ""]


def early_bird(c: EarlyBirdConfig) -> Wrapper:
    """Wrapper that applies the masks once, when they have settled."""

    def memory(params: Arrays) -> Tickets:
        previous = {name: jnp.ones(p.shape, bool) for name, p in params.items()}
        return Tickets(previous, jnp.float32(1), jnp.int32(0), jnp.bool(False))

    def due(step: Array, memory: Tickets) -> Array:
        return (step % c.every == 0) & ~memory.drawn

    def draw(seen: MaskInputs, memory: Tickets) -> tuple[Masks, Tickets]:
        masks = magnitude_masks(c, seen.params, 1.0)
        changed = [jnp.sum(m != memory.previous[n], dtype=jnp.float32) for n, m in masks.items()]
        distance = sum(changed, jnp.float32(0)) / max(sum(m.size for m in masks.values()), 1)
        distance = jnp.where(seen.step <= c.every, 1.0, distance)
        calm = jnp.where(distance < c.epsilon, memory.calm + 1, 0)
        drawn = calm >= c.patience
        now = {name: mask | ~drawn for name, mask in masks.items()}
        return now, Tickets(memory.previous | masks, distance, calm, drawn)

    metrics = lambda memory: {"mask_distance": memory.distance}
    return with_masks(MaskRule(due, draw, memory, metrics))
