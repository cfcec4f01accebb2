"""Log-likelihoods of many token sequences, which are packed into rows.

One compiled program serves all lengths up to the context, or two programs if sequences share
prefixes. Rows of two, four, ... times the context have their own. Programs compile in threads, in
parallel, while those that are ready score. Padding short texts into a longer program would save no
compile time and would change rounding. The head is applied only to the positions that are scored,
in chunks, never to whole rows.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config.resolve import Resolved, eval_batch_size
from jaxtrain.data import Scored
from jaxtrain.data.evaluation.branches import (
    BRANCH_SHARE,
    BranchBatch,
    RowShape,
    empty_batch,
    pack_branches,
)
from jaxtrain.inference.engine.compiler import Compiler
from jaxtrain.model import Forward, cast
from jaxtrain.model.branches import Branches
from jaxtrain.model.config import check_decoder
from jaxtrain.parallel import make_mesh, place_batch
from jaxtrain.parallel.mesh import num_batch_shards, process_batch_shard
from jaxtrain.runs.saved import Saved, place_params
from jaxtrain.weights.params import Params

# Fields of a saved model's configuration that are read here and a command line may change.
FIELDS = (
    "eval.batch_size",
    "mesh",
    "train.precision",
    "train.device_batch_size",
    "model.context_length",
)
AHEAD = 8  # batches queued on the device before the host waits for the first one's results
PENDING_BYTES = 1 << 28  # of batches on the host that wait for their programs
HEAD_ROWS = 1024  # positions whose logits a device computes at a time


class ShardedModel(NamedTuple):
    """A model on its devices, and the shape of its batches."""

    mesh: Mesh
    params: Any
    shape: RowShape
    chunk: int  # positions per row whose logits are computed at a time


class Scorer:
    """A model on its devices, ready to score batches of any `RowShape`."""

    def __init__(self, model: ShardedModel, program: jax.stages.Wrapped):
        """program: (params, rows, chunks) -> nll and greedy [B, M], of all processes."""
        self.model, self.program, self.shape = model, program, model.shape
        self.context = model.shape.trunk  # context length of the configuration, in tokens
        self.compiler = Compiler[RowShape](lambda: jax.set_mesh(model.mesh))

    def compile(self, shapes: Collection[RowShape]) -> list[Future[object]]:
        """Start compiling for batches of these shapes, in their order. Returns what was started.

        With several processes nothing is started, and each program is compiled when it is called:
        the processes time kernels for each other, so they must all compile the same program at a
        time. One process with several devices waits here: loading a program waits for running
        kernels, which may wait for kernels of another device that are queued after a load.
        """
        new = [shape for shape in shapes if shape not in self.compiler.coming]
        if jax.process_count() > 1 or not new:
            return []
        self.compiler.start(new[:1], new[1:], self.lower)
        if self.model.mesh.size > 1:
            for shape in new:
                self.compiler.settle(shape)
        return [self.compiler.coming[shape] for shape in new]

    def lower(self, shape: RowShape) -> jax.stages.Lowered:
        """Lowered program of a shape."""
        return self.program.lower(
            self.model.params, self.shard_batch(empty_batch(shape)), np.int32(0)
        )

    def shape_of(self, rows: BranchBatch) -> RowShape:
        """The shape of a batch; its branch is 0 if it has no branches."""
        (B, T), R = rows.tokens_BT.shape, rows.parents_BR.shape[1]
        return RowShape(B, T - R, R, self.shape.num_shards)

    def shard_batch(self, rows: BranchBatch) -> BranchBatch:
        """Put this process's shard of a batch on its devices. The mesh must be set."""
        share, shares = process_batch_shard(self.model.mesh)
        mine = len(rows.tokens_BT) // shares
        part = slice(share * mine, (share + 1) * mine)
        return place_batch(BranchBatch(*(x[part] for x in rows)), self.model.mesh)

    def score(self, rows: BranchBatch) -> tuple[jax.Array, jax.Array]:
        """nll and greedy [B, M], on the device. Waits for a program that is being compiled."""
        self.compiler.settle(self.shape_of(rows))
        chunks = -(-int((rows.labels_BM >= 0).sum(1).max()) // self.model.chunk)
        with jax.set_mesh(self.model.mesh):
            return self.program(self.model.params, self.shard_batch(rows), np.int32(chunks))


class Scores(NamedTuple):
    """Scores of all sequences of a job, and the sequences per question."""

    nll: np.ndarray  # float64 [N], negative log-likelihood in nats, sum of the scored tokens
    greedy: np.ndarray  # bool [N], whether each scored token is the likeliest
    tokens: np.ndarray  # int64 [N], number of scored tokens
    sizes: list[int]  # sequences of each question


def shard_model(saved: Saved, config: Resolved, most_rows: int | None = None) -> ShardedModel:
    """Put a saved model on the mesh of `config`, which also sets the rows per batch.

    most_rows: an upper limit of the rows, for a few questions.
    """
    check_decoder(saved.config.model)
    mesh = make_mesh(config.mesh)
    shards = num_batch_shards(mesh)
    rows = eval_batch_size(config, config.train.device_batch_size, shards)
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
    model = shard_model(saved, config, most_rows)
    program = jax.jit(
        lambda params, rows, chunks: score_rows(saved.graphdef, params, rows, chunks, model.chunk),
        out_shardings=NamedSharding(model.mesh, PartitionSpec()),
    )
    return Scorer(model, program)


def score_rows(
    graphdef: nnx.GraphDef,
    params: Params,
    rows: PyTree,
    chunks: jax.Array | int,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """(nll_BM in float32, greedy_BM) of the labels of a `BranchBatch`; 0 beyond chunks * chunk.

    In texts longer than the context, every layer's window is at most the context, as in nanochat.
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
    """Yield the scores of each job, in order. A job consists of questions, a question of sequences.

    The common prefix of a question's sequences is computed once. While the device works, the host
    reads ahead, also into the next job. While a program compiles, the device scores batches of
    other programs. progress: called with the number of questions that went to the device.
    """
    queue = ScoringQueue(scorer, progress)
    for questions in jobs:
        job = queue.open_job()
        for rows, owners_BM in pack_branches(job.counted(questions), scorer.shape):
            yield from queue.add(PendingBatch(job, rows, owners_BM, scorer.shape_of(rows)))
        job.packed = True
    yield from queue.empty()


class ScoringJob:
    """Scores of a job, collected batch by batch."""

    def __init__(self):
        self.sizes: list[int] = []
        self.lengths: list[int] = []
        self.first = bytearray()  # per sequence, whether it is the first of its question
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.packed, self.batches = False, 0  # whether all are packed; batches not collected yet

    def counted(self, questions: Iterable[Sequence[Scored]]) -> Iterator[Sequence[Scored]]:
        for question in questions:
            self.sizes.append(len(question))
            self.lengths += [len(scored.tokens) - scored.start for scored in question]
            self.first += b"\1" + bytes(len(question) - 1)
            yield question

    def questions_in(self, owners_BM: np.ndarray) -> int:
        """Number of questions whose first sequence is in a batch."""
        owners = owners_BM[owners_BM >= 0]
        is_first = np.diff(owners, prepend=-1) != 0  # the labels of a sequence are adjacent
        return int(np.frombuffer(bytes(self.first), np.uint8)[owners[is_first]].sum())

    def scores(self) -> Scores:
        owners, nll, greedy = map(np.concatenate, zip(*self.parts)) if self.parts else ([],) * 3
        count = len(self.lengths)
        sums = np.bincount(owners, weights=nll, minlength=count)
        misses = np.bincount(owners, weights=~np.asarray(greedy, bool), minlength=count)
        return Scores(sums, misses == 0, np.array(self.lengths, np.int64), self.sizes)


class PendingBatch(NamedTuple):
    """A batch that is not on the device yet."""

    job: ScoringJob
    rows: BranchBatch
    owners_BM: np.ndarray
    shape: RowShape

    @property
    def bytes(self) -> int:
        return self.owners_BM.nbytes + sum(x.nbytes for x in self.rows)


class ScoringQueue:
    """Queue of batches: some wait for their program, at most AHEAD are on the device.

    Each sequence is in one batch, so the order of batches does not change any sum.
    """

    def __init__(self, scorer: Scorer, progress: Callable[[int], None]):
        self.scorer, self.progress = scorer, progress
        self.jobs: deque[ScoringJob] = deque()
        self.pending: list[PendingBatch] = []
        self.running: deque[tuple[ScoringJob, np.ndarray, PyTree]] = deque()

    def open_job(self) -> ScoringJob:
        self.jobs.append(ScoringJob())
        return self.jobs[-1]

    def add(self, batch: PendingBatch) -> Iterator[Scores]:
        """Queue a batch, which goes to the device as soon as its program is ready. Yields the
        scores of complete jobs, as do `send`, `collect` and `empty`."""
        if self.scorer.model.mesh.size == 1:  # several devices may be at work: see `compile`
            self.scorer.compile([batch.shape])
        batch.job.batches += 1
        self.pending.append(batch)
        yield from self.send()
        while sum(one.bytes for one in self.pending) > PENDING_BYTES:
            yield from self.wait_and_send()

    def send(self) -> Iterator[Scores]:
        """Send the batches to the device whose programs are ready."""
        pending, self.pending = self.pending, []
        for one in pending:
            if not self.scorer.compiler.is_settled(one.shape):
                self.pending.append(one)
                continue
            self.running.append((one.job, one.owners_BM, self.scorer.score(one.rows)))
            self.progress(one.job.questions_in(one.owners_BM))
            while len(self.running) > AHEAD:
                yield from self.collect()

    def wait_and_send(self) -> Iterator[Scores]:
        self.scorer.compiler.wait_for_one({one.shape for one in self.pending})
        yield from self.send()

    def collect(self) -> Iterator[Scores]:
        """Wait for the results of the oldest batch on the device."""
        job, owners_BM, out = self.running.popleft()
        nll_BM, greedy_BM = jax.device_get(out)
        real = owners_BM >= 0
        job.parts.append((owners_BM[real], nll_BM[real], greedy_BM[real]))
        job.batches -= 1
        yield from self.finished()

    def empty(self) -> Iterator[Scores]:
        """Finish all batches, after the last one was added."""
        while self.pending:
            yield from self.wait_and_send()
        while self.running:
            yield from self.collect()
        yield from self.finished()  # a job may have no batch

    def finished(self) -> Iterator[Scores]:
        """Yield the scores of complete jobs, in their order."""
        while self.jobs and self.jobs[0].packed and not self.jobs[0].batches:
            yield self.jobs.popleft().scores()
