"""Preference objectives: losses of the log-probs of whole answers, in nats.

Each objective has a file (`dpo.py`, ...) with its configuration and loss. This file is shared code.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxtrain import parallel
from jaxtrain.data.records import DESIRABLE
from jaxtrain.model import Forward, Transformer
from jaxtrain.objectives.base import DevicePairs, Objective, SumsByName
from jaxtrain.weights.params import Params

SUMS = (
    "chosen", "rejected", "right", "reward_chosen", "reward_rejected", "logp_chosen",
    "logp_rejected",
)  # fmt: skip


class Answers(NamedTuple):
    """Inputs of a preference loss for N pairs. The first answer is the chosen or the labelled one.

    With KTO, the second answer is that of another example, after the same prompt.
    """

    logp_N2: Float[Array, "*n 2"]
    reference_N2: Float[Array, "*n 2"]
    tokens_N2: Float[Array, "*n 2"]
    desirable_N: Bool[Array, "*n"]  # label of the first answer, for KTO


class PreferenceLoss(NamedTuple):
    """The loss of each pair, and the rewards of its two answers."""

    loss_N: Float[Array, "*n"]
    reward_N2: Float[Array, "*n 2"]


@runtime_checkable
class PreferenceConfig(Protocol):
    """The configuration of a preference objective."""

    @property
    def beta(self) -> float: ...


class PreferenceMethod(NamedTuple):
    """One preference objective: (config, answers, shared) -> the loss of each pair."""

    loss: Callable[..., PreferenceLoss]
    has_reference: bool = True  # the loss needs log-probs of the model that training starts from
    is_labelled: bool = False  # each answer has its own label, as in KTO
    share: Callable[[nnx.GraphDef, Params, Any], Array] | None = None  # see `Objective`


def make_preference(c: PreferenceConfig, method: PreferenceMethod) -> Objective:
    """Make the objective of a preference method."""

    def loss(
        graphdef: nnx.GraphDef,
        params: Params,
        batch: DevicePairs,
        shared: Array | None,
        **step: Array | None,
    ) -> tuple[Array, SumsByName]:
        return preference_loss(c, method, graphdef, params, batch, shared)

    objective = Objective(loss, count_pairs, pair_metrics, SUMS)
    return objective if method.share is None else objective._replace(share=method.share)


def answer_logps(
    graphdef: nnx.GraphDef, params: Params, batch: DevicePairs
) -> tuple[Float[Array, "B P 2"], Float[Array, "B P 2"]]:
    """Return log-probs and token counts of both answers of each pair of a `data.PairBatch`."""
    model: Transformer = nnx.merge(graphdef, params)
    texts = batch.tokens_BT, batch.positions_BT, batch.segments_BT
    x_BTD = model(*texts, Forward(zigzag=True)).states
    labels = batch.targets_BT, batch.weights_BT, batch.segments_BT
    targets_BT, weights_BT, segments_BT = parallel.zigzag_shard(labels)
    nll_BT = parallel.token_losses(
        x_BTD,
        model.head_DV().astype(x_BTD.dtype),
        targets_BT,
        softcap=model.config.logit_softcap,
        valid_vocab=model.vocab_size,
    )
    shape = batch.references_BP2.shape
    # A reduction instead of a scatter: its order, and so its rounding, is deterministic.
    own_BTS = segments_BT[:, :, None] == jnp.arange(1, 2 * shape[1] + 1)[None, None]
    total = lambda x_BT: jnp.sum(jnp.where(own_BTS, x_BT[:, :, None], 0), axis=1).reshape(shape)
    return total(-nll_BT * weights_BT), total(weights_BT)


def compared_answers(graphdef: nnx.GraphDef, params: Params, batch: DevicePairs) -> Answers:
    """Return the answers of a `data.PairBatch` [B, T] and their reference log-probs, [B, P, 2]."""
    logp_BP2, tokens_BP2 = answer_logps(graphdef, params, batch)
    desirable_BP = batch.kto_labels_BP == DESIRABLE
    return Answers(logp_BP2, batch.references_BP2, jnp.maximum(tokens_BP2, 1), desirable_BP)


def preference_loss(
    c: PreferenceConfig,
    method: PreferenceMethod,
    graphdef: nnx.GraphDef,
    params: Params,
    batch: DevicePairs,
    divergence: Array | None,
) -> tuple[Array, dict[str, Array]]:
    """Return the sum over pairs of the method's loss, and the sums SUMS for the metrics.

    Labelled answers (KTO) count as chosen if desirable, else as rejected. A labelled answer is
    right if its reward is on the correct side of the reference point.
    """
    there_BP = (batch.kto_labels_BP >= 0).astype(jnp.float32)
    a = compared_answers(graphdef, params, batch)
    loss_BP, reward_BP2 = method.loss(c, a, divergence)
    logps, rewards = (jnp.moveaxis(x, -1, 0) for x in (a.logp_N2, reward_BP2))
    chosen_BP = rejected_BP = there_BP
    if method.is_labelled and divergence is not None:
        chosen_BP, rejected_BP = there_BP * a.desirable_N, there_BP * ~a.desirable_N
        logps, rewards = (logps[0], logps[0]), (rewards[0], rewards[0])
        right_BP = (rewards[0] > c.beta * divergence) == a.desirable_N
    else:
        right_BP = rewards[0] > rewards[1]
    sums = (
        chosen_BP, rejected_BP, right_BP * there_BP,
        rewards[0] * chosen_BP, rewards[1] * rejected_BP,
        logps[0] * chosen_BP, logps[1] * rejected_BP,
    )  # fmt: skip
    return jnp.sum(loss_BP * there_BP), dict(zip(SUMS, map(jnp.sum, sums)))


def count_pairs(batch: DevicePairs, bytes_V: Array) -> tuple[Array, Array]:
    return jnp.sum(batch.kto_labels_BP >= 0).astype(jnp.float32), jnp.zeros(())


def pair_metrics(
    loss: Array, pairs: Array, text_bytes: Array, sums: SumsByName, divergence: Array | None
) -> dict[str, Array]:
    """Return means over pairs: rewards, accuracy of the preference order, and log-probs."""
    of = lambda name, part: sums[f"{name}_{part}"] / jnp.maximum(sums[part], 1)
    metrics = {f"{n}_{p}": of(n, p) for n in ("reward", "logp") for p in ("chosen", "rejected")}
    metrics["reward_margin"] = metrics["reward_chosen"] - metrics["reward_rejected"]
    metrics |= {"accuracy": sums["right"] / pairs, "pairs": pairs}
    metrics |= {} if divergence is None else {"divergence": divergence}
    return {"loss": loss / pairs} | metrics


def margin(x_N2: Float[Array, "*n 2"]) -> Float[Array, "*n"]:
    """Return the first answer's value minus the second's."""
    return x_N2[..., 0] - x_N2[..., 1]
