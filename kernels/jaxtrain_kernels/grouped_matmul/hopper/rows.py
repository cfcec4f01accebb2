"""Each group of rows times its own matrix, for Hopper, in Pallas Mosaic GPU.

The pipeline is the one of `matmul/hopper/gemm.py`. Tiles of rows start at multiples of their size,
as TMA cannot load from every row. A tile in which groups meet is computed once for each group, of
which its own rows are stored, one by one. Rows after the last group are computed as well, and
stored as zeros.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.grouped_matmul.hopper.table import RowTile, RowTiles, row_tile, row_tiles
from jaxtrain_kernels.hopper import Index, Ref
from jaxtrain_kernels.matmul.hopper import gemm
from jaxtrain_kernels.matmul.hopper.gemm import PART, STEP, WARPGROUPS, GemmPlan, GemmTiling


class RowsPlan(NamedTuple):
    """Static parameters of the kernel. gemm.M counts all rows."""

    gemm: GemmPlan
    E: int


class RowsMemory(NamedTuple):
    """Shared memory. single: a part whose rows are stored one by one, by warpgroup."""

    gemm: gemm.GemmMemory
    single: Any


class RowsWork(NamedTuple):
    plan: RowsPlan
    arrays: gemm.GemmArrays
    tiles: RowTiles[Ref]
    memory: RowsMemory
    gemm: gemm.GemmWork


class Place(NamedTuple):
    """What a CUDA block computes: a tile of rows of one group, from a row and a column on."""

    tile: RowTile
    row: jax.Array
    column: jax.Array


@hopper.jit_kernel("b_is_NK", "tiling", "interpret")
def rows_matmul(
    a_MK,
    b,
    sizes_E,
    *,
    b_is_NK: bool = False,
    tiling: GemmTiling | None = None,
    interpret: hopper.Interpret = False,
) -> jax.Array:
    """a[rows of e] b[e] in a's dtype; b is [E, K, N], or [E, N, K] (b_is_NK).

    Rows after the last group give zeros. interpret: plgpu.InterpretGPUParams, to run on a CPU.
    """
    tiling = tiling or GemmTiling()
    (M, K), E, N = a_MK.shape, len(b), b.shape[1 if b_is_NK else 2]
    plan = GemmPlan(M, N, K, a_MK.dtype, b_is_NK, lambda product: product, False, tiling, 0)
    tiling = tiling._replace(parts=min(tiling.parts, len(plan.places)))
    tiles = row_tiles(sizes_E, M, tiling.block_rows * tiling.cluster)
    blocks = tiling.blocks or hopper.sm_count()
    clusters = min(blocks // tiling.cluster, len(tiles.pairs_P4) * plan.grid[1])
    whole = RowsPlan(plan._replace(tiling=tiling, clusters=clusters), E)

    def grouped_rows_matmul(*refs, single, **memory):
        a, b, pairs, count, out = refs
        _block(
            whole,
            gemm.GemmArrays(a, b, None, out),
            RowTiles(pairs, count),
            RowsMemory(gemm.GemmMemory(**memory), single),
        )

    stages, users = tiling.stages, WARPGROUPS // whole.gemm.users
    b_tile = (tiling.columns, STEP) if b_is_NK else (STEP, tiling.columns)
    return plgpu.kernel(
        grouped_rows_matmul,
        out_type=jax.ShapeDtypeStruct((M, N), plan.dtype),
        scratch_types=dict(
            a=hopper.tiles((stages, tiling.block_rows, STEP), plan.dtype),
            b=hopper.tiles((stages, *b_tile), plan.dtype),
            parts=hopper.tiles((WARPGROUPS, tiling.parts, PART, PART), plan.dtype),
            single=plgpu.SMEM((WARPGROUPS, PART, PART), plan.dtype),
            full=plgpu.Barrier(num_barriers=users * stages, num_arrivals=2),
            free=plgpu.ClusterBarrier(
                num_barriers=stages, num_arrivals=whole.gemm.users, collective_axes=("peer",)
            ),
        ),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(tiling.cluster,),
        cluster_names=("peer",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
        interpret=interpret,
    )(a_MK, b, *tiles)


def _block(plan: RowsPlan, arrays: gemm.GemmArrays, tiles: RowTiles[Ref], memory: RowsMemory):
    """One CUDA block."""

    def work(warpgroup: Index) -> RowsWork:
        work = gemm.GemmWork(plan.gemm, arrays, memory.gemm, warpgroup)
        return RowsWork(plan, arrays, tiles, memory, work)

    hopper.specialize_warpgroups(
        WARPGROUPS, lambda: _load(work(0)), lambda warpgroup: _compute(work(warpgroup))
    )


def _rounds(work: RowsWork) -> jax.Array:
    """Number of tiles that this cluster processes."""
    plan = work.plan.gemm
    count = work.tiles.count_1[0] * plan.grid[1]
    return lax.div(count + plan.clusters - 1 - lax.axis_index("cluster"), plan.clusters)


def _place(work: RowsWork, t: Index) -> Place:
    """Place of the block's t-th tile."""
    plan, tiling = work.plan.gemm, work.plan.gemm.tiling
    number = lax.axis_index("cluster") + t * plan.clusters
    pair, column = gemm.tile_of(plan, number, work.tiles.count_1[0])
    tile = row_tile(work.tiles, pair)
    row = tile.row + lax.axis_index("peer") * tiling.block_rows
    return Place(tile, row, column * tiling.columns)


def _load(work: RowsWork):
    """Load the operands of each tile's steps."""
    plan, tiling, memory = work.plan.gemm, work.plan.gemm.tiling, work.memory.gemm

    def load_tile(t, _):
        place = _place(work, t)
        rows = pl.ds(place.row, tiling.block_rows)
        columns = pl.ds(place.column, tiling.columns)
        matrix = work.arrays.b.at[jnp.minimum(place.tile.group, work.plan.E - 1)]

        def load_step(k, _):
            slot = lax.rem(t * plan.steps + k, tiling.stages)
            full, at = gemm.full_barrier(plan, memory, t, slot), pl.ds(k * plan.step, plan.step)
            plgpu.barrier_wait(memory.free.at[slot])
            plgpu.copy_gmem_to_smem(work.arrays.a.at[rows, at], memory.a.at[slot], full)
            b = matrix.at[columns, at] if plan.b_is_NK else matrix.at[at, columns]
            plgpu.copy_gmem_to_smem(b, memory.b.at[slot], full, collective_axes=("peer",))

        lax.fori_loop(0, plan.steps, load_step, None)

    rounds = _rounds(work)
    lax.fori_loop(0, rounds, load_tile, None)
    gemm.drain(plan, memory, rounds * plan.steps)


def _compute(work: RowsWork):
    """Compute all tiles of one multiplying warpgroup."""
    plan, tiling, memory = work.plan.gemm, work.plan.gemm.tiling, work.memory.gemm
    turns = 1 if tiling.shared else WARPGROUPS
    first = 0 if tiling.shared else work.gemm.warpgroup
    rounds = lax.div(_rounds(work) - first + turns - 1, turns)
    gemm.free_all(work.gemm)

    def tile(i, _):
        t = first + turns * i
        place = _place(work, t)
        product = pl.run_scoped(
            lambda acc: gemm.multiply(work.gemm, t, i, acc),
            plgpu.WGMMAAccumulatorRef((tiling.rows, tiling.columns), jnp.float32),
        )
        plgpu.barrier_arrive(memory.free.at[lax.rem((t + 1) * plan.steps - 1, tiling.stages)])
        _store(work, place, i, product)

    lax.fori_loop(0, rounds, tile, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(work: RowsWork, place: Place, i: Index, product: jax.Array):
    """Store the group's rows of a tile."""
    plan, tiling = work.plan.gemm, work.plan.gemm.tiling
    for n, (r, c) in enumerate(plan.places):
        row, column = work.gemm.own(place.row) + r, place.column + c
        values = product[r : r + PART, c : c + PART]
        values = values.astype(plan.dtype)
        slot = lax.rem(i * len(plan.places) + n, tiling.parts)
        store_part(work, values, slot, place.tile, row, column)


def store_part(
    work: RowsWork, values: jax.Array, slot: Index, tile: RowTile, row: Index, column: Index
):
    """Store a part at (row, column): by one copy, or only the rows of the tile's group."""
    parts, out, columns = work.plan.gemm.tiling.parts, work.arrays.out, pl.ds(column, PART)
    low, high = jnp.maximum(tile.start - row, 0), jnp.minimum(tile.end - row, PART)

    def write(part):
        part[...] = values

        # A select of the sums instead would make the compiler wait for each wgmma.
        @pl.when(tile.group == work.plan.E)
        def _():
            part[...] = plgpu.layout_cast(jnp.zeros_like(values), hopper.MATRIX)

        plgpu.commit_smem()

    def store_all():
        part = work.gemm.part(slot)
        plgpu.wait_smem_to_gmem(parts - 1, wait_read_only=True)
        write(part)
        plgpu.copy_smem_to_gmem(part, out.at[pl.ds(row, PART), columns])

    def store_some():
        single = work.memory.single.at[work.gemm.warpgroup]
        write(single)

        def store_row(m, _):
            plgpu.copy_smem_to_gmem(single.at[pl.ds(m, 1)], out.at[pl.ds(row + m, 1), columns])

        lax.fori_loop(low, high, store_row, None)
        # The next part overwrites it; and `store_all` counts one copy for each part.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond((low == 0) & (high == PART), store_all, store_some)
