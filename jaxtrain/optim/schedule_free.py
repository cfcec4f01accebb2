"""Schedule-free AdamW (Defazio et al. 2024), from optax: an average of iterates replaces the decay.

The trained parameters y interpolate Adam's iterate z and the average x; evaluate and export x.
"""

from typing import Any, Literal, cast

import jax.numpy as jnp
import optax
import optax.contrib
from pydantic import Field

from jaxtrain.optim.param_groups import CommonConfig, Hyper, ParamGroup, single_rate_groups
from jaxtrain.optim.schedule import Constant, Schedule


class ScheduleFreeConfig(CommonConfig):
    """Schedule-free AdamW: higher learning rates than AdamW's and a constant schedule, so the run
    may end at any step."""

    name: Literal["schedule_free"] = "schedule_free"
    learning_rate: float = Field(2.5e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(
        0.05, ge=0, description="decoupled weight decay, multiplied by the learning rate"
    )
    b1: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="interpolation weight of the average in the weights that gradients are taken "
        "at (the paper's beta)",
    )
    b2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(
        1e-8, gt=0, description="epsilon, added to the square root of the second moment"
    )
    schedule: Schedule = Field(
        default_factory=lambda: Constant.model_validate({"warmup_steps": 40}),
        description="learning rate schedule; only a warm-up is allowed",
    )


def make_schedule_free(h: Hyper) -> optax.GradientTransformation:
    """z is updated by Adam without momentum; z and averaging weights are float32 in any case."""
    adam = optax.chain(
        optax.scale_by_rms(h["b2"], eps=h["eps"], eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(h["weight_decay"]),
        optax.scale(-h["learning_rate"]),
    )
    tx = optax.contrib.schedule_free(adam, h["learning_rate"], h["b1"], state_dtype=jnp.float32)

    def init(params):
        state: Any = tx.init(params)
        zero = jnp.zeros((), jnp.float32)
        return state._replace(b1=jnp.float32(h["b1"]), weight_sum=zero, max_lr=zero)

    def update(updates, state, params=None):
        updates, new = tx.update(updates, state, params)
        return updates, cast(Any, new)._replace(b1=jnp.float32(h["b1"]))

    return optax.GradientTransformation(init, update)


def schedule_free(c: ScheduleFreeConfig) -> dict[str, ParamGroup]:
    peaks = c.model_dump(include={"learning_rate", "weight_decay", "b1", "b2", "eps"})
    average = optax.contrib.schedule_free_eval_params
    return single_rate_groups(make_schedule_free, peaks, eval_params=average)
