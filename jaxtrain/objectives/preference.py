"""Losses of preference training, as functions of the log-probs of whole answers, in nats.

DPO (Rafailov et al. 2023, arXiv:2305.18290; with label smoothing, cDPO, Mitchell 2023), IPO (Azar
et al. 2023, arXiv:2310.12036), ORPO (Hong et al. 2024, arXiv:2403.07691) and KTO (Ethayarajh et al.
2024, arXiv:2402.01306).
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from pydantic import Field

from jaxtrain.settings import Settings


class NextTokenConfig(Settings):
    """The next token: pretraining, and answers of conversations."""

    name: Literal["next_token"] = "next_token"


class DPOConfig(Settings):
    """Direct preference optimization."""

    name: Literal["dpo"] = "dpo"
    beta: float = Field(
        0.1, gt=0, description="strength of the pull to the reference; a reward is beta x log-ratio"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="part of the pairs that are labelled the wrong way (cDPO)"
    )


class IPOConfig(Settings):
    """Identity preference optimization: the margin is drawn to 1 / (2 beta), not to infinity."""

    name: Literal["ipo"] = "ipo"
    beta: float = Field(0.1, gt=0, description="the paper's tau")
    per_token: bool = Field(
        True, description="mean log-probs of a token, as in TRL; false: their sums, as in the paper"
    )


class ORPOConfig(Settings):
    """Odds ratio preference optimization: fine-tuning and preference at once, no reference."""

    name: Literal["orpo"] = "orpo"
    beta: float = Field(0.1, gt=0, description="the paper's lambda, weight of the odds ratio")


class KTOConfig(Settings):
    """Kahneman-Tversky optimization, of answers that are judged one by one."""

    name: Literal["kto"] = "kto"
    beta: float = Field(
        0.1, gt=0, description="strength of the pull to the reference; a reward is beta x log-ratio"
    )
    desirable_weight: float = Field(1.0, gt=0, description="of the losses of wanted answers")
    undesirable_weight: float = Field(1.0, gt=0, description="of the losses of unwanted answers")


ObjectiveConfig = Annotated[
    NextTokenConfig | DPOConfig | IPOConfig | ORPOConfig | KTOConfig, Field(discriminator="name")
]


class Answers(NamedTuple):
    """What a loss sees of N pairs; the first answer is the chosen or the judged one.

    The second one of a judged answer is another's, to the same prompt.
    """

    logp_N2: Float[Array, "*n 2"]
    reference_N2: Float[Array, "*n 2"]
    tokens_N2: Float[Array, "*n 2"]
    wanted_N: Bool[Array, "*n"]  # of judged answers


class Judged(NamedTuple):
    """The loss of each pair, and the rewards of its two answers."""

    loss_N: Float[Array, "*n"]
    reward_N2: Float[Array, "*n 2"]


def dpo(c: DPOConfig, a: Answers, divergence: Array | None = None) -> Judged:
    """-log sigmoid(beta x margin of the log-ratios), DPO's equation 7."""
    reward_N2 = c.beta * (a.logp_N2 - a.reference_N2)
    margin_N = _margin(reward_N2)
    right_N, wrong_N = jax.nn.log_sigmoid(margin_N), jax.nn.log_sigmoid(-margin_N)
    smooth = c.label_smoothing
    return Judged(-(1 - smooth) * right_N - smooth * wrong_N, reward_N2)


def ipo(c: IPOConfig, a: Answers, divergence: Array | None = None) -> Judged:
    """(margin of the log-ratios - 1 / (2 tau))^2, IPO's equation 17."""
    ratio_N2 = a.logp_N2 - a.reference_N2
    ratio_N2 = ratio_N2 / a.tokens_N2 if c.per_token else ratio_N2
    return Judged((_margin(ratio_N2) - 1 / (2 * c.beta)) ** 2, c.beta * ratio_N2)


def orpo(c: ORPOConfig, a: Answers, divergence: Array | None = None) -> Judged:
    """The chosen answer's loss a token - lambda log sigmoid(log odds ratio), equations 6 and 7."""
    mean_N2 = a.logp_N2 / a.tokens_N2
    # 1 - p vanishes only for an answer that is certain; its gradient shall stay finite.
    odds_N2 = mean_N2 - jnp.log(jnp.maximum(-jnp.expm1(mean_N2), 1e-7))
    ratio_N = jax.nn.log_sigmoid(_margin(odds_N2))
    return Judged(-mean_N2[..., 0] - c.beta * ratio_N, c.beta * mean_N2)


def kto(c: KTOConfig, a: Answers, divergence: Array) -> Judged:
    """lambda_y - value of the log-ratio. divergence: z0, `reference_point` of the step."""
    reward_N2 = c.beta * (a.logp_N2 - a.reference_N2)
    gain_N = reward_N2[..., 0] - c.beta * divergence
    wanted_N = c.desirable_weight * jax.nn.sigmoid(-gain_N)
    unwanted_N = c.undesirable_weight * jax.nn.sigmoid(gain_N)
    return Judged(jnp.where(a.wanted_N, wanted_N, unwanted_N), reward_N2)


def reference_point(ratio_sum: Array, answers: Array) -> Array:
    """KTO's z0: the mean log-ratio of the other answers, not below zero; it has no gradient."""
    return jnp.maximum(0.0, ratio_sum / jnp.maximum(answers, 1))


def _margin(x_N2: Array) -> Array:
    return x_N2[..., 0] - x_N2[..., 1]


LOSSES: dict[str, Callable[..., Judged]] = {
    "dpo": dpo, "ipo": ipo, "orpo": orpo, "kto": kto,
}  # fmt: skip


def has_reference(c: Any) -> bool:
    """Whether an objective compares with the model that training starts from."""
    return c.name in LOSSES and c.name != "orpo"
