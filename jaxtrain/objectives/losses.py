"""What is minimised: (model, params, batch) -> sum of losses, and what it was summed over."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from flax import nnx
from jaxtyping import Array, Float

from jaxtrain import parallel
from jaxtrain.data.preference.preferences import WANTED
from jaxtrain.model import Transformer
from jaxtrain.objectives.preference import LOSSES, Answers, reference_point


class Sums(NamedTuple):
    """Totals over tokens; ratios are taken once, at the end, never a mean of means."""

    loss: Array  # nats
    weight: Array  # labels that count
    nats: Array  # nats of labels that stand for text
    text_bytes: Array  # UTF-8 bytes of those labels


class Objective(NamedTuple):
    """What a step minimises: sums over microbatches, divided once by what was counted."""

    # (graphdef, params, microbatch, shared, **options) -> the loss's sum, other sums
    loss: Callable[..., tuple[Array, dict[str, Array]]]
    count: Callable[[Any, Array], tuple[Array, Array]]  # (batch, bytes_V) -> count, bytes of text
    # (loss's sum, count, bytes of text, other sums, shared) -> metrics
    figures: Callable[..., dict[str, Array]]
    sums: tuple[str, ...] = ()  # names of the other sums
    # (graphdef, params, batch) -> what the losses of all microbatches read
    share: Callable[[Any, Any, Any], Any] = lambda graphdef, params, batch: None


def make_objective(c: Any) -> Objective:
    """The objective of that configuration."""
    if c.name == "next_token":
        return NEXT_TOKEN
    share = {"share": other_answers} if c.name == "kto" else {}
    return Objective(functools.partial(preference, c), count_pairs, pair_figures, SUMS, **share)


# ---- the next token --------------------------------------------------------------------------


def next_token(
    graphdef: Any,
    params: Any,
    batch: Any,
    *,
    z_loss: float = 0.0,
    implementation: str | None = None,
    repeats: int = 1,
) -> Float[Array, ""]:
    """Sum over tokens of weight x negative log-likelihood of the next token, in float32.

    Microbatches [M, B, T] go through the mesh's pipeline together, `repeats` times each.
    implementation: of the head and loss (`jaxtrain_kernels.linear_cross_entropy`). Experts add
    their rows' balance losses, each times the row's labels.
    """
    model = nnx.merge(graphdef, params)
    texts = batch.tokens_BT, batch.positions_BT, batch.segments_BT
    labels, balance_B = (batch.targets_BT, batch.weights_BT), None
    if batch.tokens_BT.ndim == 3:
        x_BTD, balance_B = model.hidden_pipelined(*texts, repeats=repeats)
        labels = jax.vmap(parallel.zigzag_shard)(labels)
    else:
        (x_BTD, balance_B), labels = model.hidden_sharded(*texts), parallel.zigzag_shard(labels)
    loss = parallel.linear_cross_entropy(
        x_BTD,
        model.head_DV().astype(x_BTD.dtype),
        *labels,
        softcap=model.config.logit_softcap,
        valid_vocab=model.vocab_size,
        z_loss=z_loss,
        implementation=implementation or model.config.kernels.loss,
    )
    if balance_B is None:
        return loss
    return loss + jnp.sum(balance_B * jnp.sum(batch.weights_BT, axis=-1))


def count(batch: Any, bytes_V: Array) -> tuple[Array, Array]:
    """Labels of a batch, and the bytes of text that they stand for (both weighted, float32)."""
    return jnp.sum(batch.weights_BT), jnp.sum(bytes_V[batch.targets_BT] * batch.weights_BT)


def token_figures(
    loss: Array, tokens: Array, text_bytes: Array, sums: dict[str, Array], shared: None
) -> dict[str, Array]:
    return {"loss": loss / tokens, "bpb": loss / (jnp.log(2.0) * text_bytes)}


NEXT_TOKEN = Objective(
    lambda graphdef, params, batch, shared, **options: (
        next_token(graphdef, params, batch, **options), {},
    ),
    count,
    token_figures,
)  # fmt: skip


def score(graphdef: Any, params: Any, batch: Any, bytes_V: Array) -> Sums:
    """Evaluation sums of a batch. Special tokens count in `loss`, not in bits per byte."""
    model: Transformer = nnx.merge(graphdef, params)
    x_BTD, _ = model.hidden_sharded(batch.tokens_BT, batch.positions_BT, batch.segments_BT)
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
    return Sums(
        jnp.sum(nll_N * weights_N), jnp.sum(weights_N), jnp.sum(nll_N * text_N),
        jnp.sum(bytes_N * text_N),
    )  # fmt: skip


def zero_sums() -> Sums:
    return Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields))


def add(a: Sums, b: Sums) -> Sums:
    return jax.tree.map(jnp.add, a, b)


# ---- preferences -----------------------------------------------------------------------------


SUMS = (
    "chosen", "rejected", "right", "reward_chosen", "reward_rejected", "logp_chosen",
    "logp_rejected",
)  # fmt: skip


def answer_logps(
    graphdef: Any, params: Any, batch: Any
) -> tuple[Float[Array, "B P 2"], Float[Array, "B P 2"]]:
    """Log-probs of the two answers of each pair of a `data.PairBatch`, and their tokens."""
    model: Transformer = nnx.merge(graphdef, params)
    x_BTD, _ = model.hidden_sharded(batch.tokens_BT, batch.positions_BT, batch.segments_BT)
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
    # A reduction, not a scatter: its order, and so its rounding, is the same in every run.
    own_BTS = segments_BT[:, :, None] == jnp.arange(1, 2 * shape[1] + 1)[None, None]
    total = lambda x_BT: jnp.sum(jnp.where(own_BTS, x_BT[:, :, None], 0), axis=1).reshape(shape)
    return total(-nll_BT * weights_BT), total(weights_BT)


def answers_of(graphdef: Any, params: Any, batch: Any) -> Answers:
    logp_BP2, tokens_BP2 = answer_logps(graphdef, params, batch)
    wanted_BP = batch.notes_BP == WANTED
    return Answers(logp_BP2, batch.references_BP2, jnp.maximum(tokens_BP2, 1), wanted_BP)


def preference(
    c: Any, graphdef: Any, params: Any, batch: Any, divergence: Array | None, **options: Any
) -> tuple[Array, dict[str, Array]]:
    """Sum over pairs of the loss of that configuration, and the sums of the usual figures.

    Of judged answers (KTO) the wanted ones count as chosen, the others as rejected; right is one
    whose reward is on its side of the reference point.
    """
    there_BP = (batch.notes_BP >= 0).astype(jnp.float32)
    a = answers_of(graphdef, params, batch)
    loss_BP, reward_BP2 = LOSSES[c.name](c, a, divergence)
    logps, rewards = (jnp.moveaxis(x, -1, 0) for x in (a.logp_N2, reward_BP2))
    chosen_BP = rejected_BP = there_BP
    if c.name == "kto":
        chosen_BP, rejected_BP = there_BP * a.wanted_N, there_BP * ~a.wanted_N
        logps, rewards = (logps[0], logps[0]), (rewards[0], rewards[0])
        right_BP = (rewards[0] > c.beta * divergence) == a.wanted_N
    else:
        right_BP = rewards[0] > rewards[1]
    sums = (
        chosen_BP, rejected_BP, right_BP * there_BP,
        rewards[0] * chosen_BP, rewards[1] * rejected_BP,
        logps[0] * chosen_BP, logps[1] * rejected_BP,
    )  # fmt: skip
    return jnp.sum(loss_BP * there_BP), dict(zip(SUMS, map(jnp.sum, sums)))


def other_answers(graphdef: Any, params: Any, batch: Any) -> Array:
    """KTO's reference point of a whole step, from the second answers of microbatches [A, B, T]."""

    def one(microbatch: Any) -> tuple[Array, Array]:
        a = answers_of(graphdef, params, microbatch)
        there_BP = (microbatch.notes_BP >= 0).astype(jnp.float32)
        ratio_BP = (a.logp_N2 - a.reference_N2)[..., 1]
        return jnp.sum(ratio_BP * there_BP), jnp.sum(there_BP)

    ratio_sum, answers = jax.tree.map(jnp.sum, jax.lax.map(one, batch))
    return reference_point(ratio_sum, answers)


def count_pairs(batch: Any, bytes_V: Array) -> tuple[Array, Array]:
    return jnp.sum(batch.notes_BP >= 0).astype(jnp.float32), jnp.zeros(())


def pair_figures(
    loss: Array, pairs: Array, text_bytes: Array, sums: dict[str, Array], divergence: Array | None
) -> dict[str, Array]:
    """Means over the pairs: rewards, how often the order is right, and log-probs of answers."""
    of = lambda name, part: sums[f"{name}_{part}"] / jnp.maximum(sums[part], 1)
    figures = {f"{n}_{p}": of(n, p) for n in ("reward", "logp") for p in ("chosen", "rejected")}
    figures["reward_margin"] = figures["reward_chosen"] - figures["reward_rejected"]
    figures |= {"accuracy": sums["right"] / pairs, "pairs": pairs}
    figures |= {} if divergence is None else {"divergence": divergence}
    return {"loss": loss / pairs} | figures
