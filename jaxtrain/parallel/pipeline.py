"""Pipeline parallelism: each device of the mesh axis `pipeline` holds one stage of the layers.

Microbatches go from stage to stage, one further each tick (Huang et al. 2019, GPipe). With S stages
and M microbatches there are M + S - 1 ticks, and a stage is idle in S - 1 of them. S = 3, M = 4:

    tick      0    1    2    3    4    5
    stage 0   m0   m1   m2   m3   .    .
    stage 1   .    m0   m1   m2   m3   .
    stage 2   .    .    m0   m1   m2   m3     (. idle)

The interleaved schedule (Narayanan et al. 2021, Megatron-LM, arXiv:2104.04473; the ring as in
praxis): with v repeats a stage holds v chunks of layers, every S-th one, and microbatches go v
times around the ring of stages, in groups of S. A tick takes 1/v of the time, and a stage is still
idle in only S - 1 ticks.
S = 2, v = 2, M = 4; chunks 0 and 2 are on stage 0, chunks 1 and 3 on stage 1:

    tick      0     1     2     3     4     5     6     7     8
    stage 0   m0.0  m1.0  m0.2  m1.2  m2.0  m3.0  m2.2  m3.2  .
    stage 1   .     m0.1  m1.1  m0.3  m1.3  m2.1  m3.1  m2.3  m3.3

The backward pass is the gradient of that loop: the same schedule in reverse order. Each tick saves
only the input of its chunk; the backward pass recomputes the chunk.

Chunks need not be alike: each kind of chunk is a branch, and a stage runs the branch of its own
chunk, or an empty one while it is idle. Collectives inside a branch must be among devices of one
stage. XLA's collective-permute synchronizes all devices, also those of stages in other branches. So
if layers contain one (`context`), all chunks must be alike, and an idle stage computes without
using the result.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jaxtrain.parallel.axes import manual_axes
from jaxtrain.settings import UserError

AXIS = "pipeline"
# (kind of chunk, its slice of the stacks, the previous chunk's output, the microbatch) -> its
# output
Stage = Callable[[Any, PyTree, PyTree, PyTree], PyTree]


def pipeline_size() -> int:
    """Number of stages of the current mesh; works inside a stage, too."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def num_ticks(stages: int, microbatches: int, repeats: int) -> int:
    """Number of ticks until the last microbatch leaves the last stage. A group of fewer than S
    microbatches has idle ticks as if it were full."""
    groups = (microbatches - 1) // stages
    rest = microbatches - groups * stages
    return groups * stages * repeats + (repeats - 1) * stages + rest + stages - 1


def schedule_at(since: jax.Array | int, stages: int, repeats: int) -> tuple[jax.Array, jax.Array]:
    """(Round, microbatch) of a stage, `since` ticks after its first microbatch arrived."""
    group, position = jnp.divmod(since, stages * repeats)
    turn, member = jnp.divmod(position, stages)
    return turn, group * stages + member


def bubble_fraction(
    stages: int, microbatches: int, repeats: int = 1, layers: int | None = None
) -> float:
    """Fraction of its time that a stage is idle: (S-1) / (vM+S-1), if S divides M or v is 1, and vS
    divides the layers, if they are given. A tick is as long as its longest chunk.
    """
    chunks = stages * repeats
    busy = 1 if layers is None else layers / (chunks * -(-layers // chunks))
    return 1 - busy * repeats * microbatches / num_ticks(stages, microbatches, repeats)


def check_stages(
    stages: int,
    repeats: int,
    plan: Sequence[Hashable],
    context: int = 1,
    schedule: str = "gpipe",
    tensor: int = 1,
) -> None:
    """Raise UserError for stages that cannot run.

    Each chunk needs a layer. With several devices along `context`, all chunks have to be alike. The
    1F1B schedule with tensor parallelism needs a stage of two layers or more.
    """
    layers, chunks = len(plan), stages * repeats
    times = f" x mesh.pipeline_repeats={repeats}" if repeats > 1 else ""
    alike = lambda chunks: len(set(split_layers(plan, chunks))) == 1
    if chunks <= layers and context > 1 and not alike(chunks):
        can = ", ".join(str(n) for n in range(1, layers + 1) if alike(n))
        raise UserError(
            f"mesh.pipeline={stages}{times} has chunks that differ in their layers "
            "(model.window_pattern, value_embeddings, moe.every), which do not go with "
            f"mesh.context={context}; there can be {can}, or set mesh.context=1"
        )
    # XLA puts a collective over both stages into the branch of one of them, which never returns.
    if schedule == "1f1b" and tensor > 1 and layers == stages:
        raise UserError(
            f"mesh.pipeline_schedule=1f1b with mesh.tensor={tensor} needs a stage of two layers or "
            f"more: model.depth is {layers} for mesh.pipeline={stages}; set "
            "mesh.pipeline_schedule=gpipe or mesh.tensor=1"
        )
    if chunks <= layers:
        return
    would = f"mesh.pipeline_repeats of at most {layers // stages} or " if stages <= layers else ""
    raise UserError(
        f"mesh.pipeline={stages}{times} is more than model.depth {layers}, and each needs a layer; "
        f"give {would}mesh.pipeline of at most {layers // repeats}"
    )


def split_layers[Kind: Hashable](plan: Sequence[Kind], chunks: int) -> list[tuple[Kind, ...]]:
    """Split a plan into consecutive chunks; the first ones have one more layer if needed."""
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(len(plan)), chunks)]).tolist()
    return [tuple(plan[start:end]) for start, end in zip([0, *ends], ends)]


def pad_chunks[Tree](stack: Tree, counts: Sequence[int]) -> Tree:
    """Pad arrays [sum of counts, ...] to [chunks x largest count, ...], so that chunks are alike.

    A shorter chunk is padded with another chunk's layers, which nothing reads.
    """
    if len(set(counts)) == 1:
        return stack
    starts, most = np.cumsum([0, *counts[:-1]]), max(counts)
    places = np.minimum(starts[:, None] + np.arange(most)[None], sum(counts) - 1).reshape(-1)
    return jax.tree.map(lambda x: x[places], stack)


def at[Tree](tree: Tree, index: jax.Array | int) -> Tree:
    """Each array's entry at a traced index."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def interleave_permutation(stages: int, repeats: int) -> np.ndarray:
    """Index of the permutation (of v) that moves chunk c to its stage: [v, S], by round and stage.

    Chunk c is stored on stage c // v and runs on stage c % S, in round c // S. Each permutation
    takes one chunk from each stage and brings one to each.
    """
    chunk = np.arange(stages * repeats)
    shift = chunk // repeats // (stages // gcd(stages, repeats))
    return ((chunk + shift) % repeats).reshape(repeats, stages)


def permute_chunks(local_chunks: jax.Array, lanes: np.ndarray, here: jax.Array) -> jax.Array:
    """Exchange the chunks [v, ...] stored on this stage for those that run on it, by lane."""
    repeats, stages = lanes.shape

    def one(lane: int) -> jax.Array:
        chunk = np.flatnonzero(lanes == lane)  # stage 0's first
        pairs = list(zip(chunk // repeats, chunk % stages))
        return jax.lax.ppermute(at(local_chunks, jnp.asarray(chunk % repeats)[here]), AXIS, pairs)

    return jnp.stack([one(lane) for lane in range(repeats)])


@jax.custom_vjp
def accumulate_grad_fp32(weight: jax.Array, total: jax.Array) -> jax.Array:
    """Identity on `weight`; its gradient is added to that of `total`, in total's dtype."""
    return weight


accumulate_grad_fp32.defvjp(
    lambda weight, total: (weight, total[:0]),
    lambda like, g: (None, g.astype(like.dtype)),
)


def accumulate_grads_fp32[Tree](stacks: Tree, totals: Tree) -> Tree:
    """`accumulate_grad_fp32` for stacks whose dtype differs from their total's."""
    one = lambda weight, total: (
        weight if weight.dtype == total.dtype else accumulate_grad_fp32(weight, total)
    )
    return jax.tree.map(one, stacks, totals)


@jax.custom_vjp
def zero_grad_where(x: jax.Array, where: jax.Array) -> jax.Array:
    """Identity on x; its gradient is zero if the scalar `where` is true."""
    return x


zero_grad_where.defvjp(
    lambda x, where: (x, where),
    lambda where, g: (g if g.dtype == jax.float0 else jnp.where(where, jnp.zeros_like(g), g), None),
)


def switch_with_remat[Result](
    functions: Sequence[Callable[..., Result]], index: jax.Array, *arrays: PyTree
) -> Result:
    """functions[index](*arrays), recomputed from the arrays in the backward pass. The gradient of a
    plain `lax.switch` would save the residuals of every branch.
    """
    leaves, tree = jax.tree.flatten(arrays)
    moves = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    chosen = lambda wanted: [leaf for leaf, moved in zip(leaves, moves) if moved == wanted]

    def call(function: Callable[..., Any], moving: list[Any], still: list[Any]) -> Any:
        parts = iter(moving), iter(still)
        return function(*tree.unflatten([next(parts[not moved]) for moved in moves]))

    def back(function: Callable[..., Any], moving: list[Any], still: list[Any], g: Any) -> Any:
        return jax.vjp(lambda m: call(function, m, still), moving)[1](g)[0]

    def either(way: Callable[..., Any], index: jax.Array, *given: Any) -> Any:
        return jax.lax.switch(index, [functools.partial(way, f) for f in functions], *given)

    run = jax.custom_vjp(functools.partial(either, call))
    run.defvjp(
        lambda *given: (either(call, *given), given),
        lambda given, g: (None, either(back, *given, g), None),
    )
    return run(index, chosen(True), chosen(False))


def run_stage(
    stage: Stage,
    kinds: Sequence[Hashable],
    first: Callable[[PyTree], PyTree],
    repeats: int,
    loads: bool,
    index: jax.Array,
    stacks: PyTree,
    micro: PyTree,
) -> PyTree:
    """Run stage index[0] with its shard of the stacks; see `run_pipeline`."""
    stages, count, here = pipeline_size(), len(jax.tree.leaves(micro)[0]), index[0]
    context = jax.sharding.get_abstract_mesh().shape["context"]
    onwards = [(i, (i + 1) % stages) for i in range(stages if repeats > 1 else stages - 1)]
    lanes = interleave_permutation(stages, repeats)
    distinct = list(dict.fromkeys(kinds))
    kind_at = np.array([distinct.index(kind) for kind in kinds]).reshape(repeats, stages)
    waiting = lambda stacks, given, one: given
    branches = [*(functools.partial(stage, kind) for kind in distinct), waiting]

    @jax.checkpoint
    def work(received: Any, turn: jax.Array, number: jax.Array, waits: jax.Array) -> Any:
        one = at(micro, number)
        start = (here == 0) & (turn == 0)
        given = jax.tree.map(lambda a, b: jnp.where(start, a, b), first(one), received)
        chunk_index = jnp.asarray(lanes)[turn, here]
        chunk = accumulate_grads_fp32(at(stacks, chunk_index), at(totals, chunk_index))
        if len(distinct) == 1 and (not loads or context > 1):
            if loads:
                chunk = jax.tree.map(lambda x: zero_grad_where(x, waits), chunk)
            return stage(kinds[0], chunk, given, one)
        branch = jnp.where(waits, len(distinct), jnp.asarray(kind_at)[turn, here])
        return switch_with_remat(branches, branch, chunk, given, one)

    def tick(carry: tuple[Any, Any], t: jax.Array) -> tuple[Any, None]:
        received, done = carry
        turn, number = schedule_at(t - here, stages, repeats)
        waits = (number < 0) | (number >= count)
        number = jnp.clip(number, 0, count - 1)
        made = work(received, turn, number, waits)
        # Each round overwrites the output; the last round's stays.
        put = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, number, 0)
        done = jax.tree.map(put, done, made)
        return (jax.lax.ppermute(made, AXIS, onwards), done), None

    stacks = jax.tree.map(lambda x: x.reshape(repeats, -1, *x.shape[1:]), stacks)
    if repeats > 1:
        stacks = jax.tree.map(lambda x: permute_chunks(x, lanes, here), stacks)
    # Nothing reads the totals' values: they exist to sum gradients over the ticks in float32, and
    # the weights are cast once for all ticks.
    narrow = lambda x: x.dtype in (jnp.bfloat16, jnp.float16)
    totals = jax.tree.map(lambda x: x.astype(jnp.float32) if narrow(x) else x, stacks)
    stacks = jax.tree.map(lambda x: jax.lax.stop_gradient(x) if narrow(x) else x, stacks)
    like = jax.eval_shape(lambda m: first(at(m, 0)), micro)
    zeros = lambda *dims: jax.tree.map(lambda x: jnp.zeros((*dims, *x.shape), x.dtype), like)
    times = jnp.arange(num_ticks(stages, count, repeats))
    done = jax.lax.scan(tick, (zeros(), zeros(count)), times)[0][1]
    last = lambda x: jnp.where(here == stages - 1, x, 0)
    share = jax.lax.psum if count % stages else functools.partial(jax.lax.psum_scatter, tiled=True)
    return jax.tree.map(lambda x: share(last(x), AXIS), done)


def run_pipeline(
    stage: Stage,
    kinds: Sequence[Hashable],
    first: Callable[[PyTree], PyTree],
    stacks: PyTree,
    micro: PyTree,
    repeats: int = 1,
    loads: bool = False,
) -> PyTree:
    """Run all microbatches through all stages; returns the last stage's outputs, arrays [M, ...].

    stage: (kind of chunk, a chunk of the stacks, the previous chunk's output, the microbatch) ->
    its output, of the same shapes. kinds: of each chunk. first: (a microbatch) -> the first chunk's
    input. stacks: arrays [chunks x layers per chunk, ...] (see `pad_chunks`). micro: arrays
    [M, rows, ...], replicated on all stages. If M is a multiple of the stages, the results are
    sharded over them by M, so that they share the work that follows. loads: some gradients do not
    come from the result (expert loads), so an idle stage must contribute none: it computes nothing
    or, with `context`, its gradients are set to zero.

    Stacks are in layer order, whatever the repeats. With repeats > 1, chunks are sent to their
    stages at the start of a step, in the compute dtype, and their gradients are sent back at its
    end. In each direction a stage sends at most its own share of the weights, and it holds that
    share twice. The float32 sum of its gradients is read and written as a whole in each tick, so v
    times as often.
    """
    mesh = jax.sharding.get_abstract_mesh()
    stages, replicas = pipeline_size(), 1 if "data" in manual_axes(mesh) else mesh.shape["data"]
    even = len(jax.tree.leaves(micro)[0]) % stages == 0
    # Each device of `data` sums the gradients of its own rows over the ticks, then reduces once.
    rows = lambda size: "data" if replicas > 1 and size % replicas == 0 else None
    made = jax.eval_shape(lambda m: first(at(m, 0)), micro)
    return jax.shard_map(
        functools.partial(run_stage, stage, kinds, first, repeats, loads),
        in_specs=(P(AXIS), P(AXIS), jax.tree.map(lambda x: P(None, rows(x.shape[1])), micro)),
        out_specs=jax.tree.map(lambda x: P(AXIS if even else None, rows(x.shape[0])), made),
        axis_names={AXIS, "data"} - set(manual_axes(mesh)),
        check_vma=False,
    )(jnp.arange(stages), stacks, micro)
