"""Pipeline parallelism: each device of the axis `pipeline` holds some of the layers, a stage.

Microbatches go from stage to stage, one further a tick, so that after S - 1 ticks all S stages are
at work, each on another microbatch (Huang et al. 2019, GPipe): of M + S - 1 ticks, S - 1 are idle.
With v repeats a stage holds v chunks of layers, every S-th one, and microbatches go v times round
the ring of stages, in groups of S (the interleaved schedule of Narayanan et al. 2021, Megatron-LM,
arXiv:2104.04473; the ring as in praxis): a tick is a v-th as long, and still only S - 1 are idle.
The gradient is that of the loop, the same schedule backwards. What a tick gets is all that is kept
of it, and its chunk is computed once more in the backward pass.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.settings import UserError

AXIS = "pipeline"


def pipeline_ways() -> int:
    """The stages of the mesh of `jax.set_mesh`, within a stage as well."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def ticks(stages: int, microbatches: int, repeats: int) -> int:
    """Until the last microbatch leaves the last stage. A group smaller than S waits as if full."""
    groups = (microbatches - 1) // stages
    rest = microbatches - groups * stages
    return groups * stages * repeats + (repeats - 1) * stages + rest + stages - 1


def due(since: Any, stages: int, repeats: int) -> tuple[Any, Any]:
    """(Round, microbatch) of a stage, so many ticks after the first microbatch came to it."""
    group, place = jnp.divmod(since, stages * repeats)
    turn, member = jnp.divmod(place, stages)
    return turn, group * stages + member


def bubble(stages: int, microbatches: int, repeats: int = 1) -> float:
    """The share of its time in which a stage is idle: (S-1) / (vM+S-1) if S divides M or v is 1."""
    return 1 - repeats * microbatches / ticks(stages, microbatches, repeats)


def check_stages(stages: int, repeats: int, plan: Sequence[Hashable]) -> None:
    """Raises UserError unless a plan of layers can be cut into chunks that are alike."""

    def alike(ways: int) -> bool:
        size = len(plan) // ways
        return len(plan) % ways == 0 and all(
            plan[start : start + size] == plan[:size] for start in range(0, len(plan), size)
        )

    chunks = stages * repeats
    if alike(chunks):
        return
    can = ", ".join(str(ways) for ways in range(1, len(plan) + 1) if alike(ways))
    what, times = "stages", ""
    if repeats > 1:
        what, times = "chunks", f" x mesh.pipeline_repeats={repeats}"
    why = f"does not divide model.depth {len(plan)}"
    if len(plan) % chunks == 0:
        why = f"would give {what} of unlike layers (model.window_pattern, value_embeddings)"
    raise UserError(
        f"mesh.pipeline={stages}{times} {why}; of this model's {what} there can be {can}"
    )


def at(tree: Any, index: Any) -> Any:
    """Each array's entry at a traced index."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def lanes_of(stages: int, repeats: int) -> np.ndarray:
    """In which of v permutations chunk c goes from its place to its stage: [v, S], by round, stage.

    Chunk c lies on stage c // v and works on stage c % S, in round c // S. A permutation takes one
    chunk from each stage and brings one to each.
    """
    chunk = np.arange(stages * repeats)
    shift = chunk // repeats // (stages // gcd(stages, repeats))
    return ((chunk + shift) % repeats).reshape(repeats, stages)


def dealt(held: jax.Array, lanes: np.ndarray, here: jax.Array) -> jax.Array:
    """The chunks [v, ...] that lie on this stage -> those that work on it, in lanes' order."""
    repeats, stages = lanes.shape

    def one(lane: int) -> jax.Array:
        chunk = np.flatnonzero(lanes == lane)  # that of stage 0 first
        pairs = list(zip(chunk // repeats, chunk % stages))
        return jax.lax.ppermute(at(held, jnp.asarray(chunk % repeats)[here]), AXIS, pairs)

    return jnp.stack([one(lane) for lane in range(repeats)])


@jax.custom_vjp
def with_sum(weight: jax.Array, total: jax.Array) -> jax.Array:
    """The weight; its gradient goes to the total, in the total's dtype, as a part of a sum."""
    return weight


with_sum.defvjp(
    lambda weight, total: (weight, total[:0]),
    lambda like, g: (None, g.astype(like.dtype)),
)


def with_sums(stacks: Any, totals: Any) -> Any:
    """`with_sum` of those that have another dtype than their total."""
    one = lambda weight, total: weight if weight.dtype == total.dtype else with_sum(weight, total)
    return jax.tree.map(one, stacks, totals)


def run_stage(
    stage: Callable[[Any, Any, Any], Any],
    first: Callable[[Any], Any],
    repeats: int,
    index: jax.Array,
    stacks: Any,
    micro: Any,
) -> Any:
    """What stage index[0] does, with its part of the stacks; see `pipelined`."""
    stages, count, here = pipeline_ways(), len(jax.tree.leaves(micro)[0]), index[0]
    onwards = [(i, (i + 1) % stages) for i in range(stages if repeats > 1 else stages - 1)]
    lanes = lanes_of(stages, repeats)

    @jax.checkpoint
    def work(received: Any, turn: jax.Array, number: jax.Array) -> Any:
        one = at(micro, number)
        start = (here == 0) & (turn == 0)
        given = jax.tree.map(lambda a, b: jnp.where(start, a, b), first(one), received)
        place = jnp.asarray(lanes)[turn, here]
        return stage(with_sums(at(stacks, place), at(totals, place)), given, one)

    def tick(carry: tuple[Any, Any], t: jax.Array) -> tuple[Any, None]:
        received, done = carry
        turn, number = due(t - here, stages, repeats)
        number = jnp.clip(number, 0, count - 1)
        made = work(received, turn, number)
        # The last round is the last to write.
        put = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, number, 0)
        done = jax.tree.map(put, done, made)
        return (jax.lax.ppermute(made, AXIS, onwards), done), None

    stacks = jax.tree.map(lambda x: x.reshape(repeats, -1, *x.shape[1:]), stacks)
    if repeats > 1:
        stacks = jax.tree.map(lambda x: dealt(x, lanes, here), stacks)
    # Nothing reads the totals: they are there for the sum of their gradients over the ticks, and
    # the weights are cast once for all of them.
    narrow = lambda x: x.dtype in (jnp.bfloat16, jnp.float16)
    totals = jax.tree.map(lambda x: x.astype(jnp.float32) if narrow(x) else x, stacks)
    stacks = jax.tree.map(lambda x: jax.lax.stop_gradient(x) if narrow(x) else x, stacks)
    like = jax.eval_shape(lambda m: first(at(m, 0)), micro)
    zeros = lambda *dims: jax.tree.map(lambda x: jnp.zeros((*dims, *x.shape), x.dtype), like)
    times = jnp.arange(ticks(stages, count, repeats))
    done = jax.lax.scan(tick, (zeros(), zeros(count)), times)[0][1]
    last = lambda x: jnp.where(here == stages - 1, x, 0)
    share = jax.lax.psum if count % stages else functools.partial(jax.lax.psum_scatter, tiled=True)
    return jax.tree.map(lambda x: share(last(x), AXIS), done)


def pipelined(
    stage: Callable[[Any, Any, Any], Any],
    first: Callable[[Any], Any],
    stacks: Any,
    micro: Any,
    repeats: int = 1,
) -> Any:
    """All microbatches through all stages: what the last one makes of each, arrays [M, ...].

    stage: (a chunk of the stacks, what the chunk before made, the microbatch) -> what it makes, of
    the same shapes. first: (a microbatch) -> what the first chunk gets. stacks: arrays [L, ...];
    micro: arrays [M, ...], whole on every stage. The results lie spread over the stages by M if M
    is a multiple of their number, so that what follows is shared as well.

    Stacks lie in the order of the layers, whatever the repeats: with them, chunks go to their
    stages at the beginning of a step, in the dtype it computes with, and their gradients come back
    at its end. Each way a stage sends at most as much as it holds, and it holds that twice. The
    sum of its gradients, float32 until the end, is read and written as a whole in each tick, v
    times as often.
    """
    stages = pipeline_ways()
    even = len(jax.tree.leaves(micro)[0]) % stages == 0
    return jax.shard_map(
        functools.partial(run_stage, stage, first, repeats),
        in_specs=(P(AXIS), P(AXIS), P()),
        out_specs=P(AXIS) if even else P(),
        axis_names={AXIS},
        check_vma=False,
    )(jnp.arange(stages), stacks, micro)
