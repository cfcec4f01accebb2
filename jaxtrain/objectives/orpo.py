"""Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691)."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array
from pydantic import Field

from jaxtrain.objectives.preference import Answers, PreferenceLoss, margin
from jaxtrain.settings import Settings


class ORPOConfig(Settings):
    """ORPO, odds ratio preference optimization: supervised fine-tuning and preference in one loss,
    without a reference model."""

    name: Literal["orpo"] = "orpo"
    beta: float = Field(0.1, gt=0, description="weight of the odds ratio loss (the paper's lambda)")


def orpo_loss(c: ORPOConfig, a: Answers, divergence: Array | None = None) -> PreferenceLoss:
    """Return the chosen answer's mean token loss - lambda log sigmoid(log odds ratio), equations 6
    and 7."""
    mean_N2 = a.logp_N2 / a.tokens_N2
    # 1 - p is zero only for an answer with p = 1; the clip keeps its gradient finite.
    odds_N2 = mean_N2 - jnp.log(jnp.maximum(-jnp.expm1(mean_N2), 1e-7))
    ratio_N = jax.nn.log_sigmoid(margin(odds_N2))
    return PreferenceLoss(-mean_N2[..., 0] - c.beta * ratio_N, c.beta * mean_N2)
