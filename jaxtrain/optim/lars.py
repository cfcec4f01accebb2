"""LARS (You et al. 2017): SGD with each matrix's step scaled to the norm of its weights."""

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
from jaxtrain.optim.sgd import make_sgd


class LARSConfig(OptimizerConfig):
    """LARS, for very large batches. The update of a matrix is learning rate x trust ratio x its
    norm, before momentum."""

    name: Literal["lars"] = "lars"
    learning_rate: float = Field(
        3.0, gt=0, description="peak learning rate of the matrices, relative to their norms"
    )
    scalar_lr: float = Field(
        0.03, gt=0, description="peak learning rate of gains and scalars, which SGD updates"
    )
    weight_decay: float = Field(1e-4, ge=0, description="weight decay, added to the gradient")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum coefficient")
    trust_coefficient: float = Field(
        1e-3, gt=0, description="trust coefficient: update norm / weight norm at learning rate 1"
    )


def make_lars(h: Hyper) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(h["weight_decay"]),
        per_matrix(optax.scale_by_trust_ratio(trust_coefficient=h["trust_coefficient"])),
        optax.trace(h["momentum"]),
        optax.scale(-h["learning_rate"]),
    )


def lars(c: LARSConfig) -> dict[str, ParamGroup]:
    peaks = c.model_dump(include={"learning_rate", "weight_decay", "momentum", "trust_coefficient"})
    plain = {"learning_rate": c.scalar_lr, "weight_decay": 0.0, "momentum": c.momentum}
    return single_rate_groups(
        make_lars, peaks, ParamGroup(make_sgd(False), plain), mup_rule=None, by_rows=False
    )
