"""dQ in the Hopper backward kernel of key blocks: a product a step, added to device memory."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels.attention import mosaic_backward_inline as inline
from jaxtrain_kernels.attention.mosaic_backward_load import Work, query_block
from jaxtrain_kernels.attention.mosaic_backward_plan import KeyPlan
from jaxtrain_kernels.attention.mosaic_backward_scores import accumulator


def sums_shape(plan: KeyPlan, padded_BTNH: tuple[int, ...]) -> tuple[int, ...]:
    """Of the float32 array that dQ is added to, in pieces of 64 queries and dq_columns columns."""
    if plan.interpret:
        # The interpreter knows no reduce-add: there each key block has its own dq.
        return (plan.tile_blocks, *padded_BTNH)
    width = plan.tiling.dq_columns
    queries = plan.B * plan.N * plan.q_blocks * plan.tiling.block_q
    return queries // 64 * plan.H // width, width // 4, 256


def from_sums(plan: KeyPlan, sums: Any) -> Any:
    """float32 [B, T', N, H], without the scale, from what has been summed up."""
    if plan.interpret:
        return sums.sum(0)
    bq, width = plan.tiling.block_q, plan.tiling.dq_columns
    # Of 8 columns, a thread has a pair (e) of two rows (half); see write_registers.
    shape = (plan.B, plan.N, plan.q_blocks, bq // 64, plan.H // width, width // 8, 4, 8, 4, 2, 2)
    b, n, block, tile, part, eight, warp, row, column, half, e = range(11)
    order = b, block, tile, warp, half, row, n, part, eight, column, e
    return sums.reshape(shape).transpose(order).reshape(plan.B, plan.q_blocks * bq, plan.N, plan.H)


def memory(plan: KeyPlan) -> Any:
    width = plan.tiling.dq_columns
    if not plan.with_dq:
        return plgpu.SMEM((8,), jnp.float32)
    if plan.interpret:
        return plgpu.SMEM((plan.warpgroups, 64, width), jnp.float32)
    if plan.tiling.dq_by == "tma":
        return plgpu.SMEM((plan.warpgroups, width // 4, 256), jnp.float32)
    return plgpu.SMEM((8,), jnp.float32)


def issue(work: Work, t: Any, part: int, dq: Any):
    rows, columns = _parts(work)[part]
    plgpu.wgmma(dq, work.ds().at[lax.rem(t + 2, 2), :, rows].T, work.memory.k.at[:, columns])


def add(work: Work, t: Any, first: Any = None):
    """Adds dq of query block t, of which the first part may be given."""
    for part in range(len(_parts(work))):
        given = part == 0 and first is not None
        _add_part(work, t, part, first if given else _multiply(work, t, part))


def _parts(work: Work) -> list[tuple[Any, Any]]:
    """(rows, columns) of dq that the warpgroup computes, one after the other."""
    plan, width = work.plan, work.plan.tiling.dq_columns
    if plan.tiling.block_q == 64 * plan.warpgroups:
        rows, columns, first = work.warpgroup * 64, plan.H, 0
    else:
        rows, columns = 0, plan.H // plan.warpgroups
        first = work.warpgroup * columns
    return [(pl.ds(rows, 64), pl.ds(first + at, width)) for at in range(0, columns, width)]


def _multiply(work: Work, t: Any, part: int) -> Any:
    def multiply(dq):
        issue(work, t, part, dq)
        return dq[...]

    return pl.run_scoped(multiply, accumulator(64, work.plan.tiling.dq_columns))


def _add_part(work: Work, t: Any, part: int, dq: Any):
    plan, tile = work.plan, work.tile
    rows, columns = _parts(work)[part]
    head, block = query_block(plan, tile, t)
    memory, array = work.memory.own[0][1], work.arrays.dq
    if plan.interpret:
        rows = pl.ds(block * plan.tiling.block_q + rows.start, rows.size)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = memory.at[work.warpgroup]
        staged[...] = dq
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, array.at[tile.block, tile.b, rows, head, columns])
        return
    piece = ((tile.b * plan.N + head) * plan.q_blocks + block) * (plan.tiling.block_q // 64)
    piece = (piece + lax.div(rows.start, 64)) * (plan.H // columns.size)
    piece += lax.div(columns.start, columns.size)
    if plan.tiling.dq_by == "red":
        inline.write_registers(array, piece, dq, "red.global.add.v4.f32")
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    inline.write_registers(memory, work.warpgroup, dq, "st.shared.v4.f32")
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(memory.at[work.warpgroup], array.at[piece], reduction_op="add")
