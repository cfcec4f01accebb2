"""Symmetric matmuls for Hopper, in Pallas Mosaic GPU: half of the tiles, each stored twice.

A thread block computes square tiles (i, j), i <= j, of out = a b^T. One warpgroup loads rows i of a
and rows j of b by TMA. Two or three others multiply 64 of the tile's rows each, store them, and
store their transpose as tile (j, i). Blocks are persistent, so that the next tile is loaded while
this one is stored.
"""

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

SMALLEST = 192  # the smallest size with correct results on a GPU; those of 64 were wrong
STEP = 64  # columns of a and b that a step multiplies: a swizzled row of 128 bytes


def supports(target: Target, x_LMK) -> str | None:
    if reason := hopper.unsupported_reason(target, x_LMK):
        return reason
    if any(size % STEP for size in x_LMK.shape[1:]):
        return f"needs rows and columns in multiples of {STEP}, got {list(x_LMK.shape[1:])}"
    if min(x_LMK.shape[1:]) < SMALLEST:
        return f"needs at least {SMALLEST} rows and columns, got {list(x_LMK.shape[1:])}"
    return None


class Tiling(NamedTuple):
    """warpgroups: number that multiply, 64 rows of a square tile each.

    stages: steps whose operands are in shared memory at once. blocks: number of CUDA blocks; None =
    one per multiprocessor.
    """

    warpgroups: int = 3
    stages: int = 3
    blocks: int | None = None

    @property
    def tile(self) -> int:
        return 64 * self.warpgroups


def default_tiling(rows: int) -> Tiling:
    """Choose the tiling: large tiles need less L2 bandwidth, but waste more at the edges."""
    small, large = Tiling(warpgroups=2, stages=5), Tiling()
    tiles = {t: -(-rows // t.tile) for t in (small, large)}
    area = {t: n * (n + 1) * t.tile**2 for t, n in tiles.items()}
    return small if area[small] * 1.15 < area[large] else large


class SymmetricPlan(NamedTuple):
    """Static parameters of the kernel."""

    L: int
    M: int
    K: int
    dtype: DTypeLike
    one: bool  # a is b
    polynomial: bool
    tiling: Tiling
    blocks: int

    @property
    def row_tiles(self) -> int:
        return -(-self.M // self.tiling.tile)

    @property
    def n_tiles(self) -> int:
        return self.L * self.row_tiles * (self.row_tiles + 1) // 2

    @property
    def steps(self) -> int:
        """Number of steps of a tile; a polynomial has whole tiles of columns, in its own order."""
        columns = self.row_tiles * self.tiling.tile if self.polynomial else self.K
        return -(-columns // STEP)

    def slot_barrier(self, slot: Index) -> Index:
        """Hardware barrier of a slot. CUDA uses 0, Mosaic 1 to the number of warpgroups."""
        return self.tiling.warpgroups + 2 + slot


class SymmetricMemory(NamedTuple):
    """Shared memory. operands [stages, a and b, rows, STEP]; out: 64x64 parts, by warpgroup."""

    operands: Any
    out: Any
    full: Any


class SymmetricArrays(NamedTuple):
    a: Any
    b: Any
    coefficients: Any
    out: Any


def gram(x_LMK, *, tiling=None, interpret: hopper.Interpret = False):
    """Backend of the public function. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    return _symmetric(x_LMK, None, None, tiling, interpret)


def square_polynomial(a_LMM, coefficients, *, tiling=None, interpret: hopper.Interpret = False):
    """Backend of the public function."""
    return _symmetric(a_LMM, None, coefficients, tiling, interpret)


def symmetric_product(a_LMM, b_LMM, *, tiling=None, interpret: hopper.Interpret = False):
    """Backend of the public function."""
    return _symmetric(a_LMM, b_LMM, None, tiling, interpret)


@hopper.jit_kernel("tiling", "interpret")
def _symmetric(a_LMK, b_LMK, coefficients, tiling: Tiling | None, interpret: hopper.Interpret):
    L, M, K = a_LMK.shape
    tiling = tiling or default_tiling(M)
    if coefficients is not None and tiling.stages < tiling.warpgroups:
        raise ValueError(f"a polynomial needs a stage for each warpgroup, got {tiling}")
    plan = SymmetricPlan(L, M, K, a_LMK.dtype, b_LMK is None, coefficients is not None, tiling, 0)
    plan = plan._replace(blocks=min(tiling.blocks or hopper.sm_count(), plan.n_tiles))
    arrays = [a_LMK] if b_LMK is None else [a_LMK, b_LMK]
    if coefficients is not None:
        # As an array, so that all polynomials share one compiled kernel.
        arrays.append(jnp.broadcast_to(jnp.asarray(coefficients, jnp.float32), (L, 3)))

    def symmetric_matmul(*refs, **memory):
        a, *others, out = refs
        coefficients = others.pop() if plan.polynomial else None
        b = others.pop() if others else a
        _block(plan, SymmetricArrays(a, b, coefficients, out), SymmetricMemory(**memory))

    W, stages = tiling.warpgroups, tiling.stages
    return hopper.pallas_kernel(
        symmetric_matmul,
        out_type=jax.ShapeDtypeStruct((L, M, M), plan.dtype),
        scratch_types=dict(
            operands=hopper.tiles((stages, 2, tiling.tile, STEP), plan.dtype),
            out=hopper.tiles((W, W, 64, 64), plan.dtype),
            full=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=W + 1,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(approx_math=False),
        interpret=interpret,
    )(*arrays)


def _block(plan: SymmetricPlan, arrays: SymmetricArrays, memory: SymmetricMemory):
    """One CUDA block."""

    def load():
        _each_tile(plan, lambda first, *tile: _load_tile(plan, arrays, memory, first, *tile))

    def compute(warpgroup):
        for slot in range(plan.tiling.stages):
            _free(plan, slot)
        work = SymmetricWork(plan, arrays, memory, warpgroup)
        _each_tile(plan, lambda first, *tile: _compute_tile(work, first, *tile))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    hopper.specialize_warpgroups(plan.tiling.warpgroups, load, compute)


def _each_tile(plan: SymmetricPlan, body: Callable[..., None]):
    """Call body(first, matrix, i, j) for this block's tiles; first: index of the first step."""

    def visit(t, _):
        body(t * plan.steps, *tile_of(plan, lax.axis_index("block") + t * plan.blocks))

    rounds = lax.div(plan.n_tiles - 1 - lax.axis_index("block"), plan.blocks) + 1
    lax.fori_loop(0, rounds, visit, None)


def tile_of(plan: SymmetricPlan, number: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(matrix, i, j) of a tile index: ordered by matrix, then roughly by row of the triangle."""
    R = plan.row_tiles
    # Rows p and last - p of the triangle together are as long as its first row, or one longer.
    width, last = (R + 1, R - 1) if R % 2 == 0 else (R, R)
    per_matrix = R * (R + 1) // 2
    rest = lax.rem(number, per_matrix)
    p, column = lax.div(rest, width), lax.rem(rest, width)
    in_row = column < R - p
    i = jnp.where(in_row, p, last - p)
    j = jnp.where(in_row, p + column, column - (R - p) + last - p)
    return lax.div(number, per_matrix), i, j


def _load_tile(
    plan: SymmetricPlan, arrays: SymmetricArrays, memory: SymmetricMemory, first, matrix, i, j
):
    tile, W = plan.tiling.tile, plan.tiling.warpgroups
    rows_i, rows_j = pl.ds(i * tile, tile), pl.ds(j * tile, tile)

    def load_step(t, _):
        slot = lax.rem(first + t, plan.tiling.stages)
        full = memory.full.at[slot]
        step = t
        if plan.polynomial:  # the tile of a that the polynomial adds is last, and stays
            own = t - (plan.steps - W)
            step = jnp.where(own >= 0, j * W + own, jnp.where(t >= j * W, t + W, t))
        columns = pl.ds(step * STEP, STEP)
        hopper.bar_sync(plan.slot_barrier(slot), W + 1)
        plgpu.copy_gmem_to_smem(
            arrays.a.at[matrix, rows_i, columns], memory.operands.at[slot, 0], full
        )

        def load_b():
            plgpu.copy_gmem_to_smem(
                arrays.b.at[matrix, rows_j, columns], memory.operands.at[slot, 1], full
            )

        if plan.one:
            lax.cond(i == j, lambda: plgpu.barrier_arrive(full), load_b)
        else:
            load_b()

    lax.fori_loop(0, plan.steps, load_step, None)


def _free(plan: SymmetricPlan, slot: Index):
    hopper.bar_arrive(plan.slot_barrier(slot), plan.tiling.warpgroups + 1)


class SymmetricWork(NamedTuple):
    plan: SymmetricPlan
    arrays: SymmetricArrays
    memory: SymmetricMemory
    warpgroup: jax.Array

    def rows(self) -> pl.Slice:
        return pl.ds(self.warpgroup * 64, 64)


def _compute_tile(work: SymmetricWork, first, matrix, i, j):
    """Compute one warpgroup's 64 rows of a tile."""
    plan, memory = work.plan, work.memory
    W, stages, dtype = plan.tiling.warpgroups, plan.tiling.stages, plan.dtype
    b = jnp.where(i == j, 0, 1) if plan.one else 1
    kept = W if plan.polynomial else 1  # slots that are freed after the last step

    def multiply(acc):
        def step(t, free: bool):
            slot = lax.rem(first + t, stages)
            plgpu.barrier_wait(memory.full.at[slot])
            operands = memory.operands.at[slot]
            plgpu.wgmma(acc, operands.at[0, work.rows()], operands.at[b].T)
            plgpu.wgmma_wait(1)
            if free:
                _free(plan, lax.rem(first + t - 1, stages))

        step(0, free=False)
        lax.fori_loop(1, plan.steps - kept + 1, lambda t, _: step(t, free=True), None)
        for t in range(plan.steps - kept + 1, plan.steps):
            step(t, free=False)
        return acc[...]

    product = pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((64, plan.tiling.tile), jnp.float32)
    )
    parts = [product[:, at : at + 64] for at in range(0, plan.tiling.tile, 64)]
    for n in range(kept):
        slot = lax.rem(first + plan.steps - kept + n, stages)
        if plan.polynomial:
            parts[n] = _polynomial(work, slot, matrix, parts[n], (i == j) & (work.warpgroup == n))
            plgpu.commit_smem()  # TMA next writes where ordinary loads have read
        _free(plan, slot)
    _store(work, [part.astype(dtype) for part in parts], matrix, i, j)


def _polynomial(work: SymmetricWork, slot, matrix, square, diagonal):
    """c0 I + c1 a + c2 a^2 of 64x64 values; the slot holds those of a."""
    c0, c1, c2 = (work.arrays.coefficients[matrix, n] for n in range(3))
    a = plgpu.load(work.memory.operands.at[slot, 0, work.rows()], layout=hopper.MATRIX)
    out = c2 * square + c1 * a.astype(jnp.float32)

    def with_identity(out):
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, (64, 64), d, layout=hopper.MATRIX) for d in (0, 1)
        )
        return jnp.where(row == column, out + c0, out)

    return lax.cond(diagonal, with_identity, lambda out: out, out)


def _store(work: SymmetricWork, parts: list, matrix, i, j):
    """Store a warpgroup's part of the tile, and its transpose unless the tile is diagonal."""
    plan, memory, out = work.plan, work.memory, work.arrays.out
    tile, W = plan.tiling.tile, plan.tiling.warpgroups
    rows = pl.ds(i * tile + work.warpgroup * 64, 64)
    columns = [pl.ds(j * tile + n * 64, 64) for n in range(W)]
    buffers = [memory.out.at[work.warpgroup, n] for n in range(W)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile is stored
    for buffer, part in zip(buffers, parts):
        buffer[...] = part
    plgpu.commit_smem()
    for buffer, at in zip(buffers, columns):
        plgpu.copy_smem_to_gmem(buffer, out.at[matrix, rows, at])

    @pl.when(i != j)
    def _():
        for buffer, part, at in zip(buffers, parts, columns):
            plgpu.wait_smem_to_gmem(W - 1, wait_read_only=True)  # the oldest buffer is stored
            buffer.T[...] = part
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out.at[matrix, at, rows])
