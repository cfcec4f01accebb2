"""Float8 matmul for Hopper, in Pallas Mosaic GPU, with the casts in its epilogue.

The matmul is that of `matmul.hopper.gemm`, with steps of 128 columns and tiles of 128 rows. Even
and odd rows of a, and of b, are loaded apart: the first half of a tile's rows in shared memory are
the even ones. So each thread has 2 x 4 neighbours of the result (`BLOCKS`). It writes 4 bytes of a
row at once, and pairs of bytes that `stmatrix` transposes: the function and the cast are computed
once, and nothing is read back.

Two warpgroups alternate: one's epilogue overlaps the other's matmul. The tensor cores' own sum has
about 14 bits. Where that is too few (`exact`), each step's result is added to a float32 sum in
registers. The warpgroups then share a tile: one adds while the other multiplies, but nothing
overlaps the epilogue.
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
from jaxtrain_kernels.matmul.fp8_epilogue import registers
from jaxtrain_kernels.matmul.fp8_epilogue.reference import ProductOptions
from jaxtrain_kernels.matmul.fp8_epilogue.registers import BLOCKS

STEP = 128  # columns of a and b that a step multiplies
ROWS = 128  # of a warpgroup's tile
PART = 64  # columns of the result that the function is applied to at once
WARPGROUPS = 2  # that multiply
TURN = 8  # the first of the hardware barriers by which the warpgroups take turns
THREADS = 128  # of a warpgroup
SHARED_BYTES = 226 * 1024  # per block; 1 KiB of Hopper's shared memory is left for barriers


class Tiling(NamedTuple):
    """columns: of a warpgroup's tile.

    shared: whether the warpgroups process horizontally adjacent tiles together (else they
    alternate). stages: steps whose operands are in shared memory at once. cluster: CUDA blocks with
    vertically adjacent tiles, which load their columns of b together. group: rows of a cluster's
    tiles that are processed together, for the L2 cache. blocks: number of CUDA blocks; None = one
    per multiprocessor.
    """

    columns: int = 128
    shared: bool = False
    stages: int = 5
    cluster: int = 2
    group: int = 8
    blocks: int | None = None
    skip: str = ""
    apart: bool = False
    unroll: int = 0
    width: int = 64
    buffers: int = 1
    direct: bool = False
    ordered: bool = False
    late: int = 0
    fold: bool = False


FAST = Tiling()
EXACT = Tiling(shared=True, stages=3)


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
    if M % PART or N % PART or K % STEP or not K or min(M, N) <= ROWS:
        return f"needs rows in multiples of {PART} above {ROWS} and a sum of {STEP}, got {(M, N, K)}"
    return None


class Plan(NamedTuple):
    """Static parameters of the kernel.

    other: whether a second input of the result's shape is read. keep: whether the product is
    written. interpret: whether this runs on a CPU, where the kernel clips values (else the
    hardware's cast saturates).
    """

    M: int
    N: int
    K: int
    function: Function
    dtype: DTypeLike
    other: bool
    keep: bool
    exact: bool
    tiling: Tiling
    interpret: bool

    @property
    def users(self) -> int:
        """Number of warpgroups that multiply a step."""
        return WARPGROUPS if self.tiling.shared else 1

    @property
    def columns(self) -> int:
        """Columns of a block's tile."""
        return self.tiling.columns * self.users

    @property
    def grid(self) -> tuple[int, int]:
        """Number of cluster tiles, down and across."""
        return -(-self.M // (ROWS * self.tiling.cluster)), -(-self.N // self.columns)

    @property
    def clusters(self) -> int:
        blocks = self.tiling.blocks or hopper.sm_count()
        down, across = self.grid
        return min(blocks // self.tiling.cluster, down * across)

    @property
    def steps(self) -> int:
        return self.K // STEP

    @property
    def width(self) -> int:
        """Columns that are stored at once."""
        return self.tiling.columns if self.union else self.tiling.width

    @property
    def union(self) -> bool:
        return self.other and self.tiling.columns == 128


class Arrays(NamedTuple):
    """a, b: [rows / 2, 2, K]. factors: the product's scale, and the multiplier of the function's
    value before the cast. most: amax of each thread.
    """

    a: Ref
    b: Ref
    other: Ref | None
    factors: Ref
    q_MN: Ref
    q_NM: Ref
    most: Ref
    product: Ref | None


class Memory(NamedTuple):
    """Shared memory. a, b: by stage. product or other, q, qt: by warpgroup."""

    a: Ref
    a_halves: Ref
    b: Ref
    b_halves: Ref
    wide: Ref | None
    q: Ref
    qt: Ref
    full: Ref
    free: Ref
    arrived: Ref | None


class Work(NamedTuple):
    plan: Plan
    arrays: Arrays
    memory: Memory
    warpgroup: jax.Array


def product_quantized(
    options,
    operands,
    scale,
    multiplier,
    *,
    tiling: Tiling | None = None,
    interpret: hopper.Interpret = False,
):
    """Backend like `reference`. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    factors = jnp.stack([scale.astype(jnp.float32), multiplier.astype(jnp.float32)])
    q_MN, q_NM, most, *product = _product(options, operands, factors, tiling, interpret)
    seen = jnp.max(most)
    if tiling is not None and tiling.fold:
        seen = seen / multiplier
    return q_MN, q_NM, seen, product[0] if options.keep else None


@hopper.jit_kernel("options", "tiling", "interpret")
def _product(options, operands, factors, tiling, interpret):
    """Return [q_MN, q_NM, most, and with `keep` the product]."""
    a_MK, b_NK, *others = operands
    (M, K), N = a_MK.shape, len(b_NK)
    tiling = tiling or (EXACT if options.exact else FAST)
    plan = Plan(
        M, N, K, options.function, options.dtype, bool(others), options.keep, options.exact,
        tiling, bool(interpret),
    )  # fmt: skip

    def fp8_epilogue_matmul(*refs, a, b, full, free, out, arrived=None):
        inputs, outputs = refs[: 3 + plan.other], refs[3 + plan.other :]
        q_MN, q_NM, most, *kept = outputs
        arrays = Arrays(
            inputs[0], inputs[1], inputs[2] if plan.other else None, inputs[-1],
            q_MN, q_NM, most, kept[0] if kept else None,
        )  # fmt: skip
        if plan.union:
            wide, both = out
            q, qt = both, both
        else:
            *wide, q, qt = out
            wide = wide[0] if wide else None
        memory = Memory(*a, *b, wide, q, qt, full, free, arrived)
        hopper.specialize_warpgroups(
            WARPGROUPS,
            lambda: _load(plan, arrays, memory),
            lambda warpgroup: _compute(Work(plan, arrays, memory, warpgroup)),
        )

    stages = tiling.stages
    if plan.union:
        out = plgpu.RefUnion(
            hopper.tiles((WARPGROUPS, ROWS, tiling.columns), options.product_dtype),
            hopper.tiles((WARPGROUPS, 2, tiling.columns, ROWS), options.dtype),
        )
    else:
        out = [
            hopper.tiles((WARPGROUPS, plan.tiling.buffers, ROWS, plan.width), options.dtype),
            hopper.tiles((WARPGROUPS, plan.tiling.buffers, plan.width, ROWS), options.dtype),
        ]
        if (plan.keep and not tiling.direct) or plan.other:
            columns = tiling.columns if plan.other else plan.width
            out.insert(0, hopper.tiles((WARPGROUPS, ROWS, columns), options.product_dtype))
    scratch = dict(
        a=plgpu.RefUnion(
            hopper.tiles((stages, ROWS, STEP), a_MK.dtype),
            hopper.tiles((stages, 2, ROWS // 2, STEP), a_MK.dtype),
        ),
        b=plgpu.RefUnion(
            hopper.tiles((stages, plan.columns, STEP), b_NK.dtype),
            hopper.tiles((stages, plan.users, 2, tiling.columns // 2, STEP), b_NK.dtype),
        ),
        out=out,
        full=plgpu.Barrier(
            num_barriers=WARPGROUPS // plan.users * stages, num_arrivals=(1 + plan.users) * (1 + tiling.apart)
        ),
        free=plgpu.ClusterBarrier(
            num_barriers=stages, num_arrivals=plan.users, collective_axes=("peer",)
        ),
    )
    if plan.other:
        scratch["arrived"] = plgpu.Barrier(num_barriers=WARPGROUPS)
    out_type = [
        jax.ShapeDtypeStruct((M, N), options.dtype),
        jax.ShapeDtypeStruct((N, M), options.dtype),
        jax.ShapeDtypeStruct((plan.clusters * tiling.cluster * WARPGROUPS, THREADS), jnp.float32),
    ]
    if plan.keep:
        out_type.append(jax.ShapeDtypeStruct((M, N), options.product_dtype))
    return plgpu.kernel(
        fp8_epilogue_matmul,
        out_type=out_type,
        scratch_types=scratch,
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(tiling.cluster,),
        cluster_names=("peer",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(approx_math=False),
        interpret=interpret,
    )(a_MK.reshape(M // 2, 2, K), b_NK.reshape(N // 2, 2, K), *others, factors)


def _rounds(plan: Plan) -> jax.Array:
    """Number of tiles that this cluster processes."""
    down, across = plan.grid
    return lax.div(down * across - 1 - lax.axis_index("cluster"), plan.clusters) + 1


def _place(plan: Plan, t: Index) -> tuple[jax.Array, jax.Array]:
    """First row and column of the block's t-th tile: down a group of rows, then the next column."""
    (down, across), group = plan.grid, plan.tiling.group
    number = lax.axis_index("cluster") + t * plan.clusters
    first = lax.div(number, group * across) * group
    height = jnp.minimum(down - first, group)
    rest = lax.rem(number, group * across)
    row, column = first + lax.rem(rest, height), lax.div(rest, height)
    row = row * plan.tiling.cluster + lax.axis_index("peer")
    return row * ROWS, column * plan.columns


def _full(plan: Plan, memory: Memory, t: Index, slot: Index) -> Ref:
    """Barrier of a step's operands; if the warpgroups alternate, each has its own."""
    user = 0 if plan.tiling.shared else lax.rem(t, WARPGROUPS)
    return memory.full.at[user * plan.tiling.stages + slot]


def _load(plan: Plan, arrays: Arrays, memory: Memory):
    """Load the operands of each tile's steps."""
    tiling = plan.tiling
    half = tiling.columns // 2

    def load_tile(t, _):
        row, column = _place(plan, t)

        def load_step(k, _):
            slot = lax.rem(t * plan.steps + k, tiling.stages)
            full, at = _full(plan, memory, t, slot), pl.ds(k * STEP, STEP)
            plgpu.barrier_wait(memory.free.at[slot])
            if tiling.apart:
                for odd in range(2):
                    hopper.untyped.copy_gmem_to_smem(
                        arrays.a.at[pl.ds(lax.div(row, 2), ROWS // 2), odd, at],
                        memory.a.at[slot, pl.ds(odd * ROWS // 2, ROWS // 2)],
                        full,
                    )
                    for user in range(plan.users):
                        first = user * tiling.columns
                        hopper.untyped.copy_gmem_to_smem(
                            arrays.b.at[pl.ds(lax.div(column + first, 2), half), odd, at],
                            memory.b.at[slot, pl.ds(first + odd * half, half)],
                            full,
                            collective_axes=("peer",),
                        )
                return
            turned = lambda ref: plgpu.transpose_ref(ref, (1, 0, 2))
            hopper.untyped.copy_gmem_to_smem(
                arrays.a.at[pl.ds(lax.div(row, 2), ROWS // 2), :, at],
                turned(memory.a_halves.at[slot]),
                full,
            )
            for user in range(plan.users):
                first = user * tiling.columns
                hopper.untyped.copy_gmem_to_smem(
                    arrays.b.at[pl.ds(lax.div(column + first, 2), half), :, at],
                    turned(memory.b_halves.at[slot, user]),
                    full,
                    collective_axes=("peer",),
                )

        lax.fori_loop(0, plan.steps, load_step, None)

    rounds = _rounds(plan)
    lax.fori_loop(0, rounds, load_tile, None)

    # A block of a cluster must not exit before the others have signalled its free barriers.
    def drain(step, _):
        plgpu.barrier_wait(memory.free.at[lax.rem(step, tiling.stages)])

    lax.fori_loop(rounds * plan.steps, rounds * plan.steps + tiling.stages, drain, None)


def _compute(work: Work):
    """Compute all tiles of one multiplying warpgroup."""
    plan, tiling, arrays = work.plan, work.plan.tiling, work.arrays
    turns = 1 if tiling.shared else WARPGROUPS
    first = 0 if tiling.shared else work.warpgroup
    rounds = lax.div(_rounds(plan) - first + turns - 1, turns)

    def free_all():
        for slot in range(tiling.stages):
            plgpu.barrier_arrive(work.memory.free.at[slot])

    if tiling.shared:
        free_all()
    else:
        pl.when(work.warpgroup == 0)(free_all)
    if tiling.ordered:
        pl.when(work.warpgroup == 1)(lambda: hopper.bar_arrive(TURN, WARPGROUPS))
    scale, multiplier = arrays.factors[0], arrays.factors[1]

    def tile(i, most):
        t = first + turns * i
        product = _sum_exactly(work, t) if plan.exact else _sum(work, t)
        return _store(work, t, product, scale, multiplier, most)

    most = lax.fori_loop(0, rounds, tile, registers.zeros(plan.interpret))
    if tiling.ordered:
        pl.when(work.warpgroup == 0)(lambda: hopper.bar_sync(TURN, WARPGROUPS))
    block = lax.axis_index("cluster") * tiling.cluster + lax.axis_index("peer")
    arrays.most[block * WARPGROUPS + work.warpgroup] = most
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _fetch_other(work: Work, t: Index):
    """Start to load a tile's second input, while its product is computed."""
    if not work.plan.other or "epilogue" in work.plan.tiling.skip:
        return
    row, column = _place(work.plan, t)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's result is stored
    if work.plan.tiling.shared:
        column = column + work.warpgroup * work.plan.tiling.columns
    columns = pl.ds(column, work.plan.tiling.columns)
    hopper.untyped.copy_gmem_to_smem(
        work.arrays.other.at[pl.ds(row, ROWS), columns],
        work.memory.wide.at[work.warpgroup],
        work.memory.arrived.at[work.warpgroup],
    )


def _sum(work: Work, t: Index) -> jax.Array:
    """Return a tile's product, accumulated by the tensor cores."""
    plan, memory, tiling = work.plan, work.memory, work.plan.tiling
    own = pl.ds(work.warpgroup * tiling.columns, tiling.columns) if tiling.shared else slice(None)

    def multiply(acc):
        def step(k, first: bool = False):
            slot = lax.rem(t * plan.steps + k, tiling.stages)
            plgpu.barrier_wait(_full(plan, memory, t, slot))
            plgpu.wgmma(acc, memory.a.at[slot], memory.b.at[slot, own].T)
            plgpu.wgmma_wait(1)
            if not first:
                last = lax.rem(t * plan.steps + k - 1, tiling.stages)
                plgpu.barrier_arrive(memory.free.at[last])

        step(0, first=True)
        _fetch_other(work, t)
        lax.fori_loop(1, plan.steps, lambda k, _: step(k), None)
        return acc[...]

    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, tiling.columns), jnp.float32)
    product = pl.run_scoped(multiply, accumulator)
    last = lax.rem((t + 1) * plan.steps - 1, tiling.stages)
    plgpu.barrier_arrive(memory.free.at[last])
    return registers.in_blocks(product, plan.interpret)


def _sum_exactly(work: Work, t: Index) -> jax.Array:
    """Return a tile's product, with the results of the steps accumulated in float32."""
    plan, memory, tiling = work.plan, work.memory, work.plan.tiling
    own = pl.ds(work.warpgroup * tiling.columns, tiling.columns) if tiling.shared else slice(None)
    shape = (ROWS // 2, tiling.columns)

    def step(k, totals):
        if tiling.late:
            pl.when(k == min(tiling.late, plan.steps - 1))(lambda: _fetch_other(work, t))
        slot = lax.rem(t * plan.steps + k, tiling.stages)
        plgpu.barrier_wait(_full(plan, memory, t, slot))

        def product(acc, odd):
            rows = pl.ds(odd * ROWS // 2, ROWS // 2)
            if tiling.ordered:
                hopper.bar_sync(TURN + work.warpgroup, WARPGROUPS)
            plgpu.wgmma(acc, memory.a.at[slot, rows], memory.b.at[slot, own].T)
            if tiling.ordered:
                hopper.bar_arrive(TURN + 1 - work.warpgroup, WARPGROUPS)
            return acc[...]  # waits for it

        sums = []
        for odd, total in enumerate(totals):
            part = pl.run_scoped(
                lambda acc, odd=odd: product(acc, odd),
                plgpu.WGMMAAccumulatorRef(shape, jnp.float32),
            )
            if odd:
                plgpu.barrier_arrive(memory.free.at[slot])
            sums.append(total + part)
        return tuple(sums)

    def steps(k, totals):
        """`unroll` steps: one half is added while the next is multiplied."""
        jobs = [(k * tiling.unroll + n, odd) for n in range(tiling.unroll) for odd in (0, 1)]
        slot = lambda n: lax.rem(t * plan.steps + jobs[n][0], tiling.stages)

        def added(sums, n, accumulator, ahead):
            odd = jobs[n][1]
            found = sums[odd] + plgpu.wgmma_accumulator_load(accumulator, wait_n=ahead)
            if odd:
                plgpu.barrier_arrive(memory.free.at[slot(n)])
            return (sums[0], found) if odd else (found, sums[1])

        def following(n, sums, before=None):
            """Start product n, add the one before, and so on."""

            def run(accumulator):
                odd, found = jobs[n][1], sums
                if not odd:
                    plgpu.barrier_wait(_full(plan, memory, t, slot(n)))
                rows = pl.ds(odd * ROWS // 2, ROWS // 2)
                plgpu.wgmma(accumulator, memory.a.at[slot(n), rows], memory.b.at[slot(n), own].T)
                if before is not None:
                    found = added(found, n - 1, before, 1)
                if n + 1 < len(jobs):
                    return following(n + 1, found, accumulator)
                return added(found, n, accumulator, 0)

            return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

        return following(0, totals)

    if not tiling.late:
        _fetch_other(work, t)
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), hopper.MATRIX)
    if tiling.unroll:
        totals = lax.fori_loop(0, plan.steps // tiling.unroll, steps, (zeros, zeros))
    else:
        totals = lax.fori_loop(0, plan.steps, step, (zeros, zeros))
    return registers.halves_in_blocks(*totals, plan.interpret)


def _store(work: Work, t: Index, product, scale, multiplier, most):
    """Round a tile, cast it and store both layouts; return the threads' amax."""
    plan, memory, arrays = work.plan, work.memory, work.arrays
    skip = plan.tiling.skip
    if "epilogue" in skip:
        return registers.peaks(product, most, plan.interpret)
    row, column = _place(plan, t)
    if plan.tiling.shared:
        column = column + work.warpgroup * plan.tiling.columns
    wide = memory.wide.at[work.warpgroup] if memory.wide is not None else None
    if plan.other:
        hopper.untyped.barrier_wait(memory.arrived.at[work.warpgroup])
    rows = pl.ds(row, ROWS)
    size = min(PART, plan.width)
    for part, c in enumerate(range(0, plan.tiling.columns, plan.width)):
        q = memory.q.at[work.warpgroup, part % plan.tiling.buffers]
        qt = memory.qt.at[work.warpgroup, 1 if plan.union else part % plan.tiling.buffers]
        casts, kept = [], []
        for piece in range(c, c + plan.width, size):
            others = []
            if plan.other:
                others = [plgpu.load(wide, (slice(None), pl.ds(piece, size)), layout=BLOCKS)]
            found = product[:, piece : piece + size]
            if plan.tiling.fold:
                # Powers of two, that the function is linear in.
                others = [x * (scale * multiplier).astype(x.dtype) for x in others]
            else:
                found = found * scale
            rounded = registers.rounded(found, plan.interpret)
            widened = registers.widened(rounded, plan.interpret) if plan.tiling.fold else rounded
            values = plan.function(widened, *others).astype(jnp.float32)
            most = registers.peaks(jnp.abs(values), most, plan.interpret)
            casts.append(_cast(plan, values if plan.tiling.fold else values * multiplier))
            kept.append(rounded)
        columns = pl.ds(column + c, plan.width)
        if plan.keep and plan.tiling.direct and "product" not in skip:

            def keep():
                for n, rounded in enumerate(kept):
                    at = pl.ds(column + c + n * size, size)
                    arrays.product[rows, at] = rounded

            pl.when((row < plan.M) & (column + c < plan.N))(keep)
        if plan.union:
            plgpu.commit_smem()  # all threads have read what is overwritten
        else:
            copies = 2 + (plan.keep and not plan.tiling.direct)
            ahead = copies * (plan.tiling.buffers - 1)
            plgpu.wait_smem_to_gmem(ahead if part else 0, wait_read_only=True)
        for n, (cast, rounded) in enumerate(zip(casts, kept)):
            registers.store(cast, q, qt, n * size, plan.interpret)
            if plan.keep and not plan.tiling.direct:
                wide[...] = rounded
        plgpu.commit_smem()
        if "stores" in skip:
            continue
        if "q" not in skip.split():
            plgpu.copy_smem_to_gmem(q, arrays.q_MN.at[rows, columns])
        if "qt" not in skip.split():
            plgpu.copy_smem_to_gmem(qt, arrays.q_NM.at[columns, rows])
        if arrays.product is not None and not plan.tiling.direct and "product" not in skip:
            plgpu.copy_smem_to_gmem(wide, arrays.product.at[rows, columns])
    return most


def _cast(plan: Plan, scaled: jax.Array) -> jax.Array:
    if plan.interpret:
        largest = float(jnp.finfo(plan.dtype).max)
        scaled = jnp.minimum(jnp.maximum(scaled, -largest), largest)
    return scaled.astype(plan.dtype)
