"""Adafactor (Shazeer & Stern 2018), from optax: row and column sums for the second moment."""

from collections.abc import Callable
from typing import Literal

import optax
from pydantic import Field

from jaxtrain.optim.param_groups import (
    Hyper,
    OptimizerConfig,
    ParamGroup,
    per_matrix,
    single_rate_groups,
)


class AdafactorConfig(OptimizerConfig):
    """Adafactor: almost no optimizer state. There is no momentum, and the second moment of matrices
    of 128 x 128 or more is factored."""

    name: Literal["adafactor"] = "adafactor"
    learning_rate: float = Field(2e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(
        0.1, ge=0, description="decoupled weight decay, multiplied by the learning rate"
    )
    decay_power: float = Field(
        0.8, gt=0, lt=1, description="power in the second moment's decay rate, 1 - step^-power"
    )
    clipping_threshold: float = Field(
        1.0,
        gt=0,
        description="maximum root mean square of a matrix's update, to which larger ones are "
        "clipped",
    )
    multiply_by_parameter_scale: bool = Field(
        False,
        description="learning rates are relative to the weights' root mean square, as in the paper",
    )


def make_adafactor(relative: bool) -> Callable[[Hyper], optax.GradientTransformation]:
    def make(h: Hyper) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_factored_rms(decay_rate=h["decay_power"]),
            per_matrix(optax.clip_by_block_rms(h["clipping_threshold"])),
            per_matrix(optax.scale_by_param_block_rms()) if relative else optax.identity(),
            optax.add_decayed_weights(h["weight_decay"]),
            optax.scale(-h["learning_rate"]),
        )

    return make


def adafactor(c: AdafactorConfig) -> dict[str, ParamGroup]:
    peaks = c.model_dump(
        include={"learning_rate", "weight_decay", "decay_power", "clipping_threshold"}
    )
    mup_rule = None if c.multiply_by_parameter_scale else "adam"
    return single_rate_groups(
        make_adafactor(c.multiply_by_parameter_scale), peaks, mup_rule=mup_rule, by_rows=False
    )
