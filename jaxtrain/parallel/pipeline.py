"""Pipeline parallelism: each device of the axis `pipeline` holds some of the layers, a stage.

Microbatches go from stage to stage, one further a tick, so that after S - 1 ticks all S stages are
at work, each on another microbatch (Huang et al. 2019, GPipe): of M + S - 1 ticks, S - 1 are idle.
The gradient is that of the loop, the same schedule backwards. A stage's inputs are what is kept of
a tick, and the stage is computed once more in the backward pass.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.settings import UserError

AXIS = "pipeline"


def pipeline_ways() -> int:
    """The stages of the mesh of `jax.set_mesh`, within a stage as well."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def bubble(stages: int, microbatches: int) -> float:
    """The share of its time in which a stage is idle."""
    return (stages - 1) / (microbatches + stages - 1)


def check_stages(stages: int, plan: Sequence[Hashable]) -> None:
    """Raises UserError unless a plan of layers can be cut into stages that are alike."""

    def alike(ways: int) -> bool:
        size = len(plan) // ways
        return len(plan) % ways == 0 and all(
            plan[start : start + size] == plan[:size] for start in range(0, len(plan), size)
        )

    if alike(stages):
        return
    can = ", ".join(str(ways) for ways in range(1, len(plan) + 1) if alike(ways))
    why = f"does not divide model.depth {len(plan)}"
    if len(plan) % stages == 0:
        why = "would give stages of unlike layers (model.window_pattern, value_embeddings)"
    raise UserError(f"mesh.pipeline={stages} {why}; of this model's stages there can be {can}")


def pipelined(
    stage: Callable[[Any, Any, Any], Any], first: Callable[[Any], Any], stacks: Any, micro: Any
) -> Any:
    """All microbatches through all stages: what the last one makes of each, arrays [M, ...].

    stage: (this stage's part of the stacks, what the stage before made, the microbatch) -> what it
    makes. first: (a microbatch) -> what the first stage gets. stacks: arrays [L, ...]; micro:
    arrays [M, ...], whole on every stage. The results lie spread over the stages by M if M is a
    multiple of their number, so that what follows is shared as well.
    """
    stages = pipeline_ways()
    count = len(jax.tree.leaves(micro)[0])
    onwards = [(i, i + 1) for i in range(stages - 1)]
    even = count % stages == 0

    def local(index: jax.Array, stacks: Any, micro: Any) -> Any:
        here = index[0]

        def tick(received: Any, t: jax.Array) -> tuple[Any, Any]:
            number = jnp.clip(t - here, 0, count - 1)
            at = lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
            one = jax.tree.map(at, micro)
            given = jax.tree.map(lambda a, b: jnp.where(here == 0, a, b), first(one), received)
            made = jax.checkpoint(stage)(stacks, given, one)
            return jax.lax.ppermute(made, AXIS, onwards), made

        like = jax.eval_shape(lambda m: first(jax.tree.map(lambda x: x[0], m)), micro)
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        made = jax.lax.scan(tick, start, jnp.arange(count + stages - 1))[1]
        last = lambda x: jnp.where(here == stages - 1, x[stages - 1 :], 0)
        share = jax.lax.psum_scatter if even else jax.lax.psum
        options = dict(tiled=True) if even else {}
        return jax.tree.map(lambda x: share(last(x), AXIS, **options), made)

    return jax.shard_map(
        local,
        in_specs=(P(AXIS), P(AXIS), P()),
        out_specs=P(AXIS) if even else P(),
        axis_names={AXIS},
        check_vma=False,
    )(jnp.arange(stages), stacks, micro)
