"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306).

Answers are labelled one by one: desirable or not.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array
from pydantic import Field

from jaxtrain.objectives.base import DevicePairs
from jaxtrain.objectives.preference import Answers, PreferenceLoss, compared_answers
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params


class KTOConfig(Settings):
    """KTO: preference optimization on answers that are labelled one by one, desirable or not."""

    name: Literal["kto"] = "kto"
    beta: float = Field(
        0.1,
        gt=0,
        description="strength of the pull towards the reference model; the reward is beta x "
        "log-ratio",
    )
    desirable_weight: float = Field(
        1.0, gt=0, description="weight of the losses of desirable answers"
    )
    undesirable_weight: float = Field(
        1.0, gt=0, description="weight of the losses of undesirable answers"
    )


def kto_loss(c: KTOConfig, a: Answers, divergence: Array) -> PreferenceLoss:
    """Return lambda_y - value of the log-ratio. divergence: z0, the step's `reference_point`."""
    reward_N2 = c.beta * (a.logp_N2 - a.reference_N2)
    gain_N = reward_N2[..., 0] - c.beta * divergence
    desirable_N = c.desirable_weight * jax.nn.sigmoid(-gain_N)
    undesirable_N = c.undesirable_weight * jax.nn.sigmoid(gain_N)
    return PreferenceLoss(jnp.where(a.desirable_N, desirable_N, undesirable_N), reward_N2)


def kto_reference_point(graphdef: nnx.GraphDef, params: Params, batch: DevicePairs) -> Array:
    """Compute KTO's z0 of a whole step, from the unrelated answers of microbatches [A, B, T]."""

    def one(microbatch: DevicePairs) -> tuple[Array, Array]:
        a = compared_answers(graphdef, params, microbatch)
        there_BP = (microbatch.kto_labels_BP >= 0).astype(jnp.float32)
        ratio_BP = (a.logp_N2 - a.reference_N2)[..., 1]
        return jnp.sum(ratio_BP * there_BP), jnp.sum(there_BP)

    ratio_sum, answers = jax.tree.map(jnp.sum, jax.lax.map(one, batch))
    return reference_point(ratio_sum, answers)


def reference_point(ratio_sum: Array, answers: Array) -> Array:
    """Return KTO's z0: the mean log-ratio of the unrelated answers, clipped at zero. The step takes
    no gradient of it."""
    return jnp.maximum(0.0, ratio_sum / jnp.maximum(answers, 1))
