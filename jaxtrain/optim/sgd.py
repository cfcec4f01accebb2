"""SGD with momentum, from optax, as a baseline."""

from collections.abc import Callable
from typing import Literal

import optax
from pydantic import Field

from jaxtrain.optim.param_groups import Hyper, OptimizerConfig, ParamGroup, single_rate_groups


class SGDConfig(OptimizerConfig):
    """SGD with momentum. It needs far higher learning rates than AdamW, since it does not normalize
    gradients."""

    name: Literal["sgd"] = "sgd"
    learning_rate: float = Field(0.3, gt=0, description="peak learning rate")
    weight_decay: float = Field(
        1e-4, ge=0, description="decoupled weight decay, multiplied by the learning rate"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum coefficient")
    nesterov: bool = Field(True, description="use Nesterov momentum")


def make_sgd(nesterov: bool) -> Callable[[Hyper], optax.GradientTransformation]:
    def make(h: Hyper) -> optax.GradientTransformation:
        return optax.chain(
            optax.trace(h["momentum"], nesterov=nesterov),
            optax.add_decayed_weights(h["weight_decay"]),
            optax.scale(-h["learning_rate"]),
        )

    return make


def sgd(c: SGDConfig) -> dict[str, ParamGroup]:
    peaks = c.model_dump(include={"learning_rate", "weight_decay", "momentum"})
    return single_rate_groups(make_sgd(c.nesterov), peaks, mup_rule="sgd")
