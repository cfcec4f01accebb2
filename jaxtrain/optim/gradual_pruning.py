"""Gradual magnitude pruning with any optimizer (Zhu & Gupta 2017, arXiv:1710.01878)."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, PyTree
from pydantic import Field, model_validator

from jaxtrain.optim.masks import (
    MaskInputs,
    MaskRule,
    Masks,
    keep_largest,
    keep_largest_of_all,
    magnitude,
    with_masks,
)
from jaxtrain.optim.types import Wrapper
from jaxtrain.settings import Settings


class MagnitudeConfig(Settings):
    """Sparsity and scope of a magnitude mask."""

    sparsity: float = Field(gt=0, lt=1, description="final fraction of zero weights")
    scope: Literal["matrix", "global"] = Field(
        "matrix",
        description="weights that are ranked together: those of each matrix, or of all matrices "
        "of an optimizer group",
    )


class GradualPruningConfig(MagnitudeConfig):
    """Prunes the smallest weights during training (Zhu & Gupta 2017). The sparsity rises along a
    cubic, fast at first."""

    name: Literal["gradual_pruning"] = "gradual_pruning"
    begin: int = Field(0, ge=0, description="step before the first pruning")
    end: int = Field(gt=0, description="step at which the final sparsity is reached")
    every: int = Field(100, ge=1, description="steps between two prunings")

    @model_validator(mode="after")
    def _check(self) -> "GradualPruningConfig":
        if self.begin >= self.end:
            raise ValueError(f"begin {self.begin} is not before end {self.end}")
        return self


def magnitude_masks(c: MagnitudeConfig, params: dict[str, Array], share: Array | float) -> Masks:
    """Masks that zero the smallest weights. share: of c.sparsity, 0 to 1; at 1 the number of zeros
    is exact."""

    def keep(size: int) -> Array:
        """Number of weights to keep; at share 1 in Python, since float32 is inexact above 2^24."""
        pruned = jnp.int32(jnp.floor(share * c.sparsity * size))
        return size - jnp.where(share >= 1, round(c.sparsity * size), pruned)

    keys = {name: magnitude(p) for name, p in params.items()}
    if c.scope == "global":
        return keep_largest_of_all(keys, keep(sum(x.size for x in keys.values())))
    return {n: keep_largest(x, keep(x.shape[-2] * x.shape[-1])) for n, x in keys.items()}


def gradual_pruning(c: GradualPruningConfig) -> Wrapper:
    """Wrapper; at step t the sparsity is c.sparsity (1 - (1 - (t - begin) / (end - begin))^3)."""

    def due(step: Array, memory: PyTree) -> Array:
        since = step - c.begin
        return (since > 0) & (step <= c.end) & ((since % c.every == 0) | (step == c.end))

    def draw(seen: MaskInputs, memory: PyTree) -> tuple[Masks, PyTree]:
        left = 1 - (seen.step - c.begin) / (c.end - c.begin)
        return magnitude_masks(c, seen.params, 1 - left**3), memory

    return with_masks(MaskRule(due, draw))
