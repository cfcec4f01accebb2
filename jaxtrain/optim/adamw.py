"""AdamW (Loshchilov & Hutter 2019), from optax, for all parameters or for groups of Muon."""

from typing import Literal

import optax
from pydantic import Field

from jaxtrain.optim.param_groups import Hyper, OptimizerConfig, ParamGroup, single_rate_groups


class AdamWConfig(OptimizerConfig):
    """AdamW with one learning rate for all parameters. Gains and scalars have no weight decay."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(
        0.1, ge=0, description="decoupled weight decay, multiplied by the learning rate"
    )
    b1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment")
    b2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(
        1e-8, gt=0, description="epsilon, added to the square root of the second moment"
    )


def make_adamw(h: Hyper) -> optax.GradientTransformation:
    """AdamW with rates that may be traced."""
    return optax.chain(
        optax.scale_by_adam(h["b1"], h["b2"], h["eps"]),
        optax.add_decayed_weights(h["weight_decay"]),
        optax.scale(-h["learning_rate"]),
    )


def adamw(c: AdamWConfig) -> dict[str, ParamGroup]:
    peaks = c.model_dump(include={"learning_rate", "weight_decay", "b1", "b2", "eps"})
    return single_rate_groups(make_adamw, peaks)
