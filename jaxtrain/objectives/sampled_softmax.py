"""Sampled softmax: training compares a target with a sample of the vocabulary, not with all of it.

Jean et al. 2014 (arXiv:1412.2007): Z is estimated from negative tokens drawn from Q, one sample per
microbatch. log(negatives x Q) is subtracted from a negative's logit, so that the estimate of Z is
unbiased. Only the head's columns of the negatives and of the targets are used. Evaluation uses the
full softmax.
"""

import math
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
    token_metrics,
)
from jaxtrain.objectives.prefix_token import label_logits
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params


class SampledSoftmaxConfig(Settings):
    """Next-token prediction with a softmax over a sample of the vocabulary."""

    name: Literal["sampled_softmax"] = "sampled_softmax"
    negatives: int = Field(
        4096, ge=1, description="negative tokens drawn per microbatch, with replacement"
    )
    proposal: Literal["log_uniform", "uniform"] = Field(
        "log_uniform",
        description="distribution of the negatives; log_uniform (Zipf): token k of V with "
        "probability log((k + 2) / (k + 1)) / log(V + 1), for ids in the order of merges or of "
        "frequency",
    )


def draw_negatives(
    c: SampledSoftmaxConfig, key: Array, vocab_size: int
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Draw token ids; also return the log of each one's expected count in the sample."""
    u_S = jax.random.uniform(key, (c.negatives,))
    if c.proposal == "uniform":
        ids_S = jnp.minimum((u_S * vocab_size).astype(jnp.int32), vocab_size - 1)
        return ids_S, jnp.full(c.negatives, math.log(c.negatives / vocab_size))
    whole = math.log(vocab_size + 1)
    ids_S = jnp.clip(jnp.exp(u_S * whole).astype(jnp.int32) - 1, 0, vocab_size - 1)
    share_S = jnp.log1p(1 / (ids_S + 1.0)) / whole
    return ids_S, jnp.log(c.negatives * share_S)


def make_sampled_softmax(c: SampledSoftmaxConfig, options: LossOptions) -> Objective:
    """Make the objective: next-token loss with an estimated Z. A step's `loss` and `bpb` use the
    estimate, too.

    Without a PRNG key the full softmax is used, as in evaluation.
    """

    def loss(
        graphdef: nnx.GraphDef,
        params: Params,
        batch: DeviceBatch,
        shared: None,
        **step: Array | None,
    ) -> tuple[Array, SumsByName]:
        key = step.get("key")
        h = hidden_states(graphdef, params, batch, options, key)
        if key is None:
            return head_loss(h, h.targets_BT, h.weights_BT, options) + h.balance_loss, {}
        ids_S, expected_S = draw_negatives(c, jax.random.fold_in(key, 0), h.model.vocab_size)
        columns_DS = h.model.head_DV().astype(h.x_BTD.dtype)[:, ids_S]
        logits_BTS = (h.x_BTD @ columns_DS).astype(jnp.float32)
        if cap := h.model.config.logit_softcap:
            logits_BTS = cap * jnp.tanh(logits_BTS / cap)
        front = (None,) * h.targets_BT.ndim
        hit_BTS = ids_S[front] == h.targets_BT[..., None]
        logits_BTS = jnp.where(hit_BTS, -jnp.inf, logits_BTS - expected_S[front])
        target_BT = label_logits(h, h.targets_BT)
        others_BT = jax.nn.logsumexp(logits_BTS, axis=-1)
        logZ_BT = jnp.logaddexp(target_BT, others_BT)
        losses_BT = logZ_BT - target_BT + options.z_loss * jnp.square(logZ_BT)
        return jnp.sum(h.weights_BT * losses_BT) + h.balance_loss, {}

    return Objective(loss, count_tokens, token_metrics, draws=True)
