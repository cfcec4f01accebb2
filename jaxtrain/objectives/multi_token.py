"""Multi-token prediction: each position also predicts the tokens after the next one.

As Gloeckle et al. 2024 (arXiv:2404.19737), but one head serves all distances, each with a loss
weight, as in the NanoGPT speed-runs. Evaluation uses the next token only.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field

from jaxtrain.objectives.base import DeviceBatch, LossOptions, Objective, SumsByName
from jaxtrain.objectives.next_token import (
    count_tokens,
    head_loss,
    hidden_states,
    sharded_labels,
    token_metrics,
)
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params


class MultiTokenConfig(Settings):
    """Predicts the next token and, with lower weights, the tokens after it."""

    name: Literal["multi_token"] = "multi_token"
    weights: tuple[float, ...] = Field(
        (0.5, 0.25),
        min_length=1,
        description="loss weights of the tokens 2, 3, ... positions ahead; the next token's "
        "weight is 1",
    )


def ahead(
    targets_BT: Int[Array, "*M B T"],
    weights_BT: Float[Array, "*M B T"],
    segments_BT: Int[Array, "*M B T"] | None,
    distance: int,
) -> tuple[Array, Array]:
    """Return targets and weights `distance` positions later; weight 0 past the row or document."""
    shift = lambda x: jnp.pad(x[..., distance:], [(0, 0)] * (x.ndim - 1) + [(0, distance)])
    weights = shift(weights_BT)
    if segments_BT is not None:
        weights = weights * (shift(segments_BT) == segments_BT)
    return shift(targets_BT), weights


def make_multi_token(c: MultiTokenConfig, options: LossOptions) -> Objective:
    """Make the objective: next-token loss + sum over distances of weight x loss. `loss` logs the
    next-token loss only."""
    names = tuple(f"loss_ahead_{i}" for i in range(2, 2 + len(c.weights)))

    def loss(
        graphdef: nnx.GraphDef,
        params: Params,
        batch: DeviceBatch,
        shared: None,
        **step: Array | None,
    ) -> tuple[Array, SumsByName]:
        h = hidden_states(graphdef, params, batch, options, step.get("key"))
        first = head_loss(h, h.targets_BT, h.weights_BT, options)
        sums: SumsByName = {"next": jax.lax.stop_gradient(first)}
        total = first + h.balance_loss
        for i, (name, weight) in enumerate(zip(names, c.weights), start=1):
            later = ahead(batch.targets_BT, batch.weights_BT, batch.segments_BT, i)
            found = head_loss(h, *sharded_labels(*later), options)
            sums[name] = jax.lax.stop_gradient(found)
            total = total + weight * found
        return total, sums

    def metrics(
        loss: Array, tokens: Array, text_bytes: Array, sums: SumsByName, shared: None
    ) -> dict[str, Array]:
        found = token_metrics(sums["next"], tokens, text_bytes, sums, None)
        return found | {name: sums[name] / tokens for name in names}

    return Objective(loss, count_tokens, metrics, ("next", *names))
