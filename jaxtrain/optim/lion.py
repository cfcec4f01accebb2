"""Lion (Chen et al. 2023), from optax: the sign of an interpolated momentum.

For matrices only; AdamW updates the rest. A sign update moves every row of an embedding by the full
learning rate, long after its token was last seen, so rows of rare tokens would drift.
"""

from typing import Literal

import optax
from pydantic import Field

from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.param_groups import Hyper, OptimizerConfig, ParamGroup


class LionConfig(OptimizerConfig):
    """Lion for matrices, AdamW for the rest. Use learning rates 3-10x below AdamW's and weight
    decay 3-10x above."""

    name: Literal["lion"] = "lion"
    learning_rate: float = Field(2e-4, gt=0, description="peak learning rate of the matrices")
    weight_decay: float = Field(
        0.5, ge=0, description="decoupled weight decay, multiplied by the learning rate"
    )
    b1: float = Field(0.9, ge=0, lt=1, description="momentum coefficient inside the sign")
    b2: float = Field(0.99, ge=0, lt=1, description="decay rate of the stored momentum")
    adamw_lr: float = Field(
        1e-3, gt=0, description="peak learning rate of the parameters that AdamW updates"
    )
    adamw_weight_decay: float = Field(
        0.1,
        ge=0,
        description="decoupled weight decay of embeddings and head, multiplied by adamw_lr",
    )


def make_lion(h: Hyper) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_lion(h["b1"], h["b2"]),
        optax.add_decayed_weights(h["weight_decay"]),
        optax.scale(-h["learning_rate"]),
    )


def lion(c: LionConfig) -> dict[str, ParamGroup]:
    adam = {"learning_rate": c.adamw_lr, "weight_decay": c.adamw_weight_decay}
    adam |= {"b1": 0.9, "b2": 0.95, "eps": 1e-10}
    decayed, plain = (
        ParamGroup(make_adamw, adam),
        ParamGroup(make_adamw, {**adam, "weight_decay": 0.0}),
    )
    peaks = c.model_dump(include={"learning_rate", "weight_decay", "b1", "b2"})
    rest = {"embedding": decayed, "head": decayed, "gain": plain, "scalar": plain}
    return {"matrix": ParamGroup(make_lion, peaks)} | rest
