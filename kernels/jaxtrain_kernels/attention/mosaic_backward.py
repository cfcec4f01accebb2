"""Flash attention's backward pass for Hopper, in Pallas Mosaic GPU: one kernel, five products.

A CUDA block owns a block of keys and values and walks over the query blocks that see it, of all
query heads that share it; one warpgroup loads by TMA, the others own 64 keys each. They compute the
transposed scores K Q^T, so that P^T and dS^T leave the tensor cores in the layout in which they are
the left operands of dV += P^T dO and dK += dS^T Q, straight from registers; only dS goes to shared
memory, for dQ = dS K, whose sum over key blocks is built in float32 in device memory by TMA's
reduce-add (as FlashAttention-3 does, arXiv:2407.08608).

The order of a step keeps the tensor cores fed while the other units work:

    issue dQ_{t-1}; issue S_t;  wait dQ_{t-1}; its reduce-add    while S_t runs
    issue dP_t;                 wait S_t;      P = exp2(S)       while dP_t runs
    issue dV_t;                 wait dP_t;     dS, to shared     while dV_t runs
    issue dK_t                                                   runs on into the next step
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention import mosaic_backward_inline as inline
from jaxtrain_kernels.attention import mosaic_common as common
from jaxtrain_kernels.attention.mosaic_common import COLUMNS, LOG2E, MATRIX, ROWS, Mask

# What stands for the log-sum-exp of a row without keys: exp2(score - NO_KEYS) = 0.
NO_KEYS = 1e30


class BackwardTiling(NamedTuple):
    """block_q, block_kv: queries and keys a step.

    stages: query blocks that are in shared memory at once.
    split: what the computing warpgroups divide: "keys" (64 each) or "dims" of the head.
    dq_columns: how many of dQ's columns a warpgroup computes at a time.
    dk_from: where ds is for dK += dS^T Q: in "registers", and then the step waits for the product's
        end, or in "shared" memory, and then it runs on into the next step.
    dq_by: how they are added to memory: "red" (from registers) or "tma" (from shared memory).
    blocks: CUDA blocks; None = one a multiprocessor, 0 = one a tile of work.
    l2_bytes: of queries and their gradients that the tiles in flight should share.
    """

    block_q: int = 64
    block_kv: int = 128
    stages: int = 2
    split: str = "keys"
    dq_columns: int = 64
    dk_from: str = "registers"
    dq_by: str = "red"
    blocks: int | None = None
    l2_bytes: int = 24 << 20


def default_tiling(head_dim: int) -> BackwardTiling:
    if head_dim <= 64:
        return BackwardTiling(block_q=128)
    if head_dim <= 128:
        return BackwardTiling()
    return BackwardTiling(block_kv=64, split="dims")


class Plan(NamedTuple):
    """Everything that is known while tracing."""

    B: int
    T: int
    N: int
    K: int
    H: int
    dtype: Any
    mask: Mask
    softcap: float | None
    scale: float
    segments: bool
    tiling: BackwardTiling
    blocks: int
    group: int  # key/value heads that are worked on together
    with_dq: bool
    interpret: bool

    @property
    def warpgroups(self) -> int:
        return 2 if self.tiling.split == "dims" else self.tiling.block_kv // 64

    @property
    def columns(self) -> int:
        """Of dK and dV that a warpgroup owns."""
        return self.H // 2 if self.tiling.split == "dims" else self.H

    @property
    def kv_blocks(self) -> int:
        return -(-self.T // self.tiling.block_kv)

    @property
    def q_blocks(self) -> int:
        return -(-self.T // self.tiling.block_q)

    @property
    def n_tiles(self) -> int:
        return self.B * self.K * self.kv_blocks

    def barrier(self, name: str) -> int:
        """Hardware barriers: 0 is CUDA's, and 1 up to the number of warpgroups Mosaic's."""
        names = ("ds", "kv", "stage")
        return self.warpgroups + 2 + names.index(name)


class Memory(NamedTuple):
    """Shared memory. stats: log-sum-exp and delta. *_full: loaded; that one is free, barriers."""

    k: Any
    v: Any
    q: Any
    do: Any
    stats: Any
    own: Any  # ((ds, dq), (dk, dv)): the second pair takes the place of the first
    k_full: Any
    v_full: Any
    q_full: Any
    do_full: Any
    k_ids: Any = None
    q_ids: Any = None
    registers: Any = None


class Arrays(NamedTuple):
    q: Any
    k: Any
    v: Any
    do: Any
    stats: Any
    ranges: Any
    ids: Any
    dq: Any
    dk: Any
    dv: Any


def backward(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B T K H"],
    v_BSKH: Float[Array, "B T K H"],
    ids_BT: Int[Array, "B T"] | None,
    out_BTNH: Float[Array, "B T N H"],
    lse_BNT: Float[Array, "B N T"],
    dout_BTNH: Float[Array, "B T N H"],
    dlse_BNT: Float[Array, "B N T"] | None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    deterministic: bool = False,
    tiling: BackwardTiling | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """(dq, dk, dv) in the inputs' dtypes, from the forward pass's out and lse and their gradients.

    bfloat16 or float16; N a multiple of K; H up to 256; any T; lse is -inf for a row without keys.
    deterministic: the same bits on every run, at the price of two more products.
    interpret: plgpu.InterpretGPUParams, on a CPU.
    """
    if deterministic:
        raise NotImplementedError("the deterministic backward pass is not written yet")
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    tiling = tiling or default_tiling(H)
    plan = _plan(q_BTNH, k_BSKH, ids_BT, Mask(causal, window), softcap, scale, tiling, interpret)
    # TMA needs whole rows of 8 tokens; it fills with zeros and drops what lies outside the arrays.
    pad = lambda x: _pad(_pad(x, 1, 8), 3, 64 if H <= 64 else 128)
    q, k, v, do = (pad(x) for x in (q_BTNH, k_BSKH, v_BSKH, dout_BTNH))
    stats = row_stats(out_BTNH, lse_BNT, dout_BTNH, dlse_BNT, tiling.block_q)
    arrays = [q, k, v, do, stats, query_ranges(plan, ids_BT)]
    if ids_BT is not None:
        arrays.append(_pad(ids_BT, 1, 8))
    dq, dk, dv = _call(plan, arrays, interpret)
    dq = dq.sum(0) if plan.interpret else _from_fragments(plan, dq)
    dq = (dq * scale).astype(q_BTNH.dtype)
    return dq[:, :T, :, :H], dk[:, :T, :, :H], dv[:, :T, :, :H]


def _plan(q_BTNH, k_BSKH, ids_BT, mask, softcap, scale, tiling, interpret) -> Plan:
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    plan = Plan(
        B=B,
        T=T,
        N=N,
        K=K,
        H=H + -H % (64 if H <= 64 else 128),
        dtype=q_BTNH.dtype,
        mask=mask,
        softcap=softcap,
        scale=scale,
        segments=ids_BT is not None,
        tiling=tiling,
        blocks=0,
        group=1,
        with_dq=True,
        interpret=bool(interpret),
    )
    # q, do and float32 dq of the query heads of a key/value head.
    fit = max(1, tiling.l2_bytes // (T * plan.H * 8 * (N // K)))
    group = max(d for d in range(1, min(fit, B * K) + 1) if B * K % d == 0)
    wanted = common.sm_count() if tiling.blocks is None else tiling.blocks or plan.n_tiles
    return plan._replace(group=group, blocks=min(wanted, plan.n_tiles))


def _pad(x: Any, axis: int, multiple: int, value: float = 0) -> Any:
    pads = [(0, -x.shape[d] % multiple if d == axis else 0) for d in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=value) if any(p[1] for p in pads) else x


def row_stats(out_BTNH, lse_BNT, dout_BTNH, dlse_BNT, block_q: int) -> Any:
    """float32 [B, N, 2, T']: lse in units of log 2; the sum over a row of p * dp, less dlse."""
    product_BTNH = out_BTNH.astype(jnp.float32) * dout_BTNH.astype(jnp.float32)
    delta_BNT = product_BTNH.sum(-1).swapaxes(1, 2)
    if dlse_BNT is not None:
        delta_BNT -= dlse_BNT
    some = lse_BNT > -jnp.inf
    lse_BNT = jnp.where(some, lse_BNT * LOG2E, NO_KEYS)
    delta_BNT = jnp.where(some, delta_BNT, 0)
    # A query beyond the sequence has no keys.
    parts = _pad(lse_BNT, 2, block_q, NO_KEYS), _pad(delta_BNT, 2, block_q)
    return jnp.stack(parts, 2)


def query_ranges(plan: Plan, ids_BT: Any) -> Any:
    """Per key block, in query blocks: int32 [B or 1, key blocks, (lo, full_lo, full_hi, hi)].

    Visits [lo, hi), of which [full_lo, full_hi) need no mask. Backwards in time, keys see queries
    as queries see keys.
    """
    rows, columns = plan.tiling.block_kv, plan.tiling.block_q
    length = plan.T + -plan.T % max(rows, columns)
    if ids_BT is not None:
        ids_BT = jnp.pad(ids_BT, ((0, 0), (0, length - plan.T)))[:, ::-1]
    mirrored = common.block_ranges(plan.mask, length, rows, columns, ids_BT)
    lo, full_lo, full_hi, hi = (length // columns - x[:, ::-1] for x in reversed(mirrored))
    # Blocks of nothing but padding are not visited, but for the one that every key block visits.
    hi = jnp.maximum(jnp.minimum(hi, plan.q_blocks), lo + 1)
    full_hi = jnp.minimum(full_hi, hi)
    if not plan.mask.causal and plan.T % rows:
        # The last key block has keys to mask for every query.
        last = jnp.arange(hi.shape[1])[None] == plan.T // rows
        full_hi = jnp.where(last, full_lo, full_hi)
    ranges = jnp.stack(jnp.broadcast_arrays(lo, full_lo, full_hi, hi), -1)
    return ranges[:, : plan.kv_blocks].astype(jnp.int32)


def _from_fragments(plan: Plan, dq: Any) -> Any:
    """[B, T', N, H] from what _reduce_add has summed up, in the order of the threads' registers."""
    bq, width = plan.tiling.block_q, plan.tiling.dq_columns
    # Of 8 columns, a thread has a pair (e) of two rows (half); see write_registers.
    shape = (plan.B, plan.N, plan.q_blocks, bq // 64, plan.H // width, width // 8, 4, 8, 4, 2, 2)
    b, n, block, tile, part, eight, warp, row, column, half, e = range(11)
    dq = dq.reshape(shape).transpose(b, block, tile, warp, half, row, n, part, eight, column, e)
    return dq.reshape(plan.B, plan.q_blocks * bq, plan.N, plan.H)


def _call(plan: Plan, arrays: list, interpret: Any):
    """(dq in float32, without the scale, in another order; dk; dv)."""
    tiling, warpgroups = plan.tiling, plan.warpgroups
    bq, bk, stages, f32, i32 = (
        tiling.block_q,
        tiling.block_kv,
        tiling.stages,
        jnp.float32,
        jnp.int32,
    )
    # For more of large heads there is no room.
    width, buffers = (64, 1) if tiling.split == "dims" else (plan.H, 2)
    output = common.tiles((warpgroups, 64, width), plan.dtype)
    scratch: dict[str, Any] = dict(
        k=common.tiles((bk, plan.H), plan.dtype),
        v=common.tiles((bk, plan.H), plan.dtype),
        q=common.tiles((stages, bq, plan.H), plan.dtype),
        do=common.tiles((stages, bq, plan.H), plan.dtype),
        stats=plgpu.SMEM((stages, 2, bq), f32),
        own=plgpu.RefUnion(
            [
                common.tiles((2, bk, bq), plan.dtype),
                _dq_memory(plan),
            ],
            [output] * buffers,
        ),
        k_full=plgpu.Barrier(num_barriers=1, num_arrivals=2 if plan.segments else 1),
        v_full=plgpu.Barrier(num_barriers=1),
        q_full=plgpu.Barrier(num_barriers=stages, num_arrivals=3 if plan.segments else 2),
        do_full=plgpu.Barrier(num_barriers=stages),
    )
    if plan.segments:
        scratch["k_ids"] = plgpu.SMEM((bk,), i32)
        scratch["q_ids"] = plgpu.SMEM((stages, bq), i32)
    if plan.interpret:
        scratch["registers"] = common.tiles((warpgroups, 64, bq), plan.dtype)

    def attention_backward(*refs):
        q, k, v, do, stats, ranges, *ids, dq, dk, dv = refs
        arrays = Arrays(q, k, v, do, stats, ranges, ids[0] if ids else None, dq, dk, dv)
        body = lambda **memory: _block(plan, arrays, Memory(**memory))
        pl.run_scoped(body, collective_axes="warpgroup", **scratch)

    mesh = plgpu.Mesh(
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
    )
    call: Any = pl.kernel(
        attention_backward,
        out_type=[jax.ShapeDtypeStruct(arrays[1].shape, plan.dtype)] * 2,
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        interpret=interpret,
    )
    # The interpreter knows no reduce-add: there each key block has its own dq.
    pieces = plan.B * plan.N * plan.q_blocks * bq // 64 * plan.H // tiling.dq_columns
    shape = (pieces, tiling.dq_columns // 4, 256)
    if plan.interpret:
        shape = (plan.kv_blocks, *arrays[0].shape)
    dq_ref = jax.new_ref(jnp.zeros(shape, f32))
    dk, dv = call(*arrays, dq_ref)
    return jax.freeze(dq_ref), dk, dv


def _dq_memory(plan: Plan) -> Any:
    width = plan.tiling.dq_columns
    if plan.interpret:
        return plgpu.SMEM((plan.warpgroups, 64, width), jnp.float32)
    if plan.tiling.dq_by == "tma":
        return plgpu.SMEM((plan.warpgroups, width // 4, 256), jnp.float32)
    return plgpu.SMEM((8,), jnp.float32)


def _block(plan: Plan, arrays: Arrays, memory: Memory):
    """One CUDA block."""
    warpgroup = lax.axis_index("warpgroup")
    # Registers of 64 Ki in all, in multiples of 8 a thread.
    few, many = (24, 240) if plan.warpgroups <= 2 else (32, 160)

    def load():
        plgpu.set_max_registers(few, action="decrease")
        _load(plan, arrays, memory)

    def compute():
        plgpu.set_max_registers(many, action="increase")
        _compute(plan, arrays, memory, warpgroup)

    lax.cond(warpgroup < plan.warpgroups, compute, load)


class Tile(NamedTuple):
    """Key block `block` of key/value head `head`, and its range of query blocks."""

    b: Any
    head: Any
    block: Any
    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any

    def query_block(self, plan: Plan, t: Any) -> tuple[Any, Any]:
        """(head, query block) of step t."""
        width = self.hi - self.lo
        shared = plan.N // plan.K
        if shared == 1:
            return self.head, self.lo + t
        return self.head * shared + lax.div(t, width), self.lo + lax.rem(t, width)

    def steps(self, plan: Plan) -> Any:
        return (self.hi - self.lo) * (plan.N // plan.K)


def _tile(plan: Plan, arrays: Arrays, number: Any) -> Tile:
    """Tiles are numbered by group of heads, then from the first keys, then by head."""
    in_group = plan.group * plan.kv_blocks
    group, rest = lax.div(number, in_group), lax.rem(number, in_group)
    block = lax.div(rest, plan.group)
    head = group * plan.group + lax.rem(rest, plan.group)
    b = lax.div(head, plan.K)
    ranges = [arrays.ranges[b if plan.segments else 0, block, i] for i in range(4)]
    return Tile(b, lax.rem(head, plan.K), block, *ranges)


def _load(plan: Plan, arrays: Arrays, memory: Memory):
    """The loader: for each tile its keys and values, and its query blocks in visiting order."""
    tiling, everyone = plan.tiling, plan.warpgroups + 1
    bq, bk = tiling.block_q, tiling.block_kv

    def load_tile(carry):
        loaded, number = carry
        tile = _tile(plan, arrays, number)

        def load_queries(t):
            slot = lax.rem(loaded + t, tiling.stages)
            head, block = tile.query_block(plan, t)
            rows, full = pl.ds(block * bq, bq), memory.q_full.at[slot]
            common.bar_sync(plan.barrier("stage") + slot, everyone)
            plgpu.copy_gmem_to_smem(arrays.q.at[tile.b, rows, head], memory.q.at[slot], full)
            stats = arrays.stats.at[tile.b, head, :, rows]
            plgpu.copy_gmem_to_smem(stats, memory.stats.at[slot], full)
            if plan.segments:
                plgpu.copy_gmem_to_smem(arrays.ids.at[tile.b, rows], memory.q_ids.at[slot], full)

        def load_douts(t):
            slot = lax.rem(loaded + t, tiling.stages)
            head, block = tile.query_block(plan, t)
            rows, full = pl.ds(block * bq, bq), memory.do_full.at[slot]
            plgpu.copy_gmem_to_smem(arrays.do.at[tile.b, rows, head], memory.do.at[slot], full)

        def load_both(t, _):
            load_queries(t)
            load_douts(t)

        load_queries(0)
        keys = pl.ds(tile.block * bk, bk)
        common.bar_sync(plan.barrier("kv"), everyone)
        full = memory.k_full.at[0]
        plgpu.copy_gmem_to_smem(arrays.k.at[tile.b, keys, tile.head], memory.k, full)
        if plan.segments:
            plgpu.copy_gmem_to_smem(arrays.ids.at[tile.b, keys], memory.k_ids, full)
        load_douts(0)
        full = memory.v_full.at[0]
        plgpu.copy_gmem_to_smem(arrays.v.at[tile.b, keys, tile.head], memory.v, full)
        steps = tile.steps(plan)
        lax.fori_loop(1, steps, load_both, None)
        return loaded + steps, number + plan.blocks

    start = jnp.int32(0), lax.axis_index("block")
    lax.while_loop(lambda carry: carry[1] < plan.n_tiles, load_tile, start)


def _compute(plan: Plan, arrays: Arrays, memory: Memory, warpgroup: Any):
    """A computing warpgroup: its part of each tile."""
    everyone = plan.warpgroups + 1
    common.bar_arrive(plan.barrier("kv"), everyone)
    for stage in range(plan.tiling.stages):
        common.bar_arrive(plan.barrier("stage") + stage, everyone)

    def compute_tile(carry):
        used, number = carry
        tile = _tile(plan, arrays, number)
        work = Work(plan, arrays, memory, warpgroup, used, tile)
        _compute_tile(work)
        return used + tile.steps(plan), number + plan.blocks

    start = jnp.int32(0), lax.axis_index("block")
    lax.while_loop(lambda carry: carry[1] < plan.n_tiles, compute_tile, start)
    plgpu.wait_smem_to_gmem(0)


class Work(NamedTuple):
    """A warpgroup's part of a tile. used: query blocks of this CUDA block's earlier tiles."""

    plan: Plan
    arrays: Arrays
    memory: Memory
    warpgroup: Any
    used: Any
    tile: Tile

    def afresh(self) -> "Work":
        """The same; but addresses computed from it are not kept in registers all the time."""
        if self.plan.interpret:
            return self
        return self._replace(warpgroup=inline.opaque(self.warpgroup))

    def slot(self, t: Any) -> Any:
        return lax.rem(self.used + t, self.plan.tiling.stages)

    def keys(self) -> Any:
        """Of the key block, those whose scores the warpgroup computes."""
        return pl.ds(0 if self.plan.tiling.split == "dims" else self.warpgroup * 64, 64)

    def columns(self) -> Any:
        """Of dk and dv, those that the warpgroup sums up."""
        if self.plan.tiling.split == "dims":
            return pl.ds(self.warpgroup * self.plan.columns, self.plan.columns)
        return pl.ds(0, self.plan.columns)

    def ds(self) -> Any:
        return self.memory.own[0][0]

    def dq(self) -> Any:
        return self.memory.own[0][1].at[self.warpgroup]

    def free(self, name: str, slot: Any = 0):
        if self.plan.interpret:
            plgpu.commit_smem()  # its reads are ordinary loads, which wgmma's are not
        common.bar_arrive(self.plan.barrier(name) + slot, self.plan.warpgroups + 1)

    def meet(self):
        """The computing warpgroups wait for each other."""
        common.bar_sync(self.plan.barrier("ds"), self.plan.warpgroups)

    def left(self, x: Any) -> Any:
        """x as the left operand of a product: itself, in registers."""
        if not self.plan.interpret:
            return x
        ref = self.memory.registers.at[self.warpgroup]
        ref[...] = x
        return ref


def _accumulator(rows: int, columns: int) -> Any:
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def _compute_tile(work: Work):
    plan, tile = work.plan, work.tile
    steps = tile.steps(plan)

    def sums(dk, dv):
        plgpu.barrier_wait(work.memory.k_full.at[0])
        lax.fori_loop(0, steps, lambda t, _: _step(work, t, dk, dv), None)
        last = work.afresh()
        last.meet()
        _add_dq(last, steps - 1, _dq_part(last, steps - 1, 0))
        if plan.tiling.dk_from == "shared":
            work.free("stage", work.slot(steps - 1))
        work.free("kv")
        narrow = lambda x: lax.optimization_barrier(x.astype(plan.dtype))
        return narrow(lax.optimization_barrier(dk[...]) * plan.scale), narrow(dv[...])

    sum_ = _accumulator(64, plan.columns)
    dk, dv = pl.run_scoped(sums, sum_, sum_)
    _finish(work, dk, dv)


def _step(work: Work, t: Any, dk: Any, dv: Any):
    """dq of the query block before t; of query block t its part of dk and dv, and ds."""
    work = work.afresh()
    plan, memory, slot = work.plan, work.memory, work.slot(t)
    bq, tiling = plan.tiling.block_q, plan.tiling
    q, do = memory.q.at[slot], memory.do.at[slot]
    plgpu.barrier_wait(memory.q_full.at[slot])

    def scores_and_dq(dq, scores):
        work.meet()
        # The first of a tile is computed as well, of whatever is there, but not added.
        _issue_dq(work, t - 1, 0, dq)
        plgpu.wgmma(scores, memory.k.at[work.keys()], q.T)
        dq_value = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dq, wait_n=1))

        def before():
            if tiling.dk_from == "shared":
                # Products end in the order in which they were issued: the last step's have.
                work.free("stage", work.slot(t - 1))
            _add_dq(work, t - 1, dq_value)

        lax.cond(t == 0, lambda: plgpu.barrier_wait(memory.v_full.at[0]), before)
        plgpu.barrier_wait(memory.do_full.at[slot])

        def dp_and_dv(dp):
            plgpu.wgmma(dp, memory.v.at[work.keys()], do.T)
            s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores, wait_n=1))
            p, slope = _probabilities(work, t, s)
            plgpu.wgmma(dv, work.left(p), do.at[:, work.columns()])
            return slope, lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp, wait_n=1))

        return pl.run_scoped(dp_and_dv, _accumulator(64, bq))

    accumulators = _accumulator(64, tiling.dq_columns), _accumulator(64, bq)
    slope, dp = pl.run_scoped(scores_and_dq, *accumulators)
    delta = _stats(work, t, 1)
    ds = (slope.astype(jnp.float32) * (dp - _columns_to(delta, dp))).astype(plan.dtype)
    # The tile before has left this memory.
    pl.when(t == 0)(lambda: _await_stores(work))
    _store_ds(work, t, ds)
    if tiling.dk_from == "registers":
        plgpu.wgmma(dk, work.left(ds), q.at[:, work.columns()])
        plgpu.wgmma_wait(0)
        work.free("stage", slot)
    else:
        plgpu.commit_smem()
        plgpu.wgmma(dk, work.ds().at[lax.rem(t, 2), work.keys()], q.at[:, work.columns()])


def _columns_to(x: Any, like: Any) -> Any:
    return lax.broadcast_in_dim(x, like.shape, [1])


def _probabilities(work: Work, t: Any, s: Any) -> tuple[Any, Any]:
    """(p, p times the derivative of the softcap) of transposed scores, in 16 bits."""
    plan, tile = work.plan, work.tile
    _, block = tile.query_block(plan, t)
    factor = plan.scale * LOG2E
    if plan.softcap is not None:
        s = jnp.tanh(s * (plan.scale / plan.softcap))
        factor = plan.softcap * LOG2E
    capped = s
    if plan.mask.causal or plan.segments or plan.T % plan.tiling.block_kv:
        masked = (block < tile.full_lo) | (block >= tile.full_hi)
        mask = lambda s: jnp.where(_visible(work, t, block), s, -jnp.inf)
        s = lax.cond(masked, mask, lambda s: s, s)
    lse = _stats(work, t, 0)
    p = jnp.exp2(s * factor - _columns_to(lse, s))
    slope = p if plan.softcap is None else p * (1 - capped * capped)
    # The barrier makes all uses share the packed registers.
    p16 = lax.optimization_barrier(p.astype(plan.dtype))
    return p16, p16 if plan.softcap is None else lax.optimization_barrier(slope.astype(plan.dtype))


def _visible(work: Work, t: Any, block: Any) -> Any:
    """Which queries see which of the warpgroup's keys: bool [keys, queries]."""
    plan, memory, shape = work.plan, work.memory, (64, work.plan.tiling.block_q)
    s0 = work.tile.block * plan.tiling.block_kv + work.keys().start
    # Queries beyond the sequence, of no document or without keys have p = 0 through their lse.
    conditions = []
    if plan.mask.causal:
        start = block * plan.tiling.block_q - s0
        if plan.interpret:
            row, column = (lax.broadcasted_iota(jnp.int32, shape, d) for d in range(2))
            age = start + column - row
        else:
            age = inline.column_less_row(shape, start)
        conditions.append(age >= 0)
        if plan.mask.window is not None:
            conditions.append(age <= plan.mask.window)
    elif plan.T % plan.tiling.block_kv:
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
        conditions.append(row < plan.T - s0)
    if plan.segments:
        k_ids = plgpu.load(memory.k_ids.at[work.keys()], layout=ROWS)
        q_ids = plgpu.load(memory.q_ids.at[work.slot(t)], layout=COLUMNS)
        k_ids, q_ids = (lax.broadcast_in_dim(x, shape, [d]) for d, x in enumerate((k_ids, q_ids)))
        conditions.append(k_ids == q_ids)
    return functools.reduce(jnp.logical_and, conditions)


def _stats(work: Work, t: Any, which: int) -> Any:
    """Log-sum-exps (0) or deltas (1), for the columns of transposed scores."""
    plan, slot = work.plan, work.slot(t)
    if plan.interpret:
        return plgpu.load(work.memory.stats.at[slot, which], layout=COLUMNS)
    return inline.load_for_columns(work.memory.stats, 2 * slot + which, plan.tiling.block_q)


def _store_ds(work: Work, t: Any, ds: Any):
    plan, keys = work.plan, work.keys()

    def store():
        if plan.interpret:
            work.ds()[lax.rem(t, 2), keys] = ds
            return
        transforms = common.tiles((plan.tiling.block_q,), plan.dtype).transforms
        at = lax.rem(t, 2) * (plan.tiling.block_kv // 64) + lax.div(keys.start, 64)
        inline.store_rows(work.ds(), transforms, at, ds)

    if plan.tiling.split == "dims":
        pl.when(work.warpgroup == 0)(store)
    else:
        store()
    inline.fence()


def _dq_parts(work: Work) -> list[tuple[Any, Any]]:
    """(rows, columns) of dq that the warpgroup computes, one after the other."""
    plan, width = work.plan, work.plan.tiling.dq_columns
    if plan.tiling.block_q == 64 * plan.warpgroups:
        rows, columns, first = work.warpgroup * 64, plan.H, 0
    else:
        rows, columns = 0, plan.H // plan.warpgroups
        first = work.warpgroup * columns
    return [(pl.ds(rows, 64), pl.ds(first + at, width)) for at in range(0, columns, width)]


def _issue_dq(work: Work, t: Any, part: int, dq: Any):
    rows, columns = _dq_parts(work)[part]
    plgpu.wgmma(dq, work.ds().at[lax.rem(t + 2, 2), :, rows].T, work.memory.k.at[:, columns])


def _add_dq(work: Work, t: Any, dq: Any):
    """Adds dq of query block t, of which the first part is given."""
    _add_dq_part(work, t, 0, dq)
    for part in range(1, len(_dq_parts(work))):
        _add_dq_part(work, t, part, _dq_part(work, t, part))


def _dq_part(work: Work, t: Any, part: int) -> Any:
    def multiply(dq):
        _issue_dq(work, t, part, dq)
        return dq[...]

    return pl.run_scoped(multiply, _accumulator(64, work.plan.tiling.dq_columns))


def _add_dq_part(work: Work, t: Any, part: int, dq: Any):
    plan, tile = work.plan, work.tile
    rows, columns = _dq_parts(work)[part]
    head, block = tile.query_block(plan, t)
    if plan.interpret:
        rows = pl.ds(block * plan.tiling.block_q + rows.start, rows.size)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        work.dq()[...] = dq
        plgpu.commit_smem()
        to = work.arrays.dq.at[tile.block, tile.b, rows, head, columns]
        plgpu.copy_smem_to_gmem(work.dq(), to)
        return
    piece = ((tile.b * plan.N + head) * plan.q_blocks + block) * (plan.tiling.block_q // 64)
    piece = (piece + lax.div(rows.start, 64)) * (plan.H // columns.size)
    piece += lax.div(columns.start, columns.size)
    if plan.tiling.dq_by == "red":
        inline.write_registers(work.arrays.dq, piece, dq, "red.global.add.v4.f32")
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    inline.write_registers(work.memory.own[0][1], work.warpgroup, dq, "st.shared.v4.f32")
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(work.dq(), work.arrays.dq.at[piece], reduction_op="add")


def _await_stores(work: Work):
    """All warpgroups' stores have read shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    work.meet()


def _finish(work: Work, dk: Any, dv: Any):
    """Stores dk and dv through the memory of ds and dq."""
    work = work.afresh()
    plan, tile, arrays = work.plan, work.tile, work.arrays
    _await_stores(work)
    keys = work.keys()
    rows = pl.ds(tile.block * plan.tiling.block_kv + keys.start, keys.size)
    buffers = work.memory.own[1]
    width = buffers[0].shape[-1]
    pieces = [
        (array, x, at)
        for array, x in ((arrays.dk, dk), (arrays.dv, dv))
        for at in range(0, plan.columns, width)
    ]
    for i, (array, x, at) in enumerate(pieces):
        if i >= len(buffers):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = buffers[i % len(buffers)].at[work.warpgroup]
        staged[...] = x[:, at : at + width]
        plgpu.commit_smem()
        columns = pl.ds(work.columns().start + at, width)
        plgpu.copy_smem_to_gmem(staged, array.at[tile.b, rows, tile.head, columns])
