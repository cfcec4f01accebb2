"""Matmul with a fused epilogue for Hopper, in Pallas Mosaic GPU.

One warpgroup of a CUDA block loads 64 columns of both operands at a time by TMA, and two multiply.
Blocks are persistent. The two alternate, each with its own tile: while one stores its tile (through
shared memory, 64 x 64 at a time), the other multiplies. This works because the operands are in one
queue, in which those of the next tile follow those of this one. Or the two share a tile, which
needs the least L2 and shared memory, but then the tensor cores idle while both store it.

A second input of the result's shape is loaded into the 64 x 64 buffers that the result is stored
from.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike, DTypeLike

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.hopper import Index

STEP = 64  # `GemmPlan.step` of 16-bit operands
PART = 64  # rows and columns of the result that are stored at once
WARPGROUPS = 2  # that multiply


def supports(target: Target, *arrays) -> str | None:
    """Return why the kernel cannot run; None = it can. arrays: inputs; the last dim is columns."""
    if reason := hopper.unsupported_reason(target):
        return reason
    for x in arrays:
        if x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != arrays[0].dtype:
            return f"needs bfloat16 or float16 throughout, got {[str(x.dtype) for x in arrays]}"
        # Mosaic drops the index of a dim that one part fills, and stores parts outside it there.
        if x.shape[-1] % STEP or x.shape[-1] <= PART or not x.size:
            return f"needs a last dim in multiples of {STEP} above it, got {list(x.shape)}"
    return None


class GemmTiling(NamedTuple):
    """rows, columns: size of a warpgroup's tile.

    shared: whether the warpgroups process vertically adjacent tiles together (else they alternate).
    stages: steps whose operands are in shared memory at once. parts: parts of the result that a
    warpgroup has there. cluster: CUDA blocks with vertically adjacent tiles, which load their
    columns of b together. group: rows of a cluster's tiles that are processed together, for the L2
    cache. blocks: number of CUDA blocks; None = one per multiprocessor.
    """

    rows: int = 128
    columns: int = 192
    shared: bool = False
    stages: int = 4
    parts: int = 3
    cluster: int = 2
    group: int = 8
    blocks: int | None = None

    @property
    def block_rows(self) -> int:
        return self.rows * (WARPGROUPS if self.shared else 1)


class GemmPlan(NamedTuple):
    """Static parameters of the kernel."""

    M: int
    N: int
    K: int
    dtype: DTypeLike
    b_is_NK: bool
    epilogue: Callable[..., jax.Array]
    other: bool
    tiling: GemmTiling
    clusters: int

    @property
    def step(self) -> int:
        """Columns of a and b that a step multiplies: a swizzled row of 128 bytes."""
        return 128 // jnp.dtype(self.dtype).itemsize

    @property
    def steps(self) -> int:
        return -(-self.K // self.step)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of cluster tiles, down and across."""
        tiling = self.tiling
        return -(-self.M // (tiling.block_rows * tiling.cluster)), -(-self.N // tiling.columns)

    @property
    def users(self) -> int:
        """Number of warpgroups that multiply a step."""
        return WARPGROUPS if self.tiling.shared else 1

    @property
    def places(self) -> list[tuple[int, int]]:
        """First row and column of each part in a warpgroup's tile."""
        tiling = self.tiling
        return [(r, c) for r in range(0, tiling.rows, PART) for c in range(0, tiling.columns, PART)]


class GemmArrays(NamedTuple):
    a: Any
    b: Any
    other: Any
    out: Any


class GemmMemory(NamedTuple):
    """Shared memory. a, b: by stage; parts: by warpgroup.

    full: barriers by user of a step and by stage, so that a warpgroup waits on each use of its own
    barriers. arrived: barriers of the other input's parts.
    """

    a: Any
    b: Any
    parts: Any
    full: Any
    free: Any
    arrived: Any = None


@hopper.jit_kernel("epilogue", "b_is_NK", "tiling", "interpret")
def matmul(
    a_MK,
    b,
    other_MN=None,
    *,
    epilogue: Callable[..., jax.Array] = lambda product: product,
    b_is_NK: bool = False,
    tiling: GemmTiling | None = None,
    interpret: hopper.Interpret = False,
) -> jax.Array:
    """epilogue(a b) in a's dtype, or epilogue(a b, other); b is [K, N], or [N, K] (b_is_NK).

    The epilogue gets float32, 64 x 64 at a time. interpret: plgpu.InterpretGPUParams, to run on a
    CPU.
    """
    tiling = tiling or GemmTiling()
    (M, K), N = a_MK.shape, b.shape[0 if b_is_NK else 1]
    plan = GemmPlan(M, N, K, a_MK.dtype, b_is_NK, epilogue, other_MN is not None, tiling, 0)
    blocks = tiling.blocks or hopper.sm_count()
    tiling = tiling._replace(parts=min(tiling.parts, len(plan.places)))
    clusters = min(blocks // tiling.cluster, plan.grid[0] * plan.grid[1])
    plan = plan._replace(tiling=tiling, clusters=clusters)

    def fused_matmul(*refs, **memory):
        a, b, *other, out = refs
        _block(plan, GemmArrays(a, b, other[0] if other else None, out), GemmMemory(**memory))

    stages, users = tiling.stages, WARPGROUPS // plan.users
    b_tile = (tiling.columns, STEP) if b_is_NK else (STEP, tiling.columns)
    scratch = dict(
        a=hopper.tiles((stages, tiling.block_rows, STEP), plan.dtype),
        b=hopper.tiles((stages, *b_tile), plan.dtype),
        parts=hopper.tiles((WARPGROUPS, tiling.parts, PART, PART), plan.dtype),
        full=plgpu.Barrier(num_barriers=users * stages, num_arrivals=2),
        free=plgpu.ClusterBarrier(
            num_barriers=stages, num_arrivals=plan.users, collective_axes=("peer",)
        ),
    )
    if plan.other:
        scratch["arrived"] = plgpu.Barrier(num_barriers=WARPGROUPS * tiling.parts)
    return hopper.pallas_kernel(
        fused_matmul,
        out_type=jax.ShapeDtypeStruct((M, N), plan.dtype),
        scratch_types=scratch,
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(tiling.cluster,),
        cluster_names=("peer",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
        interpret=interpret,
    )(*[x for x in (a_MK, b, other_MN) if x is not None])


def _block(plan: GemmPlan, arrays: GemmArrays, memory: GemmMemory):
    """One CUDA block."""
    hopper.specialize_warpgroups(
        WARPGROUPS,
        lambda: load_tiles(plan, arrays, memory),
        lambda warpgroup: _compute(GemmWork(plan, arrays, memory, warpgroup)),
    )


def rounds_of(plan: GemmPlan) -> jax.Array:
    """Number of tiles that this cluster processes."""
    down, across = plan.grid
    return lax.div(down * across - 1 - lax.axis_index("cluster"), plan.clusters) + 1


def place_of(plan: GemmPlan, t: Index) -> tuple[jax.Array, jax.Array]:
    """First row and column of the block's t-th tile."""
    row, column = tile_of(plan, lax.axis_index("cluster") + t * plan.clusters)
    tiling = plan.tiling
    row = row * tiling.cluster + lax.axis_index("peer")
    return row * tiling.block_rows, column * tiling.columns


def tile_of(
    plan: GemmPlan, number: ArrayLike, down: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """(row, column) of a cluster's tile: down a group of rows, then the next column.

    down: number of rows of tiles; None = the grid's.
    """
    (rows, across), group = plan.grid, plan.tiling.group
    down = rows if down is None else down
    first = lax.div(number, group * across) * group
    height = jnp.minimum(down - first, group)
    rest = lax.rem(number, group * across)
    return first + lax.rem(rest, height), lax.div(rest, height)


def full_barrier(plan: GemmPlan, memory: GemmMemory, t: Any, slot: Any) -> Any:
    """Barrier of a step's operands; if the warpgroups alternate, each has its own."""
    user = 0 if plan.tiling.shared else lax.rem(t, WARPGROUPS)
    return memory.full.at[user * plan.tiling.stages + slot]


def load_tiles(plan: GemmPlan, arrays: GemmArrays, memory: GemmMemory):
    """Load the operands of each tile's steps."""
    tiling = plan.tiling

    def load_step(row, column, at, slot, full):
        rows, columns = pl.ds(row, tiling.block_rows), pl.ds(column, tiling.columns)
        plgpu.copy_gmem_to_smem(arrays.a.at[rows, at], memory.a.at[slot], full)
        b = arrays.b.at[columns, at] if plan.b_is_NK else arrays.b.at[at, columns]
        plgpu.copy_gmem_to_smem(b, memory.b.at[slot], full, collective_axes=("peer",))

    load_steps(plan, memory, load_step)


def load_steps(plan: GemmPlan, memory: GemmMemory, load_step: Callable[..., None]):
    """Load each tile's steps: load_step(row, column, columns of a and b, stage, barrier)."""
    tiling = plan.tiling

    def load_tile(t, _):
        row, column = place_of(plan, t)

        def step(k, _):
            slot = lax.rem(t * plan.steps + k, tiling.stages)
            full, at = full_barrier(plan, memory, t, slot), pl.ds(k * plan.step, plan.step)
            plgpu.barrier_wait(memory.free.at[slot])
            load_step(row, column, at, slot, full)

        lax.fori_loop(0, plan.steps, step, None)

    rounds = rounds_of(plan)
    lax.fori_loop(0, rounds, load_tile, None)
    drain(plan, memory, rounds * plan.steps)


def drain(plan: GemmPlan, memory: GemmMemory, steps: Index):
    """Wait, after that many steps, until all slots are free.

    A block of a cluster must not exit before the others have signalled its free barriers.
    """
    stages = plan.tiling.stages

    def wait(step, _):
        plgpu.barrier_wait(memory.free.at[lax.rem(step, stages)])

    lax.fori_loop(steps, steps + stages, wait, None)


class GemmWork(NamedTuple):
    plan: GemmPlan
    arrays: GemmArrays
    memory: GemmMemory
    warpgroup: Index

    def own(self, row: jax.Array) -> jax.Array:
        """First row of the warpgroup's tile, from the first row of the block's tile."""
        return row + self.warpgroup * self.plan.tiling.rows if self.plan.tiling.shared else row

    def part(self, slot: Index) -> Any:
        return self.memory.parts.at[self.warpgroup, slot]

    def fetch(self, t: Index, n: int, used: Index) -> None:
        """Start to load part n of tile t's other input; used: number of parts before this tile."""
        tiling, (r, c) = self.plan.tiling, self.plan.places[n]
        row, column = place_of(self.plan, t)
        slot = lax.rem(used + n, tiling.parts)
        plgpu.copy_gmem_to_smem(
            self.arrays.other.at[pl.ds(self.own(row) + r, PART), pl.ds(column + c, PART)],
            self.part(slot),
            self.memory.arrived.at[self.warpgroup * tiling.parts + slot],
        )


def _compute(work: GemmWork):
    """Compute all tiles of one multiplying warpgroup."""
    plan, memory = work.plan, work.memory
    turns = 1 if plan.tiling.shared else WARPGROUPS
    rounds, first = rounds_of(plan), 0 if plan.tiling.shared else work.warpgroup
    rounds = lax.div(rounds - first + turns - 1, turns)
    free_all(plan, memory, work.warpgroup)

    def fetch_first():
        for n in range(parts_ahead(plan)):
            work.fetch(first, n, 0)

    if plan.other:
        pl.when(rounds > 0)(fetch_first)

    def tile(i, _):
        t = first + turns * i
        product = pl.run_scoped(
            lambda acc: multiply(work, t, i, acc),
            plgpu.WGMMAAccumulatorRef((plan.tiling.rows, plan.tiling.columns), jnp.float32),
        )
        plgpu.barrier_arrive(memory.free.at[lax.rem((t + 1) * plan.steps - 1, plan.tiling.stages)])
        _store(work, t, turns, i, i + 1 < rounds, product)

    lax.fori_loop(0, rounds, tile, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def free_all(plan: GemmPlan, memory: GemmMemory, warpgroup: Index):
    """Free all slots, before the first step."""

    def free():
        for slot in range(plan.tiling.stages):
            plgpu.barrier_arrive(memory.free.at[slot])

    if plan.tiling.shared:
        free()
    else:
        pl.when(warpgroup == 0)(free)


def parts_ahead(plan: GemmPlan) -> int:
    """Number of parts of the other input that the previous tile's epilogue prefetches."""
    return plan.tiling.parts - 1


def multiply(work: GemmWork, t: Any, i: Any, acc: Any):
    """Return the sum over a tile's steps; the last step's slot is not yet freed."""
    plan, memory = work.plan, work.memory
    tiling = plan.tiling

    def step(k, first: bool = False):
        slot = lax.rem(t * plan.steps + k, tiling.stages)
        plgpu.barrier_wait(full_barrier(plan, memory, t, slot))
        rows = pl.ds(work.warpgroup * tiling.rows, tiling.rows) if tiling.shared else slice(None)
        b = memory.b.at[slot]
        plgpu.wgmma(acc, memory.a.at[slot, rows], b.T if plan.b_is_NK else b)
        plgpu.wgmma_wait(1)
        if not first:
            last = lax.rem(t * plan.steps + k - 1, tiling.stages)
            plgpu.barrier_arrive(memory.free.at[last])

    step(0, first=True)
    if plan.other:
        # Wait until the last tile is stored; the matmuls continue meanwhile.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        work.fetch(t, parts_ahead(plan), i * len(plan.places))
    lax.fori_loop(1, plan.steps, lambda k, _: step(k), None)
    return acc[...]


def _store(work: GemmWork, t: Any, turns: int, i: Any, more: Any, product: Any):
    """Apply the epilogue to a tile's parts, and store them through shared memory."""
    plan, tiling = work.plan, work.plan.tiling
    row, column = place_of(plan, t)
    used = i * len(plan.places)
    for n, (r, c) in enumerate(plan.places):
        slot = lax.rem(used + n, tiling.parts)
        part, inputs = work.part(slot), [product[r : r + PART, c : c + PART]]
        if plan.other:
            plgpu.barrier_wait(work.memory.arrived.at[work.warpgroup * tiling.parts + slot])
            inputs.append(plgpu.load(part, layout=hopper.MATRIX).astype(jnp.float32))
        else:
            plgpu.wait_smem_to_gmem(tiling.parts - 1, wait_read_only=True)
        part[...] = plan.epilogue(*inputs).astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            part, work.arrays.out.at[pl.ds(work.own(row) + r, PART), pl.ds(column + c, PART)]
        )
        if plan.other and n > 0:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the previous part is stored
            following, count = n + parts_ahead(plan), len(plan.places)
            if following < count:
                work.fetch(t, following, used)
            else:
                fetch = functools.partial(work.fetch, t + turns, following - count, used + count)
                pl.when(more)(fetch)
