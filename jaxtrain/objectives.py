"""What is minimised: (model, params, batch) -> sum of token losses, and what it was summed over."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from flax import nnx
from jaxtyping import Array, Float

from jaxtrain import parallel
from jaxtrain.model import Transformer


class Sums(NamedTuple):
    """Totals over tokens; ratios are taken once, at the end, never a mean of means."""

    loss: Array  # nats
    weight: Array  # labels that count
    nats: Array  # nats of labels that stand for text
    text_bytes: Array  # UTF-8 bytes of those labels


def next_token(
    graphdef: Any,
    params: Any,
    batch: Any,
    *,
    z_loss: float = 0.0,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Sum over tokens of weight x negative log-likelihood of the next token, in float32.

    Microbatches [M, B, T] go through the mesh's pipeline together.
    implementation: of the head and loss (`jaxtrain_kernels.linear_cross_entropy`). Experts add
    their rows' balance losses, each times the row's labels.
    """
    model = nnx.merge(graphdef, params)
    texts = batch.tokens_BT, batch.positions_BT, batch.segments_BT
    labels, balance_B = (batch.targets_BT, batch.weights_BT), None
    if batch.tokens_BT.ndim == 3:
        x_BTD, labels = model.hidden_staged(*texts), jax.vmap(parallel.spread)(labels)
    else:
        (x_BTD, balance_B), labels = model.hidden_spread(*texts), parallel.spread(labels)
    loss = parallel.linear_cross_entropy(
        x_BTD,
        model.head_DV().astype(x_BTD.dtype),
        *labels,
        softcap=model.config.softcap,
        valid_vocab=model.vocab_size,
        z_loss=z_loss,
        implementation=implementation or model.config.rows.loss,
    )
    return loss if balance_B is None else loss + balance_B @ jnp.sum(batch.weights_BT, axis=1)


def count(batch: Any, bytes_V: Array) -> tuple[Array, Array]:
    """Labels of a batch, and the bytes of text that they stand for (both weighted, float32)."""
    return jnp.sum(batch.weights_BT), jnp.sum(bytes_V[batch.targets_BT] * batch.weights_BT)


def score(graphdef: Any, params: Any, batch: Any, bytes_V: Array) -> Sums:
    """Evaluation sums of a batch. Special tokens count in `loss`, not in bits per byte."""
    model: Transformer = nnx.merge(graphdef, params)
    x_BTD, _ = model.hidden_spread(batch.tokens_BT, batch.positions_BT, batch.segments_BT)
    targets_BT, weights_BT = parallel.spread((batch.targets_BT, batch.weights_BT))
    nll_N = kernels.linear_cross_entropy_per_token(
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        model.head_DV().astype(x_BTD.dtype),
        targets_BT.reshape(-1),
        softcap=model.config.softcap,
        valid_vocab=model.vocab_size,
    )
    weights_N, bytes_N = weights_BT.reshape(-1), bytes_V[targets_BT.reshape(-1)]
    text_N = weights_N * (bytes_N > 0)
    return Sums(
        jnp.sum(nll_N * weights_N), jnp.sum(weights_N), jnp.sum(nll_N * text_N),
        jnp.sum(bytes_N * text_N),
    )  # fmt: skip


def zero_sums() -> Sums:
    return Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields))


def add(a: Sums, b: Sums) -> Sums:
    return jax.tree.map(jnp.add, a, b)
