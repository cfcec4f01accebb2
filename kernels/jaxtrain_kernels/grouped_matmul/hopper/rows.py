"""Each group of rows times its own matrix, for Hopper, in Pallas Mosaic GPU.

The pipeline is the one of `matmul/hopper/gemm.py`. Tiles of rows start at multiples of their size,
as TMA cannot load from every row. A tile in which groups meet is computed once for each group, of
which its own rows are stored, one by one. Rows after the last group are stored as zeros, last.

An epilogue may use a factor for each row and a second input of the result's shape, which is loaded
into the 64 x 64 buffers that the result is stored from. It may also sum values over each row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.grouped_matmul.hopper.table import RowTiles, TilePair, row_tiles, tile_pair
from jaxtrain_kernels.hopper import Index, Ref
from jaxtrain_kernels.matmul.hopper import gemm
from jaxtrain_kernels.matmul.hopper.gemm import PART, STEP, WARPGROUPS, GemmPlan, GemmTiling

SMALL_GROUP = 8192  # rows: a tile of 384 is 5% of them


def product_alone(product: jax.Array) -> jax.Array:
    return product


class Epilogue(NamedTuple):
    """function: (product, *factors, *other) -> the result or, with `sums`, (result, values).

    All are float32 and 64 x 64: the factors of the rows too. The values are summed over a row.
    """

    function: Callable[..., Any] = product_alone
    sums: bool = False


class RowsPlan(NamedTuple):
    """Static parameters of the kernel. gemm.M counts all rows."""

    gemm: GemmPlan
    E: int
    epilogue: Epilogue
    factors: bool
    other: bool


class RowsArrays(NamedTuple):
    """factors: [rows of all tiles]; sums: [columns of tiles, pairs x rows of a tile]."""

    gemm: gemm.GemmArrays
    tiles: RowTiles
    factors: Ref | None
    sums: Ref | None


class RowsMemory(NamedTuple):
    """Shared memory. single: a part whose rows are stored one by one, by warpgroup."""

    gemm: gemm.GemmMemory
    single: Ref


class RowsWork(NamedTuple):
    plan: RowsPlan
    arrays: RowsArrays
    memory: RowsMemory
    gemm: gemm.GemmWork


class RowsTile(NamedTuple):
    """What a CUDA block computes: a tile of rows of one group, from a row and a column on.

    sums: where the sums of its first row are.
    """

    pair: TilePair
    row: jax.Array
    column: jax.Array
    sums: jax.Array


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
    how = dict(b_is_NK=b_is_NK, tiling=tiling, interpret=interpret)
    return rows_matmul_with(a_MK, b, sizes_E, None, None, epilogue=Epilogue(), **how)[0]


@hopper.jit_kernel("epilogue", "b_is_NK", "tiling", "interpret")
def rows_matmul_with(
    a_MK,
    b,
    sizes_E,
    factors_M,
    other_MN,
    *,
    epilogue: Epilogue,
    b_is_NK: bool = False,
    tiling: GemmTiling | None = None,
    interpret: hopper.Interpret = False,
) -> list[jax.Array]:
    """[epilogue's result in a's dtype, and with `sums` the sums over rows, float32 [M]].

    The factors and the other input may be None. Raises ValueError for another input in one part.
    """
    (M, K), E, N = a_MK.shape, len(b), b.shape[1 if b_is_NK else 2]
    tiling = tiling or default_tiling(M // E, N, epilogue)
    if other_MN is not None and tiling.parts < 2:
        raise ValueError(f"another input needs two parts, got {tiling}")
    gemm_plan = GemmPlan(M, N, K, a_MK.dtype, b_is_NK, product_alone, False, tiling, 0)
    tiling = tiling._replace(parts=min(tiling.parts, len(gemm_plan.places)))
    rows = tiling.block_rows * tiling.cluster
    tiles, position_M = row_tiles(sizes_E, M, rows)
    blocks, across = tiling.blocks or hopper.sm_count(), gemm_plan.grid[1]
    clusters = min(blocks // tiling.cluster, len(tiles.pairs_P4) * across)
    gemm_plan = gemm_plan._replace(tiling=tiling, clusters=clusters)
    plan = RowsPlan(gemm_plan, E, epilogue, factors_M is not None, other_MN is not None)
    inputs = [a_MK, b, *tiles]
    if factors_M is not None:
        inputs.append(jnp.pad(factors_M.astype(jnp.float32), (0, -M % rows)))
    if other_MN is not None:
        inputs.append(other_MN)
    out_type = [jax.ShapeDtypeStruct((M, N), a_MK.dtype)]
    if epilogue.sums:
        length = len(tiles.pairs_P4) * rows
        out_type.append(jax.ShapeDtypeStruct((across, length), jnp.float32))

    def grouped_rows_matmul(*refs, **memory):
        _block(plan, refs, memory)

    results = hopper.pallas_kernel(
        grouped_rows_matmul,
        out_type=out_type,
        scratch_types=_shared_memory(plan),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(tiling.cluster,),
        cluster_names=("peer",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
        interpret=interpret,
    )(*inputs)
    if epilogue.sums:
        inside_M = jnp.arange(M) < jnp.sum(sizes_E)
        results[1] = jnp.where(inside_M, jnp.sum(results[1], axis=0)[position_M], 0)
    return results


def default_tiling(rows: int, columns: int, epilogue: Epilogue) -> GemmTiling:
    """Choose by timings on an H200; rows: mean of a group.

    A tile in which groups meet is computed for each, so small groups get small tiles. A tile of 192
    rows is the faster one, but its epilogue has no registers left for the factors of more rows.
    """
    if rows < SMALL_GROUP:
        return GemmTiling(cluster=1)
    tall = epilogue.function is product_alone and columns % 128 == 0
    return GemmTiling(rows=192, columns=128) if tall else GemmTiling()


def _shared_memory(plan: RowsPlan) -> dict[str, Any]:
    tiling, dtype = plan.gemm.tiling, plan.gemm.dtype
    stages, users = tiling.stages, WARPGROUPS // plan.gemm.users
    b_tile = (tiling.columns, STEP) if plan.gemm.b_is_NK else (STEP, tiling.columns)
    memory = dict(
        a=hopper.tiles((stages, tiling.block_rows, STEP), dtype),
        b=hopper.tiles((stages, *b_tile), dtype),
        parts=hopper.tiles((WARPGROUPS, tiling.parts, PART, PART), dtype),
        single=plgpu.SMEM((WARPGROUPS, PART, PART), dtype),
        full=plgpu.Barrier(num_barriers=users * stages, num_arrivals=2),
        free=plgpu.ClusterBarrier(
            num_barriers=stages, num_arrivals=plan.gemm.users, collective_axes=("peer",)
        ),
    )
    if plan.other:
        memory["arrived"] = plgpu.Barrier(num_barriers=WARPGROUPS * tiling.parts)
    return memory


def _block(plan: RowsPlan, refs: tuple[Any, ...], memory: dict[str, Any]):
    """One CUDA block."""
    a, b, pairs, counts, *rest = refs
    factors = rest.pop(0) if plan.factors else None
    other = rest.pop(0) if plan.other else None
    out, sums = rest if plan.epilogue.sums else (rest[0], None)
    of_gemm = gemm.GemmArrays(a, b, other, out)
    arrays = RowsArrays(of_gemm, RowTiles(pairs, counts), factors, sums)
    single = memory.pop("single")
    shared = RowsMemory(gemm.GemmMemory(**memory), single)

    def work(warpgroup: Index) -> RowsWork:
        return RowsWork(
            plan, arrays, shared, gemm.GemmWork(plan.gemm, of_gemm, shared.gemm, warpgroup)
        )

    hopper.specialize_warpgroups(
        WARPGROUPS, lambda: _load(work(0)), lambda warpgroup: _compute(work(warpgroup))
    )


def _rounds(work: RowsWork, count: jax.Array) -> jax.Array:
    """Number of tiles that this cluster processes; count: of all tiles."""
    clusters = work.plan.gemm.clusters
    return lax.div(count + clusters - 1 - lax.axis_index("cluster"), clusters)


def _count(work: RowsWork) -> jax.Array:
    """Number of tiles of groups."""
    return work.arrays.tiles.counts_2[0] * work.plan.gemm.grid[1]


def _tile(work: RowsWork, count: jax.Array, t: Index) -> RowsTile:
    """Return the t-th tile of the block, or the last of all."""
    plan, tiling, tiles = work.plan.gemm, work.plan.gemm.tiling, work.arrays.tiles
    count = jnp.maximum(count, plan.grid[1])  # if no group has rows, a tile that nobody computes
    number = jnp.minimum(lax.axis_index("cluster") + t * plan.clusters, count - 1)
    index, column = gemm.tile_of(plan, number, lax.div(count, plan.grid[1]))
    pair, below = tile_pair(tiles, index), lax.axis_index("peer") * tiling.block_rows
    sums = index * (tiling.block_rows * tiling.cluster) + below
    return RowsTile(pair, pair.row + below, column * tiling.columns, sums)


def _load(work: RowsWork):
    """Load the operands of each tile's steps."""
    plan, tiling, memory = work.plan.gemm, work.plan.gemm.tiling, work.memory.gemm
    a, b = work.arrays.gemm.a, work.arrays.gemm.b

    count = _count(work)

    def load_tile(t, tile):
        following = _tile(work, count, t + 1)  # which arrives while this tile's steps are loaded
        rows = pl.ds(tile.row, tiling.block_rows)
        columns = pl.ds(tile.column, tiling.columns)
        matrix = b.at[tile.pair.group]

        def load_step(k, _):
            slot = lax.rem(t * plan.steps + k, tiling.stages)
            full, at = gemm.full_barrier(plan, memory, t, slot), pl.ds(k * plan.step, plan.step)
            plgpu.barrier_wait(memory.free.at[slot])
            plgpu.copy_gmem_to_smem(a.at[rows, at], memory.a.at[slot], full)
            part = matrix.at[columns, at] if plan.b_is_NK else matrix.at[at, columns]
            plgpu.copy_gmem_to_smem(part, memory.b.at[slot], full, collective_axes=("peer",))

        lax.fori_loop(0, plan.steps, load_step, None)
        return following

    rounds = _rounds(work, count)
    lax.fori_loop(0, rounds, load_tile, _tile(work, count, 0))
    gemm.drain(plan, memory, rounds * plan.steps)


def _compute(work: RowsWork):
    """Compute all tiles of one multiplying warpgroup."""
    plan, tiling, memory = work.plan.gemm, work.plan.gemm.tiling, work.memory.gemm
    turns = 1 if tiling.shared else WARPGROUPS
    first = 0 if tiling.shared else work.gemm.warpgroup
    count = _count(work)
    rounds = lax.div(_rounds(work, count) - first + turns - 1, turns)
    gemm.free_all(plan, memory, work.gemm.warpgroup)

    def compute_tile(i, _):
        t = first + turns * i
        tile, used = _tile(work, count, t), i * len(plan.places)
        if work.plan.other:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile is stored
            for n in range(tiling.parts):
                _fetch(work, tile, n, used)
        product = pl.run_scoped(
            lambda acc: gemm.multiply(work.gemm, t, i, acc),
            plgpu.WGMMAAccumulatorRef((tiling.rows, tiling.columns), jnp.float32),
        )
        plgpu.barrier_arrive(memory.free.at[lax.rem((t + 1) * plan.steps - 1, tiling.stages)])
        _store(work, tile, used, product, _factors(work, tile))

    lax.fori_loop(0, rounds, compute_tile, None)
    _clear(work)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _clear(work: RowsWork):
    """Store zeros in the rows after the last group."""
    plan, tiling, tiles = work.plan.gemm, work.plan.gemm.tiling, work.arrays.tiles
    single = work.memory.single.at[work.gemm.warpgroup]
    single[...] = plgpu.layout_cast(jnp.zeros((PART, PART), plan.dtype), hopper.MATRIX)
    plgpu.commit_smem()
    turns = 1 if tiling.shared else WARPGROUPS
    first = 0 if tiling.shared else work.gemm.warpgroup

    def clear_tile(i, _):
        number = lax.axis_index("cluster") + (first + turns * i) * plan.clusters
        pair = tile_pair(tiles, tiles.counts_2[0] + lax.div(number, plan.grid[1]))
        row = work.gemm.own(pair.row + lax.axis_index("peer") * tiling.block_rows)
        for r, c in plan.places:
            column = lax.rem(number, plan.grid[1]) * tiling.columns + c
            low, high = _inside(pair, row + r)
            store_all = lambda r=r, column=column: plgpu.copy_smem_to_gmem(
                single, work.arrays.gemm.out.at[pl.ds(row + r, PART), pl.ds(column, PART)]
            )
            store_some = functools.partial(_store_rows, work, low, high, row + r, column)
            lax.cond((low == 0) & (high == PART), store_all, store_some)

    count = (tiles.counts_2[1] - tiles.counts_2[0]) * plan.grid[1]
    rounds = lax.div(_rounds(work, count) - first + turns - 1, turns)
    lax.fori_loop(0, rounds, clear_tile, None)


def _factors(work: RowsWork, tile: RowsTile) -> list[jax.Array]:
    """Load the factors of a tile's rows, [64] each, while its operands are on the way."""
    if (factors := work.arrays.factors) is None:
        return []
    rows = [work.gemm.own(tile.row) + r for r in range(0, work.plan.gemm.tiling.rows, PART)]
    load = lambda row: plgpu.load(factors.at[pl.ds(row, PART)], layout=hopper.ROWS, optimized=False)
    return [load(row) for row in rows]


def _fetch(work: RowsWork, tile: RowsTile, n: int, used: Index):
    """Start to load part n of a tile's other input; used: number of parts before this tile."""
    tiling, (r, c) = work.plan.gemm.tiling, work.plan.gemm.places[n]
    rows, columns = pl.ds(work.gemm.own(tile.row) + r, PART), pl.ds(tile.column + c, PART)
    plgpu.copy_gmem_to_smem(
        work.arrays.gemm.other.at[rows, columns],
        work.gemm.part(lax.rem(used + n, tiling.parts)),
        _arrived(work, n, used),
    )


def _arrived(work: RowsWork, n: int, used: Index) -> Any:
    parts = work.plan.gemm.tiling.parts
    return work.memory.gemm.arrived.at[work.gemm.warpgroup * parts + lax.rem(used + n, parts)]


def _store(
    work: RowsWork, tile: RowsTile, used: Index, product: jax.Array, factors: list[jax.Array]
):
    """Apply the epilogue to a tile's parts, and store the rows of its group."""
    plan, tiling, arrays = work.plan.gemm, work.plan.gemm.tiling, work.arrays
    sums: dict[int, jax.Array] = {}
    for n, (r, c) in enumerate(plan.places):
        row, slot = work.gemm.own(tile.row) + r, lax.rem(used + n, tiling.parts)
        inputs = [product[r : r + PART, c : c + PART]]
        if factors:
            inputs.append(lax.broadcast_in_dim(factors[r // PART], (PART, PART), [0]))
        if work.plan.other:
            plgpu.barrier_wait(_arrived(work, n, used))
            inputs.append(
                plgpu.load(work.gemm.part(slot), layout=hopper.MATRIX).astype(jnp.float32)
            )
        values = work.plan.epilogue.function(*inputs)
        if arrays.sums is not None:
            values, summed = values
            summed = jnp.sum(summed, axis=1)
            sums[r] = sums[r] + summed if r in sums else summed
        _store_part(work, values.astype(plan.dtype), slot, tile.pair, row, tile.column + c)
        if work.plan.other and 0 < n <= len(plan.places) - tiling.parts:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the previous part is stored
            _fetch(work, tile, n + tiling.parts - 1, used)
    if arrays.sums is not None:
        across = lax.div(tile.column, tiling.columns)
        for r, summed in sums.items():
            arrays.sums[across, pl.ds(work.gemm.own(tile.sums) + r, PART)] = summed


def _store_part(
    work: RowsWork, values: jax.Array, slot: Index, pair: TilePair, row: Index, column: Index
):
    """Store a part at (row, column): by one copy, or only the rows of the tile's group."""
    parts, out = work.plan.gemm.tiling.parts, work.arrays.gemm.out
    low, high = _inside(pair, row)

    def store_all():
        part = work.gemm.part(slot)
        if not work.plan.other:  # with which the part was loaded
            plgpu.wait_smem_to_gmem(parts - 1, wait_read_only=True)
        part[...] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(part, out.at[pl.ds(row, PART), pl.ds(column, PART)])

    def store_some():
        work.memory.single.at[work.gemm.warpgroup][...] = values
        plgpu.commit_smem()
        _store_rows(work, low, high, row, column)
        # The next part overwrites it; and `store_all` counts one copy for each part.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond((low == 0) & (high == PART), store_all, store_some)


def _inside(pair: TilePair, row: Index) -> tuple[jax.Array, jax.Array]:
    """Which rows of a part, from its first row on, are the pair's: low .. high - 1."""
    return jnp.maximum(pair.start - row, 0), jnp.minimum(pair.end - row, PART)


def _store_rows(work: RowsWork, low: Index, high: Index, row: Index, column: Index):
    """Store some rows of `single`, whose first one is `row`."""
    single, out = work.memory.single.at[work.gemm.warpgroup], work.arrays.gemm.out

    def store_row(m, _):
        to = out.at[pl.ds(row + m, 1), pl.ds(column, PART)]
        plgpu.copy_smem_to_gmem(single.at[pl.ds(m, 1)], to)

    # Mosaic copies one row as contiguous bytes: columns outside would be the next row's.
    lax.fori_loop(low, jnp.where(column < work.plan.gemm.N, high, low), store_row, None)
