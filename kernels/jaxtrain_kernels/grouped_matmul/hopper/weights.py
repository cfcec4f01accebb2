"""The gradient of each group's matrix, for Hopper, in Pallas Mosaic GPU: products over its rows.

As in `matmul/hopper/gemm.py`, two warpgroups alternate, each with its own tile [K, N] of a group.
A step contracts 64 rows, and starts at a multiple of 64. In a group's first and last step, the
warpgroup zeros the rows of other groups in shared memory, in both operands: those rows may be any
values. Tiles of large groups come first, and every second round is in reverse order, so that blocks
end at about the same time. If few groups would leave many blocks idle in the last round, a group's
rows are split, and XLA sums the parts' products.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.grouped_matmul.hopper.table import largest_first
from jaxtrain_kernels.hopper import Index, Ref
from jaxtrain_kernels.matmul.hopper import gemm
from jaxtrain_kernels.matmul.hopper.gemm import PART, STEP, WARPGROUPS, GemmPlan, GemmTiling

MOST_PARTS = 3  # of a group's rows
FEWEST_ROWS = 8192  # of a group that is split: below, sums cost as much as is gained
PART_COST = 0.1  # of the time: sums of a part more


class WeightsArrays(NamedTuple):
    """x [rows, K], dy [rows, N], out [E, K, N]. groups: see `largest_first`.

    A group is a part of one where they are split.
    """

    x: Ref
    dy: Ref
    groups: Ref
    out: Ref


class WeightsWork(NamedTuple):
    """plan.gemm: of one group's matrix, [M, K] = [K, rows]; its steps are unused."""

    plan: GemmPlan
    E: int
    arrays: WeightsArrays
    memory: gemm.GemmMemory
    warpgroup: Index


class WeightsTile(NamedTuple):
    """A block's tile: from a row and a column of a group's matrix on; start, end: its rows."""

    group: jax.Array
    row: jax.Array
    column: jax.Array
    start: jax.Array
    end: jax.Array

    @property
    def first(self) -> jax.Array:
        """First row of the first step."""
        return lax.div(self.start, STEP) * STEP

    @property
    def steps(self) -> jax.Array:
        return lax.div(self.end - self.first + STEP - 1, STEP)


@hopper.jit_kernel("parts", "tiling", "interpret")
def weights_matmul(
    x_MK,
    dy_MN,
    sizes_E,
    *,
    parts: int | None = None,
    tiling: GemmTiling | None = None,
    interpret: hopper.Interpret = False,
) -> jax.Array:
    """x[rows of e]^T dy[rows of e], [E, K, N] in x's dtype; zeros for an empty group.

    parts: number of parts into which each group's rows are split; each is rounded to x's dtype
    before they are summed. None = what takes the least time. interpret: plgpu.InterpretGPUParams,
    to run on a CPU. Raises ValueError for a shared tile.
    """
    tiling = tiling or GemmTiling()
    if tiling.shared:
        raise ValueError(f"warpgroups cannot share a tile of a group's matrix, got {tiling}")
    (M, K), N, E = x_MK.shape, dy_MN.shape[1], len(sizes_E)
    plan = GemmPlan(K, N, M, x_MK.dtype, False, lambda product: product, False, tiling, 0)
    tiling = tiling._replace(parts=min(tiling.parts, len(plan.places)))
    blocks = tiling.blocks or hopper.sm_count()
    tiles, clusters = plan.grid[0] * plan.grid[1], blocks // tiling.cluster
    parts = parts or best_parts(M // E, E * tiles, clusters)
    P = E * parts
    clusters = min(clusters, P * tiles)
    plan = plan._replace(tiling=tiling, clusters=clusters)

    def grouped_weights_matmul(*refs, **memory):
        arrays = WeightsArrays(*refs)
        work = lambda warpgroup: WeightsWork(plan, P, arrays, gemm.GemmMemory(**memory), warpgroup)
        hopper.specialize_warpgroups(
            WARPGROUPS, lambda: _load(work(0)), lambda warpgroup: _compute(work(warpgroup))
        )

    stages = tiling.stages
    products_PKN = hopper.pallas_kernel(
        grouped_weights_matmul,
        out_type=jax.ShapeDtypeStruct((P, K, N), plan.dtype),
        scratch_types=dict(
            a=hopper.tiles((stages, STEP, tiling.rows), plan.dtype),
            b=hopper.tiles((stages, STEP, tiling.columns), plan.dtype),
            parts=hopper.tiles((WARPGROUPS, tiling.parts, PART, PART), plan.dtype),
            full=plgpu.Barrier(num_barriers=WARPGROUPS * stages, num_arrivals=2),
            free=plgpu.ClusterBarrier(
                num_barriers=stages, num_arrivals=1, collective_axes=("peer",)
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
    )(x_MK, dy_MN, largest_first(sizes_E, M, parts, STEP))
    if parts == 1:
        return products_PKN
    products_EpKN = products_PKN.reshape(E, parts, K, N)
    return jnp.sum(products_EpKN, axis=1, dtype=jnp.float32).astype(plan.dtype)


def best_parts(rows: int, tiles: int, clusters: int) -> int:
    """Number of parts of each group's rows whose rounds take the least time.

    rows: mean of a group. tiles: of all groups, which the clusters compute in rounds.
    """
    if rows < FEWEST_ROWS:
        return 1
    rounds = lambda parts: -(-tiles * parts // clusters) / parts
    return min(range(1, MOST_PARTS + 1), key=lambda p: rounds(p) * (1 + PART_COST * (p - 1)))


def _position(work: WeightsWork, t: Index) -> jax.Array:
    """This cluster's position in round t: every second round is in reverse.

    So a cluster with large tiles in one round has small ones in the next.
    """
    cluster = lax.axis_index("cluster")
    return jnp.where(lax.rem(t, 2) == 0, cluster, work.plan.clusters - 1 - cluster)


def _rounds(work: WeightsWork) -> jax.Array:
    """Number of tiles that this cluster processes."""
    down, across = work.plan.grid
    whole, rest = divmod(work.E * down * across, work.plan.clusters)
    return whole + jnp.where(_position(work, whole) < rest, 1, 0)


def _tile(work: WeightsWork, t: Index) -> WeightsTile:
    """Return the t-th tile of the block."""
    plan, tiling = work.plan, work.plan.tiling
    down, across = plan.grid
    number = t * plan.clusters + _position(work, t)
    rank = lax.div(number, down * across)
    row, column = gemm.tile_of(plan, lax.rem(number, down * across))
    row = (row * tiling.cluster + lax.axis_index("peer")) * tiling.rows
    group, start, end = (work.arrays.groups[rank, n] for n in range(3))
    return WeightsTile(group, row, column * tiling.columns, start, end)


def _load(work: WeightsWork):
    """Load the operands of each tile's steps."""
    plan, tiling, memory, arrays = work.plan, work.plan.tiling, work.memory, work.arrays

    def load_tile(t, begin):
        tile = _tile(work, t)
        rows, columns = pl.ds(tile.row, tiling.rows), pl.ds(tile.column, tiling.columns)

        def load_step(k, _):
            slot = lax.rem(begin + k, tiling.stages)
            full, at = gemm.full_barrier(plan, memory, t, slot), pl.ds(tile.first + k * STEP, STEP)
            plgpu.barrier_wait(memory.free.at[slot])
            plgpu.copy_gmem_to_smem(arrays.x.at[at, rows], memory.a.at[slot], full)
            plgpu.copy_gmem_to_smem(
                arrays.dy.at[at, columns], memory.b.at[slot], full, collective_axes=("peer",)
            )

        lax.fori_loop(0, tile.steps, load_step, None)
        return begin + tile.steps

    steps = lax.fori_loop(0, _rounds(work), load_tile, jnp.int32(0))
    gemm.drain(plan, memory, steps)


def _compute(work: WeightsWork):
    """Compute every second tile of the block, from the warpgroup's own on."""
    gemm.free_all(work.plan, work.memory, work.warpgroup)

    def compute_tile(t, state):
        begin, used = state
        tile = _tile(work, t)
        own = lax.rem(t, WARPGROUPS) == work.warpgroup

        @pl.when(own)
        def _():
            product = pl.run_scoped(
                lambda acc: _multiply(work, tile, t, begin, acc),
                plgpu.WGMMAAccumulatorRef((work.plan.tiling.rows, work.plan.tiling.columns)),
            )
            _store(work, tile, used, product)

        parts = len(work.plan.places)
        return begin + tile.steps, jnp.where(own, used + parts, used)

    lax.fori_loop(0, _rounds(work), compute_tile, (jnp.int32(0), jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _multiply(work: WeightsWork, tile: WeightsTile, t: Index, begin: Index, acc: Any):
    """Return the sum over a tile's steps; begin: number of the block's steps before them."""
    memory, stages = work.memory, work.plan.tiling.stages

    def free(step: Index):
        plgpu.barrier_arrive(memory.free.at[lax.rem(step, stages)])

    def step(k, _):
        slot = lax.rem(begin + k, stages)
        plgpu.barrier_wait(gemm.full_barrier(work.plan, memory, t, slot))
        row = tile.first + k * STEP

        @pl.when((row < tile.start) | (row + STEP > tile.end))
        def _():
            sizes = work.plan.tiling.rows, work.plan.tiling.columns
            for operand, size in zip((memory.a.at[slot], memory.b.at[slot]), sizes):
                zero_outside(operand, size, tile.start - row, tile.end - row)
            plgpu.commit_smem()

        plgpu.wgmma(acc, memory.a.at[slot].T, memory.b.at[slot])
        plgpu.wgmma_wait(1)
        pl.when(k > 0)(lambda: free(begin + k - 1))

    lax.fori_loop(0, tile.steps, step, None)
    product = acc[...]
    pl.when(tile.steps > 0)(lambda: free(begin + tile.steps - 1))
    return product


def zero_outside(operand: Ref, columns: int, start: Index, end: Index):
    """Zero the rows of a step's operand outside start .. end - 1."""
    for c in range(0, columns, PART):
        part = operand.at[:, pl.ds(c, PART)]
        row = plgpu.broadcasted_iota(jnp.int32, (STEP, PART), 0, layout=hopper.MATRIX)
        values = plgpu.load(part, layout=hopper.MATRIX)
        part[...] = jnp.where((row >= start) & (row < end), values, jnp.zeros_like(values))


def _store(work: WeightsWork, tile: WeightsTile, used: Index, product: jax.Array):
    """Store a tile through shared memory; used: number of the warpgroup's parts before it."""
    plan, tiling = work.plan, work.plan.tiling
    for n, (r, c) in enumerate(plan.places):
        part = work.memory.parts.at[work.warpgroup, lax.rem(used + n, tiling.parts)]
        plgpu.wait_smem_to_gmem(tiling.parts - 1, wait_read_only=True)
        part[...] = product[r : r + PART, c : c + PART].astype(plan.dtype)
        plgpu.commit_smem()
        rows, columns = pl.ds(tile.row + r, PART), pl.ds(tile.column + c, PART)
        plgpu.copy_smem_to_gmem(part, work.arrays.out.at[tile.group, rows, columns])
