"""Prefix-token prediction: each position also predicts the longest prefix of its next token.

The prefix of a token is the token whose bytes are the longest proper prefix of the token's bytes
(modded-nanogpt, record 88, pull request 337). Both losses share one softmax, so that the second
costs two dot products per token: loss(prefix) = loss(next) + logit(next) - logit(prefix).
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field

from jaxtrain.model.layers import lookup
from jaxtrain.objectives.base import DeviceBatch, LossOptions, Objective, SumsByName
from jaxtrain.objectives.next_token import (
    Hidden,
    count_tokens,
    head_loss,
    hidden_states,
    token_metrics,
)
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params

SUMS = ("weighted", "weights", "with_prefix", "prefix_gap")


class PrefixTokenConfig(Settings):
    """Predicts the next token and, with a lower weight, its longest proper prefix in the
    vocabulary."""

    name: Literal["prefix_token"] = "prefix_token"
    weight: float = Field(0.25, ge=0, description="initial weight of the prefix loss")
    decay_start: float = Field(
        1 / 3, ge=0, le=1, description="fraction of train.steps after which the weight decays"
    )
    decay_end: float = Field(
        2 / 3, ge=0, le=1, description="fraction of train.steps after which the weight is 0"
    )


def prefix_tokens(pieces: Sequence[bytes]) -> np.ndarray:
    """Return the token that is each token's longest proper prefix, int32 [V]; -1 if none is."""
    known = {piece: index for index, piece in reversed(list(enumerate(pieces))) if piece}

    def prefix(piece: bytes) -> int:
        shorter = (known.get(piece[:n]) for n in range(len(piece) - 1, 0, -1))
        return next((index for index in shorter if index is not None), -1)

    return np.array([prefix(piece) for piece in pieces], np.int32)


def label_logits(h: Hidden, labels_BT: Int[Array, "*M B T"]) -> Float[Array, "*M B T"]:
    """Return the float32 logit of one label per position, from gathered columns of the head."""
    rows_BTD = lookup(h.model.head_DV().T.astype(h.x_BTD.dtype), labels_BT)
    logits_BT = jnp.einsum("...d,...d->...", h.x_BTD, rows_BTD, preferred_element_type=jnp.float32)
    cap = h.model.config.logit_softcap
    return logits_BT if cap is None else cap * jnp.tanh(logits_BT / cap)


def make_prefix_token(c: PrefixTokenConfig, options: LossOptions) -> Objective:
    """Make the objective: next-token loss + weight x loss of the prefix, if the token has one.

    `loss` logs the weighted mean of the next-token loss: a token with a prefix counts 1 + weight
    times. `prefix_gap` logs the mean excess of the prefix's loss over the next token's, in nats.
    """
    prefix_V = prefix_tokens(options.pieces or (b"",))
    fall = max(c.decay_end - c.decay_start, 1e-6)

    def loss(
        graphdef: nnx.GraphDef,
        params: Params,
        batch: DeviceBatch,
        shared: None,
        **step: Array | None,
    ) -> tuple[Array, SumsByName]:
        h = hidden_states(graphdef, params, batch, options, step.get("key"))
        done = jnp.asarray(step["step"], jnp.float32) / options.steps
        weight = c.weight * jnp.clip((c.decay_end - done) / fall, 0, 1)
        prefix_BT = jnp.asarray(prefix_V)[h.targets_BT]
        found_BT = h.weights_BT * (prefix_BT >= 0)
        weights_BT = h.weights_BT + weight * found_BT
        first = head_loss(h, h.targets_BT, weights_BT, options)
        prefix_BT = jnp.maximum(prefix_BT, 0)
        gap = jnp.sum(found_BT * (label_logits(h, h.targets_BT) - label_logits(h, prefix_BT)))
        sums = (first, jnp.sum(weights_BT), jnp.sum(found_BT), gap)
        total = first + weight * gap + h.balance_loss
        return total, jax.lax.stop_gradient(dict(zip(SUMS, sums)))

    def metrics(
        loss: Array, tokens: Array, text_bytes: Array, sums: SumsByName, shared: None
    ) -> dict[str, Array]:
        nats = sums["weighted"] * tokens / sums["weights"]
        found = token_metrics(nats, tokens, text_bytes, sums, None)
        return found | {"prefix_gap": sums["prefix_gap"] / jnp.maximum(sums["with_prefix"], 1)}

    return Objective(loss, count_tokens, metrics, SUMS)
