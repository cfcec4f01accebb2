"""Tile scheduler and launch of the Hopper backward kernels.

A tile is one block of keys (or of queries) of one head. CUDA blocks are persistent, and their
load warpgroup writes the next tile to shared memory for the computing warpgroups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper.backward_plan import BackwardPlan
from jaxtrain_kernels.hopper import Ref


class BackwardArrays(NamedTuple):
    q: Any
    k: Any
    v: Any
    do: Any
    stats: Any
    ranges: Any
    ids: Any
    dq: Any = None
    dk: Any = None
    dv: Any = None


class BackwardTile(NamedTuple):
    """Block `block` of a head. It visits [lo, hi), of which [full_lo, full_hi) need no mask."""

    b: jax.Array
    head: jax.Array
    block: jax.Array
    lo: jax.Array
    full_lo: jax.Array
    full_hi: jax.Array
    hi: jax.Array

    def masked(self, visited: jax.Array) -> jax.Array:
        return (visited < self.full_lo) | (visited >= self.full_hi)


# Shared memory of the tile scheduler: a BackwardTile, and the value read from the counter.
def memory() -> pl.MemoryRef:
    return plgpu.SMEM((2, 8), jnp.int32)


def counter(plan: BackwardPlan) -> Ref | None:
    """Counter of scheduled tiles in device memory; None if the schedule is static."""
    if plan.tiling.dynamic and not plan.interpret and plan.blocks < plan.n_tiles:
        return pl.get_global(plgpu.SemaphoreType.REGULAR)
    return None


def load_tiles(
    plan: BackwardPlan,
    ranges: Ref,
    memory: Ref,
    count: Ref | None,
    every: Callable[[jax.Array, BackwardTile], jax.Array],
) -> None:
    """Run the load warpgroup's loop: used = every(used, tile) for each tile.

    used: number of steps in this CUDA block's past tiles.
    """

    def load_tile(carry):
        used, number, tile = carry
        used = every(used, tile)
        # Not before: a tile that is taken early would wait until a long one ends. The computing
        # warpgroups still have two steps to do, which is time enough.
        if count is None:
            number += plan.blocks
        else:
            number = plan.blocks + hopper.take_number(count, memory.at[1, 0])
        return used, number, _read_tile(plan, ranges, jnp.minimum(number, plan.n_tiles - 1))

    number = lax.axis_index("block")
    start = jnp.int32(0), number, _read_tile(plan, ranges, number)
    lax.while_loop(lambda carry: carry[1] < plan.n_tiles, load_tile, start)


def _read_tile(plan: BackwardPlan, ranges: Ref, number: jax.Array) -> BackwardTile:
    """Return a tile. Their order: by group of heads, then from the heaviest block, then by head."""
    in_group = plan.group * plan.tile_blocks
    group, rest = lax.div(number, in_group), lax.rem(number, in_group)
    block = lax.div(rest, plan.group)
    if plan.last_first:
        block = plan.tile_blocks - 1 - block
    head = group * plan.group + lax.rem(rest, plan.group)
    b = lax.div(head, plan.heads)
    limits = [ranges[b if plan.segments else 0, block, i] for i in range(4)]
    return BackwardTile(b, lax.rem(head, plan.heads), block, *limits)


def tell_tile(memory: Ref, tile: BackwardTile) -> None:
    """Write the tile to shared memory, before the loads whose barrier the others wait on."""
    for i, x in enumerate(tile):
        memory[0, i] = x


def tell_end(memory: Ref, loaded: Ref, arrivals: int) -> None:
    """Signal the end of the tiles. loaded: the barrier on which the others wait for a tile."""
    memory[0, 0] = -1
    for _ in range(arrivals):
        hopper.untyped.barrier_arrive(loaded)


def compute_tiles(
    memory: Ref, loaded: Ref, compute: Callable[[jax.Array, BackwardTile], jax.Array]
) -> None:
    """Run a computing warpgroup's loop: used = compute(used, tile), the steps done so far."""

    def following():
        hopper.untyped.barrier_wait(loaded)
        return BackwardTile(*(memory[0, i] for i in range(len(BackwardTile._fields))))

    def compute_tile(carry):
        used = compute(*carry)
        return used, following()

    lax.while_loop(lambda carry: carry[1].b >= 0, compute_tile, (jnp.int32(0), following()))


def launch(
    plan: BackwardPlan,
    body: Callable[[tuple[Ref, ...], dict[str, Ref]], None],
    scratch: dict,
    out_type: jax.ShapeDtypeStruct | list[jax.ShapeDtypeStruct],
    arrays: list,  # or references
    interpret: hopper.Interpret,
):
    """Run the kernel `body`(references to arrays and results, scratch memory by name)."""

    def kernel(*refs):
        run = lambda **memory: body(refs, memory)
        pl.run_scoped(run, collective_axes="warpgroup", **scratch)

    kernel.__name__ = body.__name__
    mesh = plgpu.Mesh(
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
    )
    call: Any = pl.kernel(
        hopper.traced_body(kernel),
        out_type=out_type,
        mesh=mesh,
        compiler_params=hopper.compiler_params(),
        interpret=interpret,
    )
    return call(*arrays)
