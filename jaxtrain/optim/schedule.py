"""Learning-rate schedules: multipliers of the peak rate as functions of the step.

The kind is static. Its numbers are arguments of the compiled step, so that changing one (or the
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
    final_fraction: float = Field(
        0.0, ge=0, le=1, description="learning rate at the last step, as a fraction of the peak"
    )


class Constant(Warmup):
    """Constant peak learning rate."""

    name: Literal["constant"] = "constant"


class Linear(Final):
    """Linear decay to `final_fraction`."""

    name: Literal["linear"] = "linear"


class Cosine(Final):
    """Cosine decay (half a period) to `final_fraction` (Loshchilov & Hutter 2017)."""

    name: Literal["cosine"] = "cosine"


class Trapezoid(Final):
    """Constant peak learning rate, then a decay over the last part of the run (WSD).

    As in nanochat, the decay takes a whole number of steps, and warm-up has priority: if they
    overlap in a short run, the warm-up completes, and the rate then continues on the decay's curve.
    """

    name: Literal["trapezoid"] = "trapezoid"
    decay_fraction: float = Field(
        0.65, gt=0, le=1, description="fraction of the run, at its end, in which the rate decays"
    )
    decay: Literal["linear", "sqrt", "power"] = Field(
        "linear",
        description="shape of the decay; sqrt is 1 - sqrt(progress) (Hagele et al. 2024, "
        "arXiv:2405.18392), power is (1 - progress)^decay_power (modded-nanogpt's PowerCool)",
    )
    decay_power: float = Field(
        1.2,
        gt=0,
        description="exponent of the power decay; 1 is linear, larger values decay faster at first",
    )


class OneCycle(Warmup):
    """Cosine from `initial_fraction` up to the peak, then down to `final_fraction` (Smith & Topin
    2018)."""

    name: Literal["onecycle"] = "onecycle"
    initial_fraction: float = Field(
        0.04, ge=0, le=1, description="learning rate at the first step, as a fraction of the peak"
    )
    final_fraction: float = Field(
        4e-6, ge=0, le=1, description="learning rate at the last step, as a fraction of the peak"
    )
    warmup_fraction: float = Field(
        0.3, gt=0, lt=1, description="fraction of the run in which the rate rises"
    )


class InverseSqrt(Warmup):
    """sqrt(timescale / (timescale + steps since the warm-up)), endless (Zhai et al. 2022).

    With timescale = warmup_steps it is the original Transformer's schedule (Vaswani et al. 2017).
    """

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: int = Field(
        100, ge=1, description="steps after the warm-up at which the rate is 1/sqrt(2) of the peak"
    )


Schedule = Annotated[
    Constant | Linear | Cosine | Trapezoid | OneCycle | InverseSqrt, Field(discriminator="name")
]


def shorten_warmup(c: Schedule, total_steps: int) -> Schedule:
    """Shorten a warm-up that is longer than the whole run to a tenth of the run."""
    if c.warmup_steps <= total_steps:
        return c
    return c.model_copy(update={"warmup_steps": total_steps // 10})


def schedule_values(c: Schedule, total_steps: int | float) -> Values:
    """The schedule's numbers as arguments of the compiled step."""
    numbers = {k: v for k, v in c.model_dump().items() if isinstance(v, (int, float))}
    if isinstance(c, Trapezoid):
        numbers["decay_steps"] = round(c.decay_fraction * total_steps)
        if c.decay != "power":
            del numbers["decay_power"]
    return {**numbers, "total_steps": total_steps}


def multiplier(c: Schedule, v: Values, step: jax.Array) -> jax.Array:
    """Factor on the peak rate at `step` (0-based), from the values of `schedule_values`."""
    warm = jnp.minimum(1.0, (step + 1) / jnp.maximum(v["warmup_steps"], 1))
    if isinstance(c, Constant):
        return warm
    if isinstance(c, InverseSqrt):
        since = jnp.maximum(step - v["warmup_steps"], 0)
        return warm * jnp.sqrt(v["timescale"] / (v["timescale"] + since))
    start = v["warmup_steps"]
    if isinstance(c, Trapezoid):
        start = v["total_steps"] - v["decay_steps"]
    elif isinstance(c, OneCycle):
        start = v["warmup_fraction"] * v["total_steps"]
    progress = jnp.clip((step - start) / jnp.maximum(v["total_steps"] - start, 1), 0.0, 1.0)
    if isinstance(c, Cosine | OneCycle):
        left = 0.5 * (1 + jnp.cos(math.pi * progress))
    elif isinstance(c, Trapezoid) and c.decay == "sqrt":
        left = 1 - jnp.sqrt(progress)
    elif isinstance(c, Trapezoid) and c.decay == "power":
        left = (1 - progress) ** v["decay_power"]
    else:
        left = 1 - progress
    if isinstance(c, OneCycle):
        risen = 0.5 * (1 - jnp.cos(math.pi * jnp.clip(step / start, 0.0, 1.0)))
        warm = warm * (v["initial_fraction"] + (1 - v["initial_fraction"]) * risen)
    value = v["final_fraction"] + (1 - v["final_fraction"]) * left
    if isinstance(c, Trapezoid):
        return jnp.where(step < v["warmup_steps"], warm, value)
    return warm * value
