"""Identity preference optimization (Azar et al. 2023, arXiv:2310.12036)."""

from typing import Literal

from jaxtyping import Array
from pydantic import Field

from jaxtrain.objectives.preference import Answers, PreferenceLoss, margin
from jaxtrain.settings import Settings


class IPOConfig(Settings):
    """IPO, identity preference optimization: the margin's target is 1 / (2 beta), not infinity."""

    name: Literal["ipo"] = "ipo"
    beta: float = Field(0.1, gt=0, description="regularization strength (the paper's tau)")
    per_token: bool = Field(
        True,
        description="use the mean log-prob per token, as TRL does; false: the sum, as in the paper",
    )


def ipo_loss(c: IPOConfig, a: Answers, divergence: Array | None = None) -> PreferenceLoss:
    """Return (margin of the log-ratios - 1 / (2 tau))^2, IPO's equation 17."""
    ratio_N2 = a.logp_N2 - a.reference_N2
    ratio_N2 = ratio_N2 / a.tokens_N2 if c.per_token else ratio_N2
    return PreferenceLoss((margin(ratio_N2) - 1 / (2 * c.beta)) ** 2, c.beta * ratio_N2)
