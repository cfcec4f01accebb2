"""dQ in the Hopper key-block backward kernel: one matmul per step, added to device memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper.backward_load import KeyWork, query_block
from jaxtrain_kernels.attention.hopper.backward_plan import KeyPlan
from jaxtrain_kernels.hopper import Index, Ref


def sums_shape(plan: KeyPlan, padded_BTNH: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the float32 array that dQ is accumulated in."""
    if plan.interpret:
        # The interpreter has no reduce-add, so there each key block has its own dq.
        return (plan.tile_blocks, *padded_BTNH)
    B, _, N, H = padded_BTNH
    return B, plan.q_blocks * plan.tiling.block_q, N, H


def shape(plan: KeyPlan) -> tuple[int, int]:
    """Number of queries and of columns of dq that a warpgroup computes."""
    rows, columns = plan.dq_parts
    return plan.tiling.block_q // rows, plan.H // columns


def memory(plan: KeyPlan) -> pl.MemoryRef:
    return hopper.tiles((plan.warpgroups, *shape(plan)), jnp.float32)


def issue(work: KeyWork, t: Index, dq: Ref) -> None:
    rows, columns = _part(work)
    ds = work.read(work.memory.ds.at[work.ds_slot(t), :, rows])
    hopper.untyped.wgmma(dq, ds.T, work.read(work.memory.k.at[:, columns]))


def store_dq(work: KeyWork, dq: jax.Array) -> None:
    """Store dq in shared memory, after the previous step's dq has left it."""
    if work.plan.interpret:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _staged(work)[...] = dq


def send(work: KeyWork, t: Index) -> None:
    """Add dq of query block t from shared memory to the sum in device memory."""
    plan, tile = work.plan, work.tile
    rows, columns = _part(work)
    head, block = query_block(plan, tile, t)
    rows = pl.ds(block * plan.tiling.block_q + rows.start, rows.size)
    plgpu.commit_smem()
    array = work.arrays.dq.at[tile.block] if plan.interpret else work.arrays.dq
    add: dict[str, Any] = {} if plan.interpret else {"reduction_op": "add"}
    plgpu.copy_smem_to_gmem(_staged(work), array.at[tile.b, rows, head, columns], **add)


def _staged(work: KeyWork) -> Any:
    return work.memory.dq_outputs[0].at[work.warpgroup]


def _part(work: KeyWork) -> tuple[pl.Slice, pl.Slice]:
    """Slices (rows, columns) of dq that the warpgroup computes."""
    rows, columns = shape(work.plan)
    down, across = work.plan.dq_parts
    row = 0 if down == 1 else lax.div(work.warpgroup, across) if across > 1 else work.warpgroup
    column = 0 if across == 1 else lax.rem(work.warpgroup, across) if down > 1 else work.warpgroup
    return pl.ds(row * rows, rows), pl.ds(column * columns, columns)
