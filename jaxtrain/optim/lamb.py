"""LAMB (You et al. 2020): AdamW's update of each matrix, scaled to the norm of its weights."""

from typing import Literal

import optax
from pydantic import Field

from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.param_groups import (
    Hyper,
    OptimizerConfig,
    ParamGroup,
    per_matrix,
    single_rate_groups,
)


class LAMBConfig(OptimizerConfig):
    """LAMB, for very large batches. Each matrix's update is scaled to the norm of its weights, so
    learning rates are relative."""

    name: Literal["lamb"] = "lamb"
    learning_rate: float = Field(
        5e-3, gt=0, description="peak learning rate of the matrices, relative to their norms"
    )
    scalar_lr: float = Field(
        1e-3, gt=0, description="peak learning rate of gains and scalars, which Adam updates"
    )
    weight_decay: float = Field(
        0.1, ge=0, description="weight decay, added to the update before it is scaled"
    )
    b1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment")
    b2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(
        1e-6, gt=0, description="epsilon, added to the square root of the second moment"
    )


def make_lamb(h: Hyper) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(h["b1"], h["b2"], h["eps"]),
        optax.add_decayed_weights(h["weight_decay"]),
        per_matrix(optax.scale_by_trust_ratio()),
        optax.scale(-h["learning_rate"]),
    )


def lamb(c: LAMBConfig) -> dict[str, ParamGroup]:
    peaks = c.model_dump(include={"learning_rate", "weight_decay", "b1", "b2", "eps"})
    plain = {**peaks, "learning_rate": c.scalar_lr, "weight_decay": 0.0}
    return single_rate_groups(
        make_lamb, peaks, ParamGroup(make_adamw, plain), mup_rule=None, by_rows=False
    )
