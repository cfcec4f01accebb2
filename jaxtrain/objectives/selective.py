"""Selective language modeling (RHO-1, Lin et al. 2024, arXiv:2404.07965): train on selected tokens.

In each row, the share `keep` of tokens with the largest excess loss counts: the model's loss minus
that of a frozen reference. Without a reference, the loss itself ranks the tokens, as selective
backpropagation ranks examples (Jiang et al. 2019, arXiv:1910.00762; it samples, this takes the
top). Each row is ranked by itself, so that microbatches and devices do not change the result.
"""

from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float
from pydantic import Field

from jaxtrain import parallel
from jaxtrain.objectives.base import DeviceBatch, LossOptions, Objective, SumsByName
from jaxtrain.objectives.next_token import (
    head_loss,
    hidden_states,
    sharded_labels,
    token_metrics,
)
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params


class SelectiveConfig(Settings):
    """Selective language modelling (Rho-1): the loss counts only tokens with the most to learn."""

    name: Literal["selective"] = "selective"
    keep: float = Field(
        0.6, gt=0, le=1, description="fraction of a sequence's labels that count in the loss"
    )
    reference: str | None = Field(
        None,
        description="run directory or model folder of a reference model with the same tokenizer, "
        "whose loss is subtracted before tokens are ranked. Default none: the tokens with the "
        "largest loss count",
    )


@runtime_checkable
class ReferredBatch(DeviceBatch, Protocol):
    """A batch with the reference's loss of each label."""

    @property
    def reference_BT(self) -> Array | None: ...


def kept_labels(weights_BT: Array, keep: float) -> Array:
    """Count the labels of each row that are learned, [*B]: `keep` of them, rounded up."""
    labels_B = jnp.sum(weights_BT > 0, axis=-1)
    return jnp.ceil(keep * labels_B - 1e-4).astype(jnp.int32)


def selected(
    scores_BT: Float[Array, "*B T"], weights_BT: Float[Array, "*B T"], keep: float
) -> Bool[Array, "*B T"]:
    """Whether each label is among the `keep` share of its row with the largest scores."""
    scores_BT = jnp.where(weights_BT > 0, scores_BT, -jnp.inf)
    rank_BT = jnp.argsort(jnp.argsort(-scores_BT, axis=-1), axis=-1)
    return rank_BT < kept_labels(weights_BT, keep)[..., None]


def make_selective(c: SelectiveConfig, options: LossOptions) -> Objective:
    """Make the objective: the loss of the selected labels. `loss` and `bpb` log all labels, so that
    they compare with other runs."""

    def loss(
        graphdef: nnx.GraphDef,
        params: Params,
        batch: ReferredBatch,
        shared: None,
        **step: Array | None,
    ) -> tuple[Array, SumsByName]:
        h = hidden_states(graphdef, params, batch, options, step.get("key"))
        head_DV = h.model.head_DV().astype(h.x_BTD.dtype)
        nats_BT = parallel.token_losses(
            *jax.lax.stop_gradient((h.x_BTD, head_DV)),
            h.targets_BT,
            softcap=h.model.config.logit_softcap,
            valid_vocab=h.model.vocab_size,
        )
        excess_BT = nats_BT
        if batch.reference_BT is not None:
            excess_BT = nats_BT - sharded_labels(batch.targets_BT, batch.reference_BT)[1]
        chosen_BT = selected(excess_BT, h.weights_BT, c.keep)
        learned = head_loss(h, h.targets_BT, h.weights_BT * chosen_BT, options)
        sums = {"all": jnp.sum(h.weights_BT * nats_BT), "labels": jnp.sum(h.weights_BT)}
        return learned + c.keep * h.balance_loss, sums | {"selected": learned}

    def count(batch: ReferredBatch, bytes_V: Array) -> tuple[Array, Array]:
        kept = jnp.sum(kept_labels(batch.weights_BT, c.keep)).astype(jnp.float32)
        return kept, jnp.sum(bytes_V[batch.targets_BT] * batch.weights_BT)

    def metrics(
        loss: Array, kept: Array, text_bytes: Array, sums: SumsByName, shared: None
    ) -> dict[str, Array]:
        found = token_metrics(sums["all"], sums["labels"], text_bytes, sums, None)
        return found | {"loss_selected": sums["selected"] / kept}

    return Objective(loss, count, metrics, ("all", "labels", "selected"))
