"""Log-likelihoods of many token sequences: packed rows in, a few numbers a sequence out.

One compiled program, or two where sequences share beginnings, serves all lengths up to the context;
twice, four times, ... the context have their own. They are compiled in threads, beside each other
and beside the scoring of those that are ready. Padding short texts into a longer program would save
no compile time and would change roundings. The head is applied to the places that are asked for,
some at a time, never to whole rows.
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
from jaxtrain.config.resolve import Resolved
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

# Fields of a saved model's configuration that a command line may change, of those read here.
FIELDS = (
    "eval.batch_size",
    "mesh",
    "train.precision",
    "train.device_batch_size",
    "model.context_length",
)
AHEAD = 8  # batches that the device is given before the first one's numbers are waited for
HELD_BYTES = 1 << 28  # of batches that wait for their programs, on the host
HEAD_ROWS = 1024  # places a device computes logits of at a time


class ShardedModel(NamedTuple):
    """A model on its devices, and what it is given at once."""

    mesh: Mesh
    params: Any
    shape: RowShape
    chunk: int  # places of a row whose logits are computed at a time


class Scorer:
    """A model on its devices, ready to score batches of any `RowShape`."""

    def __init__(self, model: ShardedModel, program: jax.stages.Wrapped):
        """program: (params, rows, chunks) -> nll and greedy [B, M], of all processes."""
        self.model, self.program, self.shape = model, program, model.shape
        self.context = model.shape.trunk  # tokens that the model was trained on at a time
        self.compiler = Compiler[RowShape](lambda: jax.set_mesh(model.mesh))

    def compile(self, shapes: Collection[RowShape]) -> list[Future[object]]:
        """Begin to compile for batches of these shapes, the first ones first; what was begun.

        Among several processes it begins nothing, and each program is compiled when it is called:
        they time kernels for each other, and must all compile the same program at a time. One
        process with several devices waits here: loading a program waits for running kernels, which
        may wait for those of another device behind a load.
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
        """The program of a shape."""
        return self.program.lower(self.model.params, self.place(empty_batch(shape)), np.int32(0))

    def shape_of(self, rows: BranchBatch) -> RowShape:
        """The shape of a batch; its branch is 0 if it has no branches."""
        (B, T), R = rows.tokens_BT.shape, rows.parents_BR.shape[1]
        return RowShape(B, T - R, R, self.shape.num_shards)

    def place(self, rows: BranchBatch) -> BranchBatch:
        """This process's part of a batch on its devices. The mesh must be set."""
        share, shares = process_batch_shard(self.model.mesh)
        mine = len(rows.tokens_BT) // shares
        part = slice(share * mine, (share + 1) * mine)
        return place_batch(BranchBatch(*(x[part] for x in rows)), self.model.mesh)

    def score(self, rows: BranchBatch) -> tuple[jax.Array, jax.Array]:
        """nll and greedy [B, M], still on the device. Waits for the program where it was begun."""
        self.compiler.settle(self.shape_of(rows))
        chunks = -(-int((rows.labels_BM >= 0).sum(1).max()) // self.model.chunk)
        with jax.set_mesh(self.model.mesh):
            return self.program(self.model.params, self.place(rows), np.int32(chunks))


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
    reads ahead, into the next job too; and while a program is compiled, the device scores what
    others are ready for. progress: is told of questions that went to the device.
    """
    queue = ScoringQueue(scorer, progress)
    for questions in jobs:
        job = queue.open_job()
        for rows, owners_BM in pack_branches(job.counted(questions), scorer.shape):
            yield from queue.add(HeldBatch(job, rows, owners_BM, scorer.shape_of(rows)))
        job.packed = True
    yield from queue.empty()


class ScoringJob:
    """The numbers of a job while they come in."""

    def __init__(self):
        self.sizes: list[int] = []
        self.lengths: list[int] = []
        self.first = bytearray()  # of each sequence, whether it is the first of its question
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.packed, self.batches = False, 0  # whether all are; those that are not collected

    def counted(self, questions: Iterable[Sequence[Scored]]) -> Iterator[Sequence[Scored]]:
        for question in questions:
            self.sizes.append(len(question))
            self.lengths += [len(scored.tokens) - scored.start for scored in question]
            self.first += b"\1" + bytes(len(question) - 1)
            yield question

    def questions_in(self, owners_BM: np.ndarray) -> int:
        """How many questions have their first sequence in a batch."""
        owners = owners_BM[owners_BM >= 0]
        begins = np.diff(owners, prepend=-1) != 0  # the labels of a sequence are side by side
        return int(np.frombuffer(bytes(self.first), np.uint8)[owners[begins]].sum())

    def scores(self) -> Scores:
        owners, nll, greedy = map(np.concatenate, zip(*self.parts)) if self.parts else ([],) * 3
        count = len(self.lengths)
        sums = np.bincount(owners, weights=nll, minlength=count)
        misses = np.bincount(owners, weights=~np.asarray(greedy, bool), minlength=count)
        return Scores(sums, misses == 0, np.array(self.lengths, np.int64), self.sizes)


class HeldBatch(NamedTuple):
    """A batch that the device is yet to be given."""

    job: ScoringJob
    rows: BranchBatch
    owners_BM: np.ndarray
    shape: RowShape

    @property
    def bytes(self) -> int:
        return self.owners_BM.nbytes + sum(x.nbytes for x in self.rows)


class ScoringQueue:
    """Batches on their way: some wait for their program, AHEAD of them are with the device.

    A sequence is in one batch, so that the order of batches changes no sum.
    """

    def __init__(self, scorer: Scorer, progress: Callable[[int], None]):
        self.scorer, self.progress = scorer, progress
        self.jobs: deque[ScoringJob] = deque()
        self.held: list[HeldBatch] = []
        self.running: deque[tuple[ScoringJob, np.ndarray, PyTree]] = deque()

    def open_job(self) -> ScoringJob:
        self.jobs.append(ScoringJob())
        return self.jobs[-1]

    def add(self, batch: HeldBatch) -> Iterator[Scores]:
        """Take a batch; the device is given it as soon as its program is ready. Yields the scores
        of jobs that are complete, as `send`, `collect` and `empty` do."""
        if self.scorer.model.mesh.size == 1:  # several devices may be at work: see `compile`
            self.scorer.compile([batch.shape])
        batch.job.batches += 1
        self.held.append(batch)
        yield from self.send()
        while sum(one.bytes for one in self.held) > HELD_BYTES:
            yield from self.wait_and_send()

    def send(self) -> Iterator[Scores]:
        """Give the device what its programs are ready for."""
        held, self.held = self.held, []
        for one in held:
            if not self.scorer.compiler.is_settled(one.shape):
                self.held.append(one)
                continue
            self.running.append((one.job, one.owners_BM, self.scorer.score(one.rows)))
            self.progress(one.job.questions_in(one.owners_BM))
            while len(self.running) > AHEAD:
                yield from self.collect()

    def wait_and_send(self) -> Iterator[Scores]:
        self.scorer.compiler.wait_for_one({one.shape for one in self.held})
        yield from self.send()

    def collect(self) -> Iterator[Scores]:
        """Wait for the numbers of the batch that was given first."""
        job, owners_BM, out = self.running.popleft()
        nll_BM, greedy_BM = jax.device_get(out)
        real = owners_BM >= 0
        job.parts.append((owners_BM[real], nll_BM[real], greedy_BM[real]))
        job.batches -= 1
        yield from self.finished()

    def empty(self) -> Iterator[Scores]:
        """Behind the last batch."""
        while self.held:
            yield from self.wait_and_send()
        while self.running:
            yield from self.collect()
        yield from self.finished()  # a job may have no batch

    def finished(self) -> Iterator[Scores]:
        """The numbers of jobs in their order, of those that have them all."""
        while self.jobs and self.jobs[0].packed and not self.jobs[0].batches:
            yield self.jobs.popleft().scores()
