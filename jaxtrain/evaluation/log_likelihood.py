"""Log-likelihoods of many token sequences: packed rows in, a few numbers a sequence out.

One compiled program, or two where sequences share beginnings, serves all lengths up to the context;
twice, four times, ... the context have their own. The head is
applied to the places that are asked for, some at a time, never to whole rows.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config.resolve import Resolved
from jaxtrain.data import Scored
from jaxtrain.data.evaluation.branches import BRANCH_SHARE, BranchBatch, RowShape, pack_branches
from jaxtrain.model import Forward, cast
from jaxtrain.model.branches import Branches
from jaxtrain.model.config import check_decoder
from jaxtrain.parallel import make_mesh, place_batch
from jaxtrain.parallel.mesh import num_batch_shards, process_batch_shard
from jaxtrain.runs.saved import Saved, place_params
from jaxtrain.weights.params import Params

# Fields of a saved model's configuration that a command line may change, of those read here.
FIELDS = (
    "eval.batch_size",
    "mesh",
    "train.precision",
    "train.device_batch_size",
    "model.context_length",
)
AHEAD = 8  # batches that the device is given before the first one's numbers are waited for
HEAD_ROWS = 1024  # places a device computes logits of at a time


class ShardedModel(NamedTuple):
    """A model on its devices, and what it is given at once."""

    mesh: Mesh
    params: Any
    shape: RowShape
    chunk: int  # places of a row whose logits are computed at a time


class Scorer(NamedTuple):
    """A model on its devices, ready to score."""

    score: Callable[[BranchBatch], tuple[Any, Any]]  # nll and greedy, [B, M], still on the device
    shape: RowShape
    context: int  # tokens that the model was trained on at a time


class Scores(NamedTuple):
    """Numbers of all sequences of a job, and how its questions divide them."""

    nll: np.ndarray  # float64 [N], nats of all scored tokens
    greedy: np.ndarray  # bool [N], whether each of them is the likeliest
    tokens: np.ndarray  # int64 [N], how many they are
    sizes: list[int]  # sequences of each question


def shard_model(saved: Saved, config: Resolved, most_rows: int | None = None) -> ShardedModel:
    """Put a saved model on the mesh of `config`, which also says how many rows go at once.

    most_rows: fewer, for a few questions.
    """
    check_decoder(saved.config.model)
    mesh = make_mesh(config.mesh)
    shards = num_batch_shards(mesh)
    rows = config.eval.batch_size or config.train.device_batch_size * shards
    rows = min(rows, most_rows or rows)
    context = config.model.context_length
    shape = RowShape(-(-rows // shards) * shards, context, context // BRANCH_SHARE, shards)
    dtype = compute_dtype(config.train.precision)
    chunk = max(1, min(context // 16, HEAD_ROWS * shards // shape.rows))
    with jax.set_mesh(mesh):
        params = place_params(saved, mesh)
        params = jax.jit(lambda p: cast(p, saved.specs, dtype))(params)
    return ShardedModel(mesh, params, shape, chunk)


def make_scorer(saved: Saved, config: Resolved, most_rows: int | None = None) -> Scorer:
    """A saved model, ready to score; the arguments are those of `shard_model`."""
    mesh, params, shape, chunk = shard_model(saved, config, most_rows)
    share, shares = process_batch_shard(mesh)
    program = jax.jit(
        lambda params, rows, chunks: score_rows(saved.graphdef, params, rows, chunks, chunk),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )

    def score(rows: BranchBatch) -> tuple[Any, Any]:
        mine = len(rows.tokens_BT) // shares  # of this process
        part = slice(share * mine, (share + 1) * mine)
        chunks = -(-int((rows.labels_BM >= 0).sum(1).max()) // chunk)
        with jax.set_mesh(mesh):
            placed = place_batch(BranchBatch(*(x[part] for x in rows)), mesh)
            return program(params, placed, np.int32(chunks))

    return Scorer(score, shape, shape.trunk)


def score_rows(
    graphdef: nnx.GraphDef,
    params: Params,
    rows: PyTree,
    chunks: jax.Array | int,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """(nll_BM in float32, greedy_BM) of the labels of a `BranchBatch`; 0 beyond chunks * chunk.

    In texts longer than the context no layer looks back further than that, as in nanochat's GPT.
    """
    model = nnx.merge(graphdef, params)
    context = model.config.context_length
    if rows.tokens_BT.shape[1] - rows.parents_BR.shape[1] > context:
        model.plan = tuple(replace(s, window=s.window or context) for s in model.plan)
    branches = None
    if rows.parents_BR.shape[1]:
        branches = Branches(rows.parents_BR, rows.before_BR, rows.positions_BT)
    mode = Forward(document_mask=True, branches=branches)
    x_BTD = model(rows.tokens_BT, rows.positions_BT, rows.segments_BT, mode).states
    B, _, D = x_BTD.shape

    def add(i, out):
        at = lambda y_BM: jax.lax.dynamic_slice_in_dim(y_BM, i * chunk, chunk, 1)
        places_Bm1, labels_B = at(rows.places_BM)[..., None], at(rows.labels_BM).reshape(-1)
        x_BmD = jnp.take_along_axis(x_BTD, places_Bm1, axis=1)
        logits_NV = model.logits(x_BmD.reshape(B * chunk, D))
        label_N = jnp.take_along_axis(logits_NV, jnp.maximum(labels_B, 0)[:, None], axis=1)[:, 0]
        nll_N = jax.nn.logsumexp(logits_NV, axis=1) - label_N
        new = nll_N, jnp.argmax(logits_NV, axis=1) == labels_B
        put = lambda y, z: jax.lax.dynamic_update_slice_in_dim(y, z.reshape(B, -1), i * chunk, 1)
        return jax.tree.map(put, out, new)

    shape = rows.labels_BM.shape
    return jax.lax.fori_loop(0, chunks, add, (jnp.zeros(shape), jnp.zeros(shape, bool)))


def scores(
    scorer: Scorer,
    jobs: Iterable[Iterable[Sequence[Scored]]],
    progress: Callable[[int], None] = lambda questions: None,
) -> Iterator[Scores]:
    """The numbers of each job in turn. A job is questions, a question is sequences.

    What sequences of a question begin with is computed once. While the device works, the host
    reads ahead, into the next job too. progress: is told of questions that went to the device.
    """
    pending: deque[tuple[ScoringJob, np.ndarray | None, Any]] = deque()
    for questions in jobs:
        job = ScoringJob()
        for rows, owners_BM in pack_branches(job.counted(questions, progress), scorer.shape):
            pending.append((job, owners_BM, scorer.score(rows)))
            while len(pending) > AHEAD:
                yield from collect(*pending.popleft())
        pending.append((job, None, None))
    while pending:
        yield from collect(*pending.popleft())


class ScoringJob:
    """The numbers of a job while they come in."""

    def __init__(self):
        self.sizes: list[int] = []
        self.lengths: list[int] = []
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def counted(
        self, questions: Iterable[Sequence[Scored]], progress: Callable[[int], None]
    ) -> Iterator[Sequence[Scored]]:
        for question in questions:
            self.sizes.append(len(question))
            self.lengths += [len(scored.tokens) - scored.start for scored in question]
            progress(1)
            yield question

    def finished(self) -> Scores:
        owners, nll, greedy = map(np.concatenate, zip(*self.parts)) if self.parts else ([],) * 3
        count = len(self.lengths)
        sums = np.bincount(owners, weights=nll, minlength=count)
        misses = np.bincount(owners, weights=~np.asarray(greedy, bool), minlength=count)
        return Scores(sums, misses == 0, np.array(self.lengths, np.int64), self.sizes)


def collect(job: ScoringJob, owners_BM: np.ndarray | None, out: PyTree) -> Iterator[Scores]:
    """Wait for a batch's numbers; behind its last batch, the job's."""
    if owners_BM is None:
        yield job.finished()
        return
    nll_BM, greedy_BM = jax.device_get(out)
    real = owners_BM >= 0
    job.parts.append((owners_BM[real], nll_BM[real], greedy_BM[real]))
