"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

With label smoothing it is cDPO (Mitchell 2023).
"""

from typing import Literal

import jax
from jaxtyping import Array
from pydantic import Field

from jaxtrain.objectives.preference import Answers, PreferenceLoss, margin
from jaxtrain.settings import Settings


class DPOConfig(Settings):
    """DPO: direct preference optimization."""

    name: Literal["dpo"] = "dpo"
    beta: float = Field(
        0.1,
        gt=0,
        description="strength of the pull towards the reference model; the reward is beta x "
        "log-ratio",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="assumed fraction of pairs with swapped labels (conservative DPO)",
    )


def dpo_loss(c: DPOConfig, a: Answers, divergence: Array | None = None) -> PreferenceLoss:
    """Return -log sigmoid(beta x margin of the log-ratios), DPO's equation 7."""
    reward_N2 = c.beta * (a.logp_N2 - a.reference_N2)
    margin_N = margin(reward_N2)
    right_N, wrong_N = jax.nn.log_sigmoid(margin_N), jax.nn.log_sigmoid(-margin_N)
    smooth = c.label_smoothing
    return PreferenceLoss(-(1 - smooth) * right_N - smooth * wrong_N, reward_N2)
