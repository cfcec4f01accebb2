"""Float8 matmul for Hopper, in Pallas Mosaic GPU, with the casts in its epilogue.

The matmul is that of `matmul.hopper.gemm`, with steps of 128 columns and tiles of 128 rows. Even
and odd rows of a are loaded apart, and so are those of b. So each thread has 2 x 4 neighbours of
the result (`registers`). It computes them once, and writes both layouts from its registers.

Two warpgroups alternate: one's epilogue overlaps the other's matmul. With a second input they
share a tile, and nothing overlaps the epilogue. The tensor cores' own sum has about 14 bits. Where
that is too few (`exact`), each step's result is added to a float32 sum in registers, and the
warpgroups take turns: one adds while the other multiplies.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.hopper import Index, Ref
from jaxtrain_kernels.matmul.fp8.functions import Function
from jaxtrain_kernels.matmul.fp8_epilogue import registers
from jaxtrain_kernels.matmul.fp8_epilogue.reference import ProductOptions
from jaxtrain_kernels.matmul.fp8_epilogue.registers import BLOCKS
from jaxtrain_kernels.matmul.hopper import gemm
from jaxtrain_kernels.matmul.hopper.gemm import WARPGROUPS, GemmPlan, GemmTiling

STEP = 128  # columns of a and b that a step multiplies
ROWS = 128  # of a warpgroup's tile
PART = 64  # columns of it that the function is applied to at once
THREADS = 128  # of a warpgroup
TURN = 8  # the first of the hardware barriers by which the warpgroups take turns
FETCH = 3  # the step in which a second input is loaded: the last tile's result is stored by then
SHARED_BYTES = 226 * 1024  # per block; 1 KiB of Hopper's shared memory is left for barriers
# The fastest of those measured on an H200 at gpt_d24's sizes (`bench matmul`).
FAST = GemmTiling(ROWS, columns=192, stages=4, parts=1)
SHARED = GemmTiling(ROWS, columns=128, shared=True, stages=3, parts=1, cluster=1)  # two inputs


def supports(target: Target, options: ProductOptions, a_MK, b_NK, *others) -> str | None:
    if reason := hopper.unsupported_reason(target, *others):
        return reason
    if any(x.dtype not in (jnp.float8_e4m3fn, jnp.float8_e5m2) for x in (a_MK, b_NK)):
        return f"needs operands in float8, got {a_MK.dtype} and {b_NK.dtype}"
    if jnp.dtype(options.product_dtype) != jnp.bfloat16:
        return f"needs a product in bfloat16, got {jnp.dtype(options.product_dtype)}"
    if options.keep and others:
        return "keeps no product where a second input is read"
    (M, K), N = a_MK.shape, len(b_NK)
    if M % ROWS or N % ROWS or K % STEP or not K or min(M, N) <= ROWS:
        return f"needs rows in multiples of {ROWS} above it and a sum of {STEP}, got {(M, N, K)}"
    return None


class EpiloguePlan(NamedTuple):
    """Static parameters of the kernel. gemm: plan of the matmul, whose `other` is False.

    other: whether a second input of the result's shape is read. keep: whether the product is
    written. interpret: whether the kernel runs on a CPU.
    """

    gemm: GemmPlan
    function: Function
    dtype: DTypeLike
    other: bool
    keep: bool
    exact: bool
    interpret: bool

    @property
    def width(self) -> int:
        """Columns that are stored at once."""
        return self.gemm.tiling.columns if self.gemm.tiling.shared else PART

    @property
    def shared_bytes(self) -> int:
        """Bytes of the operands' stages and of the results in both layouts, or the second input."""
        tiling = self.gemm.tiling
        stage = (tiling.block_rows + tiling.columns) * STEP
        return tiling.stages * stage + WARPGROUPS * tiling.parts * ROWS * self.width * 2


class EpilogueArrays(NamedTuple):
    """gemm.a, gemm.b: [rows / 2, 2, K].

    scale: of the product. multiplier: of the function's value before the cast. most: amax of each
    thread.
    """

    gemm: gemm.GemmArrays
    scale: Ref
    multiplier: Ref
    q_MN: Ref
    q_NM: Ref
    most: Ref
    product: Ref | None


class EpilogueMemory(NamedTuple):
    """Shared memory. gemm.a: [stage, 2, rows / 2, STEP]. gemm.parts: the second input by warpgroup,
    whose barriers are gemm.arrived. results: in float8, by warpgroup and part, of each layout; with
    a second input both in one array.
    """

    gemm: gemm.GemmMemory
    results: tuple[Ref, ...]


class EpilogueWork(NamedTuple):
    plan: EpiloguePlan
    arrays: EpilogueArrays
    memory: EpilogueMemory
    gemm: gemm.GemmWork
    scale: jax.Array
    multiplier: jax.Array

    def results(self, part: int) -> tuple[Ref, Ref]:
        """Shared memory of a part's result, not transposed and transposed."""
        warpgroup = self.gemm.warpgroup
        if self.plan.other:
            [both] = self.memory.results
            return both.at[warpgroup, 0], both.at[warpgroup, 1]
        slot = part % self.plan.gemm.tiling.parts
        q, qt = self.memory.results
        return q.at[warpgroup, slot], qt.at[warpgroup, slot]


def product_quantized(
    options,
    operands,
    scale,
    multiplier,
    *,
    tiling: GemmTiling | None = None,
    interpret: hopper.Interpret = False,
):
    """Backend like `reference`. interpret: plgpu.InterpretGPUParams, to run on a CPU.

    With a second input, `options.function` is linear in it, which is where both factors go: they
    are powers of two.
    """
    # Two arrays: XLA computes the scalars of all layers in one kernel, but stacks each pair in one.
    factors = [x.astype(jnp.float32).reshape(1) for x in (scale, multiplier)]
    q_MN, q_NM, most, *product = _product(options, operands, factors, tiling, interpret)
    seen = most / multiplier if len(operands) > 2 else most
    return q_MN, q_NM, seen, product[0] if options.keep else None


@hopper.jit_kernel("options", "tiling", "interpret")
def _product(options, operands, factors, tiling, interpret):
    """Return [q_MN, q_NM, most, and with `keep` the product]."""
    a_MK, b_NK, *others = operands
    (M, K), N = a_MK.shape, len(b_NK)
    plan = _plan(options, (M, N, K), a_MK.dtype, bool(others), tiling, bool(interpret))
    tiling, plan_of_gemm = plan.gemm.tiling, plan.gemm

    def fp8_epilogue_matmul(*refs, a, b, results, full, free, arrived=None):
        inputs, outputs = refs[: 4 + plan.other], refs[4 + plan.other :]
        given = gemm.GemmArrays(inputs[0], inputs[1], inputs[2] if plan.other else None, None)
        q_MN, q_NM, most, *kept = outputs
        scale, multiplier = inputs[-2:]
        kept = kept[0] if plan.keep else None
        arrays = EpilogueArrays(given, scale, multiplier, q_MN, q_NM, most, kept)
        other, results = (results[0], results[1:]) if plan.other else (None, results)
        memory = EpilogueMemory(gemm.GemmMemory(a, b, other, full, free, arrived), tuple(results))
        hopper.specialize_warpgroups(
            WARPGROUPS,
            lambda: _load(plan_of_gemm, arrays.gemm, memory.gemm),
            lambda warpgroup: _compute(
                EpilogueWork(
                    plan, arrays, memory,
                    gemm.GemmWork(plan_of_gemm, arrays.gemm, memory.gemm, warpgroup),
                    arrays.scale[0], arrays.multiplier[0],
                )
            ),
        )  # fmt: skip

    stages, users = tiling.stages, WARPGROUPS // plan_of_gemm.users
    scratch = dict(
        a=hopper.tiles((stages, 2, tiling.block_rows // 2, STEP), a_MK.dtype),
        b=hopper.tiles((stages, tiling.columns, STEP), b_NK.dtype),
        results=_results(plan, options.product_dtype),
        full=plgpu.Barrier(num_barriers=users * stages, num_arrivals=3),
        free=plgpu.ClusterBarrier(
            num_barriers=stages, num_arrivals=plan_of_gemm.users, collective_axes=("peer",)
        ),
    )
    if plan.other:
        scratch["arrived"] = plgpu.Barrier(num_barriers=WARPGROUPS)
    blocks = plan_of_gemm.clusters * tiling.cluster
    out_type = [
        jax.ShapeDtypeStruct((M, N), options.dtype),
        jax.ShapeDtypeStruct((N, M), options.dtype),
        jax.ShapeDtypeStruct((blocks * WARPGROUPS, THREADS), jnp.float32),
    ]
    if plan.keep:
        out_type.append(jax.ShapeDtypeStruct((M, N), options.product_dtype))
    return hopper.pallas_kernel(
        fp8_epilogue_matmul,
        out_type=out_type,
        scratch_types=scratch,
        grid=(plan_of_gemm.clusters,),
        grid_names=("cluster",),
        cluster=(tiling.cluster,),
        cluster_names=("peer",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(approx_math=False),
        interpret=interpret,
    )(a_MK.reshape(M // 2, 2, K), b_NK.reshape(N // 2, 2, K), *others, *factors)


def _plan(options, sizes, dtype, other: bool, tiling: GemmTiling | None, interpret: bool):
    """Make the plan of a call. Raises ValueError for an unsuitable tiling."""
    tiling = tiling or (SHARED if options.exact or other else FAST)
    if options.exact and not tiling.shared:
        raise ValueError(f"a sum in float32 needs a tile that warpgroups share, got {tiling}")
    M, N, K = sizes
    plan = GemmPlan(M, N, K, dtype, True, lambda product: product, False, tiling, 0)
    blocks = tiling.blocks or hopper.sm_count()
    clusters = min(blocks // tiling.cluster, plan.grid[0] * plan.grid[1])
    keep, exact = options.keep, options.exact
    whole = EpiloguePlan(
        plan._replace(clusters=clusters), options.function, options.dtype, other, keep, exact,
        interpret,
    )  # fmt: skip
    if other and whole.width != ROWS:
        raise ValueError(f"a second input needs a shared tile of {ROWS} columns, got {tiling}")
    if tiling.rows != ROWS or tiling.columns % PART or whole.shared_bytes > SHARED_BYTES:
        raise ValueError(
            f"a tile needs {ROWS} rows, columns in multiples of {PART}, and up to {SHARED_BYTES} "
            f"bytes, got {tiling} with {whole.shared_bytes}"
        )
    return whole


def _results(plan: EpiloguePlan, product_dtype: DTypeLike):
    """Shared memory of the second input, and of the results in both layouts."""
    tiling, width = plan.gemm.tiling, plan.width
    if plan.other:
        other = hopper.tiles((WARPGROUPS, ROWS, width), product_dtype)
        both = hopper.tiles((WARPGROUPS, 2, ROWS, width), plan.dtype)
        # The results replace it. (The detection of races takes a warpgroup's use of one view, and
        # the other's of the other, for a race.)
        return [other, both] if plan.interpret else plgpu.RefUnion(other, both)
    return [
        hopper.tiles((WARPGROUPS, tiling.parts, ROWS, width), plan.dtype),
        hopper.tiles((WARPGROUPS, tiling.parts, width, ROWS), plan.dtype),
    ]


def _load(plan: GemmPlan, arrays: gemm.GemmArrays, memory: gemm.GemmMemory):
    """Load the operands of each tile's steps: first even rows, then odd ones."""
    tiling = plan.tiling
    half = tiling.columns // 2

    def load_step(row, column, at, slot, full):
        rows = pl.ds(lax.div(row, 2), tiling.block_rows // 2)
        even_then_odd = memory.a.at[slot].transpose((1, 0, 2))
        hopper.untyped.copy_gmem_to_smem(arrays.a.at[rows, :, at], even_then_odd, full)
        for odd in range(2):
            hopper.untyped.copy_gmem_to_smem(
                arrays.b.at[pl.ds(lax.div(column, 2), half), odd, at],
                memory.b.at[slot, pl.ds(odd * half, half)],
                full,
                collective_axes=("peer",),
            )

    gemm.load_steps(plan, memory, load_step)


def _compute(work: EpilogueWork):
    """Compute all tiles of one multiplying warpgroup."""
    plan, tiling = work.plan, work.plan.gemm.tiling
    turns = 1 if tiling.shared else WARPGROUPS
    first = 0 if tiling.shared else work.gemm.warpgroup
    rounds = lax.div(gemm.rounds_of(plan.gemm) - first + turns - 1, turns)
    gemm.free_all(plan.gemm, work.memory.gemm, work.gemm.warpgroup)

    def tile(i, most):
        t = first + turns * i
        return _store(work, t, _sum_exactly(work, t) if plan.exact else _sum(work, t), most)

    if plan.exact:
        pl.when(work.gemm.warpgroup == 1)(lambda: hopper.bar_arrive(TURN, WARPGROUPS))
    most = lax.fori_loop(0, rounds, tile, registers.zero_per_thread())
    if plan.exact:
        pl.when(work.gemm.warpgroup == 0)(lambda: hopper.bar_sync(TURN, WARPGROUPS))
    block = lax.axis_index("cluster") * tiling.cluster + lax.axis_index("peer")
    work.arrays.most[block * WARPGROUPS + work.gemm.warpgroup] = most
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sum(work: EpilogueWork, t: Index) -> jax.Array:
    """Return a tile's product, accumulated by the tensor cores."""
    plan, tiling, memory = work.plan.gemm, work.plan.gemm.tiling, work.memory.gemm

    def multiply(even, odd):
        def step(k, first: bool = False):
            _fetch_other(work, t, k)
            slot = lax.rem(t * plan.steps + k, tiling.stages)
            plgpu.barrier_wait(gemm.full_barrier(plan, memory, t, slot))
            for half, accumulator in enumerate((even, odd)):
                plgpu.wgmma(accumulator, _half_of_a(work, slot, half), memory.b.at[slot].T)
            plgpu.wgmma_wait(2)
            if not first:
                last = lax.rem(t * plan.steps + k - 1, tiling.stages)
                plgpu.barrier_arrive(memory.free.at[last])

        step(0, first=True)
        lax.fori_loop(1, plan.steps, lambda k, _: step(k), None)
        return even[...], odd[...]

    halves = pl.run_scoped(multiply, *[_accumulator(work) for _ in range(2)])
    last = lax.rem((t + 1) * plan.steps - 1, tiling.stages)
    plgpu.barrier_arrive(memory.free.at[last])
    return registers.interleave_halves(halves[0], halves[1], work.plan.interpret)


def _sum_exactly(work: EpilogueWork, t: Index) -> jax.Array:
    """Return a tile's product, with the results of the steps accumulated in float32."""
    plan, tiling, memory = work.plan.gemm, work.plan.gemm.tiling, work.memory.gemm
    warpgroup = work.gemm.warpgroup

    def step(k, sums):
        _fetch_other(work, t, k)
        slot = lax.rem(t * plan.steps + k, tiling.stages)
        plgpu.barrier_wait(gemm.full_barrier(plan, memory, t, slot))

        def product(accumulator, half):
            # Else both warpgroups would multiply at once, and then add at once.
            hopper.bar_sync(TURN + warpgroup, WARPGROUPS)
            plgpu.wgmma(accumulator, _half_of_a(work, slot, half), memory.b.at[slot].T)
            hopper.bar_arrive(TURN + 1 - warpgroup, WARPGROUPS)
            return accumulator[...]  # waits for it

        even = pl.run_scoped(lambda accumulator: product(accumulator, 0), _accumulator(work))
        even = sums[0] + even
        odd = pl.run_scoped(lambda accumulator: product(accumulator, 1), _accumulator(work))
        plgpu.barrier_arrive(memory.free.at[slot])
        return even, sums[1] + odd

    shape = ROWS // 2, tiling.columns
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), hopper.MATRIX)
    halves = lax.fori_loop(0, plan.steps, step, (zeros, zeros))
    return registers.interleave_halves(halves[0], halves[1], work.plan.interpret)


def _accumulator(work: EpilogueWork):
    return plgpu.WGMMAAccumulatorRef((ROWS // 2, work.plan.gemm.tiling.columns), jnp.float32)


def _half_of_a(work: EpilogueWork, slot: Index, half: int) -> Ref:
    """Even or odd rows of the warpgroup's tile."""
    first = work.gemm.warpgroup * (ROWS // 2) if work.plan.gemm.tiling.shared else 0
    return work.memory.gemm.a.at[slot, half, pl.ds(first, ROWS // 2)]


def _fetch_other(work: EpilogueWork, t: Index, k: Index):
    """Start to load a tile's second input, if there is one, in step FETCH of its product."""
    plan, warpgroup = work.plan.gemm, work.gemm.warpgroup

    def fetch():
        row, column = gemm.place_of(plan, t)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's results are stored
        hopper.untyped.copy_gmem_to_smem(
            work.arrays.gemm.other.at[
                pl.ds(work.gemm.own(row), ROWS), pl.ds(column, plan.tiling.columns)
            ],
            work.memory.gemm.parts.at[warpgroup],
            work.memory.gemm.arrived.at[warpgroup],
        )

    if work.plan.other:
        pl.when(k == min(FETCH, plan.steps - 1))(fetch)


def _store(work: EpilogueWork, t: Index, product: jax.Array, most: jax.Array) -> jax.Array:
    """Round a tile, cast it and store both layouts; return the threads' amax."""
    plan, tiling, arrays = work.plan, work.plan.gemm.tiling, work.arrays
    row, column = gemm.place_of(plan.gemm, t)
    row = work.gemm.own(row)
    rows = pl.ds(row, ROWS)
    if plan.other:
        hopper.untyped.barrier_wait(work.memory.gemm.arrived.at[work.gemm.warpgroup])
    for part, first in enumerate(range(0, tiling.columns, plan.width)):
        q, qt = work.results(part)
        casts = []
        for c in range(first, first + plan.width, PART):
            scaled, cast, most = _cast(work, product[:, c : c + PART], c, most)
            casts.append(cast)
            if (kept := arrays.product) is not None:
                inside = (row < plan.gemm.M) & (column + c < plan.gemm.N)
                at = rows, pl.ds(column + c, PART)
                pl.when(inside)(functools.partial(_write, kept, at, scaled))
        if plan.other:
            plgpu.commit_smem()  # all threads have read the input that is overwritten
        else:
            others = 2 * (tiling.parts - 1) if part else 0
            plgpu.wait_smem_to_gmem(others, wait_read_only=True)
        for n, cast in enumerate(casts):
            registers.store_both_layouts(cast, q, qt, n * PART, plan.interpret)
        plgpu.commit_smem()
        columns = pl.ds(column + first, plan.width)
        hopper.untyped.copy_smem_to_gmem(q, arrays.q_MN.at[rows, columns])
        hopper.untyped.copy_smem_to_gmem(qt, arrays.q_NM.at[columns, rows])
    return most


def _write(to: Ref, at, values: jax.Array):
    to[at] = values


def _cast(work: EpilogueWork, product: jax.Array, column: int, most: jax.Array):
    """Return (the rounded product, the cast of the function's value, the threads' amax)."""
    plan, others = work.plan, []
    scale, multiplier = work.scale, work.multiplier
    if plan.other:
        part = pl.ds(column, PART)
        other = work.memory.gemm.parts.at[work.gemm.warpgroup, :, part]
        factor = (scale * multiplier).astype(jnp.bfloat16)
        others = [plgpu.load(other, layout=BLOCKS) * factor]
        scale = multiplier = None
    rounded = registers.fp32_to_bf16(product if scale is None else product * scale, plan.interpret)
    values = plan.function(registers.bf16_to_fp32(rounded, plan.interpret), *others)
    most = registers.max_per_thread(jnp.abs(values), most, plan.interpret)
    if multiplier is not None:
        values = values * multiplier
    if plan.interpret:  # the hardware's cast saturates
        largest = float(jnp.finfo(plan.dtype).max)
        values = jnp.minimum(jnp.maximum(values, -largest), largest)
    return rounded, values.astype(plan.dtype), most
