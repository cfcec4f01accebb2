"""Next-token prediction, for pretraining and for the answers of conversations."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from flax import nnx
from jaxtyping import Array, Float

from jaxtrain import parallel
from jaxtrain.model import Forward, Pipelined, Transformer
from jaxtrain.model.rope import Divisors
from jaxtrain.objectives.base import DeviceBatch, LossOptions, Objective, SumsByName
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params

PLAIN = LossOptions()


class NextTokenConfig(Settings):
    """Next-token prediction, for pretraining and for supervised fine-tuning on conversations."""

    name: Literal["next_token"] = "next_token"


def make_next_token(c: NextTokenConfig | None = None, options: LossOptions = PLAIN) -> Objective:
    """Make the objective: the mean negative log-likelihood of the next token, in nats."""

    def loss(
        graphdef: nnx.GraphDef,
        params: Params,
        batch: DeviceBatch,
        shared: None,
        **step: Array | None,
    ) -> tuple[Array, SumsByName]:
        return next_token_loss(graphdef, params, batch, options, step.get("key")), {}

    return Objective(loss, count_tokens, token_metrics)


class Hidden(NamedTuple):
    """The model's last hidden states and their labels, both sharded along the context axis."""

    model: Transformer
    x_BTD: Array
    targets_BT: Array
    weights_BT: Array
    balance_loss: Array | float  # sum over rows of the experts' balance loss x the row's labels


def hidden_states(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: DeviceBatch,
    options: LossOptions = PLAIN,
    key: Array | None = None,
) -> Hidden:
    """Run the model. Microbatches [M, B, T] go through the mesh's pipeline together.

    key: a PRNG key for random layers such as stochastic depth.
    """
    model: Transformer = nnx.merge(graphdef, params)
    texts = batch.tokens_BT, batch.positions_BT, batch.segments_BT
    mode = Forward(key, zigzag=True)
    if batch.tokens_BT.ndim == 3:
        mode = Pipelined(options.pipeline_repeats)
    out = model(*texts, mode)
    balance = 0.0
    if out.balance_B is not None:
        balance = jnp.sum(out.balance_B * jnp.sum(batch.weights_BT, axis=-1))
    labels = sharded_labels(batch.targets_BT, batch.weights_BT)
    return Hidden(model, out.states, *labels, balance)


def sharded_labels(targets_BT: Array, weights_BT: Array) -> tuple[Array, Array]:
    """Shard labels [B, T] or [M, B, T] along T in zigzag order, like the hidden states."""
    labels = targets_BT, weights_BT
    shard = parallel.zigzag_shard
    return jax.vmap(shard)(labels) if targets_BT.ndim == 3 else shard(labels)


def head_loss(h: Hidden, targets_BT: Array, weights_BT: Array, options: LossOptions) -> Array:
    """Return the sum over tokens of weight x negative log-likelihood of the target, in float32."""
    return parallel.linear_cross_entropy(
        h.x_BTD,
        h.model.head_DV().astype(h.x_BTD.dtype),
        targets_BT,
        weights_BT,
        softcap=h.model.config.logit_softcap,
        valid_vocab=h.model.vocab_size,
        z_loss=options.z_loss,
        implementation=options.head or h.model.config.kernels.loss,
    )


def next_token_loss(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: DeviceBatch,
    options: LossOptions = PLAIN,
    key: Array | None = None,
) -> Float[Array, ""]:
    """Return the sum over tokens of weight x negative log-likelihood, in nats, float32.

    Mixture-of-experts models add each row's balance loss times the row's labels.
    """
    if batch.tokens_BT.ndim == 3 and options.pipeline_schedule == "1f1b":
        return pipelined_loss(graphdef, params, batch, options)
    h = hidden_states(graphdef, params, batch, options, key)
    loss = head_loss(h, h.targets_BT, h.weights_BT, options)
    return loss if isinstance(h.balance_loss, float) else loss + h.balance_loss


def pipelined_loss(
    graphdef: nnx.GraphDef, params: Params, batch: DeviceBatch, options: LossOptions
) -> Float[Array, ""]:
    """Return `next_token_loss` of microbatches [M, B, T], computed inside the 1F1B pipeline."""

    def loss(model: Transformer, x_BTD: Array, labels: tuple[Array, Array]) -> Array:
        return head_loss(Hidden(model, x_BTD, *labels, 0.0), *labels, options)

    texts = batch.tokens_BT, batch.positions_BT, batch.segments_BT
    labels = sharded_labels(batch.targets_BT, batch.weights_BT)
    return nnx.merge(graphdef, params).pipelined_loss(*texts, labels, loss)


def count_tokens(batch: DeviceBatch, bytes_V: Array) -> tuple[Array, Array]:
    """Count a batch's labels and the bytes of text that they encode (both weighted, float32)."""
    return jnp.sum(batch.weights_BT), jnp.sum(bytes_V[batch.targets_BT] * batch.weights_BT)


def token_metrics(
    loss: Array, tokens: Array, text_bytes: Array, sums: SumsByName, shared: None
) -> dict[str, Array]:
    """Return the mean loss in nats per token, and bits per byte of text."""
    return {"loss": loss / tokens, "bpb": loss / (jnp.log(2.0) * text_bytes)}


NEXT_TOKEN = make_next_token()


# ---- evaluation ------------------------------------------------------------------------------


class EvaluationSums(NamedTuple):
    """Totals over tokens. Ratios are taken once, at the end, never as a mean of means."""

    loss: Array  # nats
    weight: Array  # sum of the labels' weights
    nats: Array  # nats of labels that encode text
    text_bytes: Array  # UTF-8 bytes of those labels


def evaluation_sums(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: DeviceBatch,
    bytes_V: Array,
    rope: Divisors | None = None,
) -> EvaluationSums:
    """Compute the evaluation sums of a batch. Special tokens count in `loss`, not in bits per byte.

    rope: overrides `model.rope_scaling`.
    """
    model: Transformer = nnx.merge(graphdef, params)
    texts = batch.tokens_BT, batch.positions_BT, batch.segments_BT
    x_BTD = model(*texts, Forward(zigzag=True, rope=rope)).states
    targets_BT, weights_BT = parallel.zigzag_shard((batch.targets_BT, batch.weights_BT))
    nll_N = kernels.linear_cross_entropy_per_token(
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        model.head_DV().astype(x_BTD.dtype),
        targets_BT.reshape(-1),
        softcap=model.config.logit_softcap,
        valid_vocab=model.vocab_size,
    )
    weights_N, bytes_N = weights_BT.reshape(-1), bytes_V[targets_BT.reshape(-1)]
    text_N = weights_N * (bytes_N > 0)
    return EvaluationSums(
        jnp.sum(nll_N * weights_N), jnp.sum(weights_N), jnp.sum(nll_N * text_N),
        jnp.sum(bytes_N * text_N),
    )  # fmt: skip


def zero_sums() -> EvaluationSums:
    return EvaluationSums(*(jnp.zeros((), jnp.float32) for _ in EvaluationSums._fields))


def add_sums(a: EvaluationSums, b: EvaluationSums) -> EvaluationSums:
    return jax.tree.map(jnp.add, a, b)
