"""Learning-rate schedules: multipliers of the peak rate as functions of the step.

The kind is static; its numbers enter the compiled step as values, so that changing one (or the
number of steps) never recompiles.
"""

import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from jaxtrain.settings import Settings

Values = dict[str, Any]


class Warmup(Settings):
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up from 0 to the peak")


class Final(Warmup):
    final: float = Field(0.0, ge=0, le=1, description="multiplier at the last step")


class Constant(Warmup):
    """The peak rate throughout."""

    name: Literal["constant"] = "constant"


class Linear(Final):
    """Straight down to `final`."""

    name: Literal["linear"] = "linear"


class Cosine(Final):
    """Half a cosine down to `final` (Loshchilov & Hutter 2017)."""

    name: Literal["cosine"] = "cosine"


class Trapezoid(Final):
    """The peak, then a decay over the last part of the run (WSD)."""

    name: Literal["trapezoid"] = "trapezoid"
    decay_fraction: float = Field(0.65, gt=0, le=1, description="share of the run that decays")
    decay: Literal["linear", "sqrt"] = Field(
        "linear", description="shape of the decay; sqrt is 1 - sqrt(progress) (Hagele et al. 2024)"
    )


Schedule = Annotated[Constant | Linear | Cosine | Trapezoid, Field(discriminator="name")]


def schedule_values(c: Schedule, total_steps: int) -> Values:
    """The schedule's numbers as arguments of the compiled step."""
    numbers = {k: v for k, v in c.model_dump().items() if isinstance(v, (int, float))}
    return {**numbers, "total_steps": total_steps}


def multiplier(c: Schedule, v: Values, step: jax.Array) -> jax.Array:
    """Factor on the peak rate at `step` (0-based), from the values of `schedule_values`."""
    warm = jnp.minimum(1.0, (step + 1) / jnp.maximum(v["warmup_steps"], 1))
    if isinstance(c, Constant):
        return warm
    start = (
        (1 - v["decay_fraction"]) * v["total_steps"]
        if isinstance(c, Trapezoid)
        else v["warmup_steps"]
    )
    progress = jnp.clip((step - start) / jnp.maximum(v["total_steps"] - start, 1), 0.0, 1.0)
    if isinstance(c, Cosine):
        left = 0.5 * (1 + jnp.cos(math.pi * progress))
    elif isinstance(c, Trapezoid) and c.decay == "sqrt":
        left = 1 - jnp.sqrt(progress)
    else:
        left = 1 - progress
    return warm * (v["final"] + (1 - v["final"]) * left)
