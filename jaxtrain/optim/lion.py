"""Lion (Chen et al. 2023), optax's: the sign of an interpolated momentum."""

from typing import Literal

import optax
from pydantic import Field

from jaxtrain.optim.groups import Group, Hyper, OptimizerConfig, one_rate


class LionConfig(OptimizerConfig):
    """Rates 3-10x below AdamW's, decay 3-10x above."""

    name: Literal["lion"] = "lion"
    learning_rate: float = Field(2e-4, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.5, ge=0, description="decoupled decay, times the learning rate")
    b1: float = Field(0.9, ge=0, lt=1, description="momentum in the sign")
    b2: float = Field(0.99, ge=0, lt=1, description="decay of the stored momentum")


def make_lion(h: Hyper) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_lion(h["b1"], h["b2"]),
        optax.add_decayed_weights(h["weight_decay"]),
        optax.scale(-h["learning_rate"]),
    )


def lion(c: LionConfig) -> dict[str, Group]:
    peaks = c.model_dump(include={"learning_rate", "weight_decay", "b1", "b2"})
    return one_rate(make_lion, peaks)
