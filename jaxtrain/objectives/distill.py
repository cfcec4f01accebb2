"""Distillation (Hinton et al. 2015, arXiv:1503.02531): a student learns a teacher's distribution.

A token's loss is weight x cross-entropy of the label + (1 - weight) x temperature^2 x divergence.
Both distributions are softmax(logits / temperature); temperature^2 keeps the gradient's magnitude.
The divergence is forward KL (Hinton), reverse KL (MiniLLM, Gu et al. 2023, arXiv:2306.08543) or
Jensen-Shannon (GKD, Agarwal et al. 2023, arXiv:2306.13649, at beta 1/2). Logits of teacher and
student are computed for one chunk of tokens at a time, in the forward and the backward pass.
"""

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer
from pydantic import Field

from jaxtrain.objectives.base import DeviceBatch, LossOptions, Objective, SumsByName
from jaxtrain.objectives.next_token import (
    Hidden,
    count_tokens,
    head_loss,
    hidden_states,
    token_metrics,
)
from jaxtrain.parallel.axes import current_mesh, partition_spec, shard_map
from jaxtrain.settings import Settings
from jaxtrain.weights.params import Params

CHUNK_LOGITS = 2**22  # logits of one model that a device holds at a time
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


class DistillConfig(Settings):
    """Knowledge distillation: learns a frozen teacher's distribution, and optionally the labels."""

    name: Literal["distill"] = "distill"
    teacher: str = Field(
        description="run directory or model folder of the teacher, with the same tokenizer; its "
        "depth and width may differ"
    )
    divergence: Divergence = Field(
        "forward_kl",
        description="divergence from the teacher; forward_kl: KL(teacher || student), reverse_kl: "
        "KL(student || teacher), jsd: Jensen-Shannon divergence",
    )
    temperature: float = Field(
        1.0, gt=0, description="softmax temperature of both models in the divergence"
    )
    weight: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="weight of the labels' loss; the divergence has the rest, 1 - weight",
    )
    cache: str | None = Field(
        None,
        description="folder of the teacher's top probabilities per token, written by `jaxtrain "
        "prepare` and used instead of the teacher. Default none: the teacher runs in each step",
    )
    top_k: int = Field(
        64,
        ge=1,
        description="teacher probabilities per token in the cache; all others are stored as their "
        "sum",
    )


class Teacher(NamedTuple):
    """A teacher's hidden states for a batch, and the head that turns them into logits."""

    states_BTE: Array  # [A, B, T, E] of A microbatches
    head_EV: Array | None  # None in a microbatch: `Objective.share` returns it
    softcap: Array | None = None  # [], of the logits


class CachedTeacher(NamedTuple):
    """A cached teacher: the k most probable tokens and their log-probs. The last log-prob is that
    of all other tokens together. All are at the temperature of the divergence."""

    ids_BTk: Array
    logp_BTj: Array  # j = k + 1


class TaughtBatch(NamedTuple):
    """A batch with its teacher's states or cached log-probs."""

    tokens_BT: Array
    targets_BT: Array
    weights_BT: Array
    segments_BT: Array | None
    positions_BT: Array | None
    teacher: Teacher | CachedTeacher


@runtime_checkable
class MaybeTaught(DeviceBatch, Protocol):
    """A `TaughtBatch`, or the batch of a dry run, which has no teacher."""


def divergences(
    kind: Divergence, teacher_NV: Float[Array, "N V"], student_NV: Float[Array, "N V"]
) -> Float[Array, "N"]:
    """Return each token's divergence in nats, from log-probs of teacher and student, float32."""

    def kl(log_p: Array, log_q: Array) -> Array:
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)

    if kind == "forward_kl":
        return kl(teacher_NV, student_NV)
    if kind == "reverse_kl":
        return kl(student_NV, teacher_NV)
    middle_NV = jnp.logaddexp(teacher_NV, student_NV) - jnp.log(2.0)
    return 0.5 * (kl(teacher_NV, middle_NV) + kl(student_NV, middle_NV))


def logits_of(x_ND: Array, w_DV: Array, softcap: Array | float | None, vocab: int) -> Array:
    """Return float32 logits [N, vocab], without the head's padding columns."""
    logits_NV = jnp.matmul(x_ND, w_DV[:, :vocab], preferred_element_type=jnp.float32)
    return logits_NV if softcap is None else softcap * jnp.tanh(logits_NV / softcap)


def top_and_rest(
    logp_NV: Float[Array, "N V"], ids_Nk: Integer[Array, "N k"]
) -> Float[Array, "N j"]:
    """Return log-probs of the k given tokens, and last of all other tokens together (j = k + 1)."""
    ids_Nk = ids_Nk.astype(jnp.int32)
    top_Nk = jnp.take_along_axis(logp_NV, ids_Nk, axis=-1)
    rest_NV = logp_NV.at[jnp.arange(len(ids_Nk))[:, None], ids_Nk].set(-jnp.inf)
    return jnp.concatenate([top_Nk, jax.nn.logsumexp(rest_NV, axis=-1)[:, None]], axis=-1)


def distill_losses(
    c: DistillConfig, options: LossOptions, h: Hidden, teacher: Teacher | CachedTeacher
) -> tuple[Float[Array, "B T"], ...]:
    """Return (label loss, temperature^2 x divergence) of each token in nats, computed in chunks.

    With a cache, the divergence is over k + 1 outcomes: its k tokens, and all others together. It
    is a lower bound on the divergence over the vocabulary.
    """
    vocab, cap = h.model.vocab_size, h.model.config.logit_softcap

    def both(
        student: Array, y: Array, head_EV: Array | None = None, softcap: Array | None = None
    ) -> tuple[Array, Array]:
        logp = jax.nn.log_softmax(student / c.temperature)
        if isinstance(teacher, CachedTeacher):
            k = teacher.ids_BTk.shape[-1]
            cached = jax.nn.log_softmax(y[:, k:])  # renormalized: they were rounded to 16 bits
            return cached, top_and_rest(logp, y[:, :k].astype(jnp.int32))
        assert head_EV is not None
        taught = jax.lax.stop_gradient(logits_of(y, head_EV, softcap, vocab))
        return jax.nn.log_softmax(taught / c.temperature), logp

    @jax.checkpoint
    def chunk(
        x: Array, w: Array, labels: Array, y: Array, *shared: Array | None
    ) -> tuple[Array, Array]:
        student = logits_of(x, w.astype(x.dtype), cap, vocab)
        logZ = jax.nn.logsumexp(student, axis=-1)
        label = jnp.take_along_axis(student, labels[:, None], axis=-1)[:, 0]
        hard = logZ - label + options.z_loss * jnp.square(logZ)
        soft = divergences(c.divergence, *both(student, y, *shared))
        return hard, c.temperature**2 * soft

    def local(
        x: Array, w: Array, labels: Array, y: Array, *shared: Array | None
    ) -> tuple[Array, ...]:
        size = min(labels.size, max(8, CHUNK_LOGITS // vocab))

        def chunks(a: Array, *dims: int) -> Array:
            a = a.reshape(labels.size, *dims)
            a = jnp.pad(a, [(0, -len(a) % size), *((0, 0) for _ in dims)])
            return a.reshape(-1, size, *dims)

        xs = chunks(x, x.shape[-1]), chunks(labels), chunks(y, y.shape[-1])
        found = jax.lax.map(lambda a: chunk(a[0], w, a[1], a[2], *shared), xs)
        return tuple(a.reshape(-1)[: labels.size].reshape(labels.shape) for a in found)

    # The head is float32 outside of the chunks, so that its gradient is accumulated in float32.
    head_DV = h.model.head_DV().astype(jnp.float32)
    own, shared = taught_arrays(teacher)
    arrays = h.x_BTD, head_DV, h.targets_BT, own, *shared
    mesh = current_mesh()
    if mesh is None:
        return local(*arrays)
    rows = partition_spec(("batch", "sequence"), h.targets_BT.shape, mesh)
    wide = P(*rows, None)
    return shard_map(local, (wide, P(), rows, wide, *(P() for _ in shared)), (rows, rows))(*arrays)


def taught_arrays(teacher: Teacher | CachedTeacher) -> tuple[Array, tuple[Array | None, ...]]:
    """Return (arrays [B, T, ...] per token, arrays that all tokens share). A cache's ids and
    log-probs are concatenated in float32, which is exact for ids up to 2^24."""
    if isinstance(teacher, Teacher):
        return teacher.states_BTE, (teacher.head_EV, teacher.softcap)
    parts = (x.astype(jnp.float32) for x in teacher)
    return jnp.concatenate(list(parts), axis=-1), ()


def make_distill(c: DistillConfig, options: LossOptions) -> Objective:
    """Make the distillation objective. `loss` and `bpb` log the label loss, comparable with other
    runs; `loss_distill` logs the divergence."""

    def loss(
        graphdef: nnx.GraphDef,
        params: Params,
        batch: MaybeTaught,
        shared: tuple[Array, Array | None] | None,
        **step: Array | None,
    ) -> tuple[Array, SumsByName]:
        h = hidden_states(graphdef, params, batch, options, step.get("key"))
        given = batch.teacher if isinstance(batch, TaughtBatch) else None
        if given is None or (isinstance(given, Teacher) and shared is None):
            hard = head_loss(h, h.targets_BT, h.weights_BT, options)
            return hard + h.balance_loss, {"labels": hard, "divergence": jnp.zeros(())}
        teacher = given
        if isinstance(given, Teacher) and shared is not None:
            teacher = Teacher(given.states_BTE, *shared)
        sums = [jnp.sum(h.weights_BT * a) for a in distill_losses(c, options, h, teacher)]
        total = c.weight * sums[0] + (1 - c.weight) * sums[1] + h.balance_loss
        return total, dict(zip(("labels", "divergence"), jax.lax.stop_gradient(sums)))

    def share(
        graphdef: nnx.GraphDef, params: Params, batch: MaybeTaught
    ) -> tuple[Array | None, Array | None] | None:
        if not isinstance(batch, TaughtBatch) or not isinstance(batch.teacher, Teacher):
            return None
        return batch.teacher.head_EV, batch.teacher.softcap

    def without_head(batch: MaybeTaught) -> MaybeTaught:
        if not isinstance(batch, TaughtBatch) or isinstance(batch.teacher, CachedTeacher):
            return batch
        return batch._replace(teacher=batch.teacher._replace(head_EV=None, softcap=None))

    def metrics(
        loss: Array, tokens: Array, text_bytes: Array, sums: SumsByName, shared: object
    ) -> dict[str, Array]:
        found = token_metrics(sums["labels"], tokens, text_bytes, sums, None)
        return found | {"loss_distill": sums["divergence"] / tokens}

    names = ("labels", "divergence")
    return Objective(loss, count_tokens, metrics, names, share, microbatches=without_head)
