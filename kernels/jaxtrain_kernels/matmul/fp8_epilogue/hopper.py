"""Float8 matmul for Hopper, in Pallas Mosaic GPU, with the casts in its epilogue.

The matmul is that of `matmul.hopper.gemm`, with steps of 128 columns. Its epilogue rounds 64 x 64
values to 16 bits. It applies the function to them in registers, and again after reading them
transposed from shared memory. TMA stores both float8 tiles.

Two warpgroups alternate: one's epilogue overlaps the other's matmul. The tensor cores' own sum has
about 14 bits. Where that is too few (`exact`), each step's result is added to a float32 sum in
registers. This takes twice the registers, so the warpgroups then share a tile: one adds while the
other multiplies, but nothing overlaps the epilogue.
"""

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
from jaxtrain_kernels.matmul.fp8_epilogue.reference import ProductOptions
from jaxtrain_kernels.matmul.hopper import gemm
from jaxtrain_kernels.matmul.hopper.gemm import PART, WARPGROUPS, GemmPlan, GemmTiling

STEP = 128  # columns of a and b that a step multiplies
SHARED_BYTES = 226 * 1024  # per block; 1 KiB of Hopper's shared memory is left for barriers
# The fastest of those measured on an H200 at gpt_d24's sizes (`bench matmul`). Shared memory: 32
# and 40 KiB per stage, 16 KiB per part of a warpgroup.
FAST = GemmTiling(rows=128, columns=128, stages=5, parts=2)
EXACT = GemmTiling(rows=64, columns=192, shared=True, stages=3, parts=3, cluster=1)


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
    if M % PART or N % PART or K % STEP or not K or min(M, N) <= PART:
        return f"needs rows in multiples of {PART} above it and a sum of {STEP}, got {(M, N, K)}"
    return None


class EpiloguePlan(NamedTuple):
    """Static parameters of the kernel. gemm: plan of the matmul, whose `other` is False.

    other: whether a second input of the result's shape is read. keep: whether the product is
    written. clip: whether the kernel clips values (else the hardware's cast saturates).
    """

    gemm: GemmPlan
    function: Function
    dtype: DTypeLike
    other: bool
    keep: bool
    exact: bool
    clip: bool

    @property
    def copies(self) -> int:
        """Number of arrays that a part is stored to."""
        return 2 + self.keep

    @property
    def shared_bytes(self) -> int:
        """Bytes of the operands' stages, and of the parts: 16 bits, and 8 bits in both layouts."""
        tiling = self.gemm.tiling
        stage = (tiling.block_rows + tiling.columns) * STEP
        return tiling.stages * stage + WARPGROUPS * tiling.parts * PART**2 * 4


class EpilogueArrays(NamedTuple):
    """factors: the product's scale, and the multiplier of the function's value before the cast.

    most: amax of each row, per column of tiles.
    """

    gemm: gemm.GemmArrays
    factors: Ref
    q_MN: Ref
    q_NM: Ref
    most: Ref
    product: Ref | None


class EpilogueMemory(NamedTuple):
    """Shared memory. gemm.parts: first the other input's parts, whose barriers are gemm.arrived,
    then the products in 16 bits. q, qt: float8 results, not transposed and transposed.
    """

    gemm: gemm.GemmMemory
    q: Ref
    qt: Ref


class EpilogueWork(NamedTuple):
    plan: EpiloguePlan
    arrays: EpilogueArrays
    memory: EpilogueMemory
    gemm: gemm.GemmWork


def product_quantized(
    options,
    operands,
    scale,
    multiplier,
    *,
    tiling: GemmTiling | None = None,
    interpret: hopper.Interpret = False,
):
    """Backend like `reference`. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    factors = jnp.stack([scale.astype(jnp.float32), multiplier.astype(jnp.float32)])
    q_MN, q_NM, most, *product = _product(options, operands, factors, tiling, interpret)
    return q_MN, q_NM, jnp.max(most), product[0] if options.keep else None


@hopper.jit_kernel("options", "tiling", "interpret")
def _product(options, operands, factors, tiling, interpret):
    """Return [q_MN, q_NM, most, and with `keep` the product]."""
    a_MK, b_NK, *others = operands
    (M, K), N = a_MK.shape, len(b_NK)
    plan = _plan(options, (M, N, K), a_MK.dtype, bool(others), tiling, bool(interpret))
    tiling, plan_of_gemm = plan.gemm.tiling, plan.gemm
    down, across = plan_of_gemm.grid
    rows = down * tiling.cluster * tiling.block_rows

    def fp8_epilogue_matmul(*refs, a, b, parts, q, qt, full, free, arrived=None):
        inputs, outputs = refs[: 3 + plan.other], refs[3 + plan.other :]
        given = gemm.GemmArrays(inputs[0], inputs[1], inputs[2] if plan.other else None, None)
        q_MN, q_NM, most, *kept = outputs
        arrays = EpilogueArrays(given, inputs[-1], q_MN, q_NM, most, kept[0] if plan.keep else None)
        memory = EpilogueMemory(gemm.GemmMemory(a, b, parts, full, free, arrived), q, qt)
        hopper.specialize_warpgroups(
            WARPGROUPS,
            lambda: gemm.load_tiles(plan_of_gemm, arrays.gemm, memory.gemm),
            lambda warpgroup: _compute(
                EpilogueWork(
                    plan, arrays, memory,
                    gemm.GemmWork(plan_of_gemm, arrays.gemm, memory.gemm, warpgroup),
                )
            ),
        )  # fmt: skip

    stages, users = tiling.stages, WARPGROUPS // plan_of_gemm.users
    scratch = dict(
        a=hopper.tiles((stages, tiling.block_rows, STEP), a_MK.dtype),
        b=hopper.tiles((stages, tiling.columns, STEP), b_NK.dtype),
        parts=hopper.tiles((WARPGROUPS, tiling.parts, PART, PART), options.product_dtype),
        q=hopper.tiles((WARPGROUPS, tiling.parts, PART, PART), options.dtype),
        qt=hopper.tiles((WARPGROUPS, tiling.parts, PART, PART), options.dtype),
        full=plgpu.Barrier(num_barriers=users * stages, num_arrivals=2),
        free=plgpu.ClusterBarrier(
            num_barriers=stages, num_arrivals=plan_of_gemm.users, collective_axes=("peer",)
        ),
    )
    if plan.other:
        scratch["arrived"] = plgpu.Barrier(num_barriers=WARPGROUPS * tiling.parts)
    out_type = [
        jax.ShapeDtypeStruct((M, N), options.dtype),
        jax.ShapeDtypeStruct((N, M), options.dtype),
        jax.ShapeDtypeStruct((across, rows), jnp.float32),
    ]
    if plan.keep:
        out_type.append(jax.ShapeDtypeStruct((M, N), options.product_dtype))
    return plgpu.kernel(
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
    )(a_MK, b_NK, *others, factors)


def _plan(options, sizes, dtype, other: bool, tiling: GemmTiling | None, clip: bool):
    """Make the plan of a call. Raises ValueError for an unsuitable tiling."""
    tiling = tiling or (EXACT if options.exact else FAST)
    if options.exact and not tiling.shared:
        raise ValueError(f"a sum in float32 needs a tile that warpgroups share, got {tiling}")
    M, N, K = sizes
    plan = GemmPlan(M, N, K, dtype, True, lambda product: product, False, tiling, 0)
    if other and tiling.parts < len(plan.places):
        raise ValueError(f"a second input needs {len(plan.places)} parts, got {tiling}")
    blocks = tiling.blocks or hopper.sm_count()
    clusters = min(blocks // tiling.cluster, plan.grid[0] * plan.grid[1])
    tiling = tiling._replace(parts=min(tiling.parts, len(plan.places)))
    plan = plan._replace(tiling=tiling, clusters=clusters)
    keep, exact = options.keep, options.exact
    whole = EpiloguePlan(plan, options.function, options.dtype, other, keep, exact, clip)
    if tiling.rows % PART or tiling.columns % PART or whole.shared_bytes > SHARED_BYTES:
        raise ValueError(
            f"a tile needs multiples of {PART} and up to {SHARED_BYTES} bytes, got {tiling} with "
            f"{whole.shared_bytes}"
        )
    return whole


def _compute(work: EpilogueWork):
    """Compute all tiles of one multiplying warpgroup."""
    plan, tiling = work.plan, work.plan.gemm.tiling
    turns = 1 if tiling.shared else WARPGROUPS
    first = 0 if tiling.shared else work.gemm.warpgroup
    rounds = lax.div(gemm.rounds_of(plan.gemm) - first + turns - 1, turns)
    gemm.free_all(plan.gemm, work.memory.gemm, work.gemm.warpgroup)

    def tile(i, _):
        t = first + turns * i
        if plan.other:
            _fetch_other(work, t)
        product = _sum_exactly(work, t) if plan.exact else _sum(work, t, i)
        _store(work, t, i, product)

    lax.fori_loop(0, rounds, tile, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _fetch_other(work: EpilogueWork, t: Index):
    """Start to load all parts of a tile's second input, while its product is computed."""
    row, column = gemm.place_of(work.plan.gemm, t)
    for n, (r, c) in enumerate(work.plan.gemm.places):
        hopper.untyped.copy_gmem_to_smem(
            work.arrays.gemm.other.at[pl.ds(work.gemm.own(row) + r, PART), pl.ds(column + c, PART)],
            work.gemm.part(n),
            _arrived(work, n),
        )


def _arrived(work: EpilogueWork, n: int) -> Ref:
    tiling = work.plan.gemm.tiling
    return work.memory.gemm.arrived.at[work.gemm.warpgroup * tiling.parts + n]


def _sum(work: EpilogueWork, t: Index, i: Index):
    """Return a tile's product, accumulated by the tensor cores."""
    plan, tiling = work.plan.gemm, work.plan.gemm.tiling
    product = pl.run_scoped(
        lambda acc: gemm.multiply(work.gemm, t, i, acc),
        plgpu.WGMMAAccumulatorRef((tiling.rows, tiling.columns), jnp.float32),
    )
    last = lax.rem((t + 1) * plan.steps - 1, tiling.stages)
    plgpu.barrier_arrive(work.memory.gemm.free.at[last])
    return product


def _sum_exactly(work: EpilogueWork, t: Index):
    """Return a tile's product, with the results of the steps accumulated in float32."""
    plan, memory = work.plan.gemm, work.memory.gemm
    tiling, shape = plan.tiling, (plan.tiling.rows, plan.tiling.columns)
    rows = pl.ds(work.gemm.warpgroup * tiling.rows, tiling.rows)

    def step(k, total):
        slot = lax.rem(t * plan.steps + k, tiling.stages)
        plgpu.barrier_wait(gemm.full_barrier(plan, memory, t, slot))

        def product(acc):
            plgpu.wgmma(acc, memory.a.at[slot, rows], memory.b.at[slot].T)
            return acc[...]  # waits for it

        part = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(memory.free.at[slot])
        return total + part

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), hopper.MATRIX)
    return lax.fori_loop(0, plan.steps, step, zeros)


def _store(work: EpilogueWork, t: Index, i: Index, product: jax.Array):
    """Round a tile's parts, cast them in both layouts and store them."""
    plan, tiling, arrays = work.plan, work.plan.gemm.tiling, work.arrays
    row, column = gemm.place_of(plan.gemm, t)
    row = work.gemm.own(row)
    scale, multiplier = arrays.factors[0], arrays.factors[1]
    most: dict[int, jax.Array] = {}
    for n, (r, c) in enumerate(plan.gemm.places):
        slot = lax.rem(i * len(plan.gemm.places) + n, tiling.parts)
        part, q, qt = (
            work.gemm.part(slot),
            *(tiles.at[work.gemm.warpgroup, slot] for tiles in (work.memory.q, work.memory.qt)),
        )
        plgpu.wait_smem_to_gmem((tiling.parts - 1) * plan.copies, wait_read_only=True)
        others, others_turned = [], []
        if plan.other:
            hopper.untyped.barrier_wait(_arrived(work, n))
            others = [plgpu.load(part, layout=hopper.MATRIX)]
            others_turned = [plgpu.load(part.T, layout=hopper.MATRIX)]
            plgpu.commit_smem()  # the product overwrites it
        rounded = (product[r : r + PART, c : c + PART] * scale).astype(jnp.bfloat16)
        part[...] = rounded
        plgpu.commit_smem()
        values = plan.function(rounded, *others)
        peaks = jnp.max(jnp.abs(values), 1).astype(jnp.float32)
        most[r] = jnp.maximum(most[r], peaks) if r in most else peaks
        q[...] = _quantized(plan, values, multiplier)
        turned = plan.function(plgpu.load(part.T, layout=hopper.MATRIX), *others_turned)
        qt[...] = _quantized(plan, turned, multiplier)
        plgpu.commit_smem()
        rows, columns = pl.ds(row + r, PART), pl.ds(column + c, PART)
        plgpu.copy_smem_to_gmem(q, arrays.q_MN.at[rows, columns])
        plgpu.copy_smem_to_gmem(qt, arrays.q_NM.at[columns, rows])
        if arrays.product is not None:
            plgpu.copy_smem_to_gmem(part, arrays.product.at[rows, columns])
    for r, peaks in most.items():
        across = lax.div(column, tiling.columns)
        arrays.most[across, pl.ds(row + r, PART)] = peaks


def _quantized(plan: EpiloguePlan, values: jax.Array, multiplier: jax.Array) -> jax.Array:
    scaled = values.astype(jnp.float32) * multiplier
    if plan.clip:
        largest = float(jnp.finfo(plan.dtype).max)
        scaled = jnp.minimum(jnp.maximum(scaled, -largest), largest)
    return scaled.astype(plan.dtype)
