"""Multi-token prediction (MTP) modules (DeepSeek-V3, arXiv:2412.19437, section 2.2).

Module k reads the states of module k - 1 (module 0 is the model) and the token k positions later,
and predicts the token after that. Evaluation uses the next token only. The modules can draft tokens
for speculative decoding in the inference engine.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array
from pydantic import Field

from jaxtrain import parallel
from jaxtrain.model.attention import attend_rows
from jaxtrain.model.mtp import tokens_later
from jaxtrain.objectives.base import DeviceBatch, LossOptions, Objective, SumsByName
from jaxtrain.objectives.multi_token import ahead
from jaxtrain.objectives.next_token import (
    Hidden,
    count_tokens,
    head_loss,
    hidden_states,
    sharded_labels,
    token_metrics,
)
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params


class MTPConfig(Settings):
    """Multi-token prediction (DeepSeek-V3): the next token and, by modules with their own
    parameters, the tokens after it."""

    name: Literal["mtp"] = "mtp"
    depth: int = Field(
        1, ge=1, le=16, description="number of sequential prediction modules; sets model.mtp"
    )
    weight: float = Field(
        0.3, ge=0, description="weight of the modules' mean loss; the main model's weight is 1"
    )


def module_losses(
    h: Hidden, batch: DeviceBatch, depth: int, options: LossOptions, key: Array | None = None
) -> list[Array]:
    """Return each module's sum over tokens of weight x negative log-likelihood, in nats, float32.

    h: the model's states of the batch [B, T]. A label counts only within the row and the document
    of its position.
    """
    segments_BT = batch.segments_BT if h.model.config.document_mask else None
    positions_BT = batch.positions_BT
    if positions_BT is None:
        positions_BT = jnp.arange(batch.tokens_BT.shape[1], dtype=jnp.int32)[None]
    attend = functools.partial(attend_rows, zigzag=True)
    states_BTD, losses = h.x_BTD, []
    for k in range(1, depth + 1):
        texts = tokens_later(batch.tokens_BT, k), positions_BT, segments_BT
        rows = parallel.zigzag_shard(texts)
        states_BTD, _ = h.model.predict_ahead(k - 1, states_BTD, rows, attend, key)
        later = ahead(batch.targets_BT, batch.weights_BT, batch.segments_BT, k)
        losses.append(head_loss(h._replace(x_BTD=states_BTD), *sharded_labels(*later), options))
    return losses


def make_mtp(c: MTPConfig, options: LossOptions) -> Objective:
    """Make the objective: next-token loss + weight x mean of the modules' losses. `loss` logs the
    next-token loss only."""
    names = tuple(f"loss_mtp_{k}" for k in range(1, c.depth + 1))

    def loss(
        graphdef: nnx.GraphDef,
        params: Params,
        batch: DeviceBatch,
        shared: None,
        **step: Array | None,
    ) -> tuple[Array, SumsByName]:
        key = step.get("key")
        h = hidden_states(graphdef, params, batch, options, key)
        first = head_loss(h, h.targets_BT, h.weights_BT, options)
        found = module_losses(h, batch, c.depth, options, key)
        sums = dict(zip(("next", *names), (first, *found)))
        total = first + c.weight * sum(found) / c.depth + h.balance_loss
        return total, jax.lax.stop_gradient(sums)

    def metrics(
        loss: Array, tokens: Array, text_bytes: Array, sums: SumsByName, shared: None
    ) -> dict[str, Array]:
        found = token_metrics(sums["next"], tokens, text_bytes, sums, None)
        return found | {name: sums[name] / tokens for name in names}

    return Objective(loss, count_tokens, metrics, ("next", *names))
