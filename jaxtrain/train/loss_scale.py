"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv:1710.03740)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxtrain.config.resolve import Resolved
from jaxtrain.train.transforms import StepOutcome, StepTransform, Verdict
from jaxtrain.weights.params import Params, Specs

FIRST_SCALE = 2.0**15
GROWTH_INTERVAL = 2000  # good steps before the scale doubles


class LossScale(NamedTuple):
    """Loss scale, and the number of steps since it last changed."""

    scale: Array
    good_steps: Array


class DynamicLossScale(StepTransform):
    """Scales the loss so that small gradients do not underflow. A step that overflows is skipped
    and halves the scale."""

    name = "loss_scale"
    has_state = True

    def init(self, params: Params, specs: Specs) -> LossScale:
        return LossScale(jnp.float32(FIRST_SCALE), jnp.zeros((), jnp.int32))

    def grad_scale(self, state: LossScale) -> Array:
        return state.scale

    def judge(self, state: LossScale, outcome: StepOutcome) -> Verdict:
        return Verdict(adjust_scale(state, outcome.finite), outcome.finite)

    def metrics(self, state: LossScale) -> dict[str, Array]:
        return {"loss_scale": state.scale}


def adjust_scale(old: LossScale, finite: Array) -> LossScale:
    """Halve the scale after an overflow; double it after GROWTH_INTERVAL steps without one."""
    scale, good = old
    grow = finite & (good + 1 >= GROWTH_INTERVAL)
    scale = jnp.where(finite, jnp.where(grow, scale * 2, scale), jnp.maximum(scale / 2, 1.0))
    good = jnp.where(finite & ~grow, good + 1, 0)
    return LossScale(scale, good)


def dynamic_loss_scale(c: Resolved, dtype: jnp.dtype) -> DynamicLossScale | None:
    return DynamicLossScale() if dtype == jnp.float16 else None
