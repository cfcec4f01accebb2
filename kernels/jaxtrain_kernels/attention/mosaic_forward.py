"""Flash attention's forward pass for Hopper, in Pallas Mosaic GPU.

The design is FlashAttention-3's (arXiv:2407.08608): one warpgroup loads tiles by TMA, two or three
others compute 64 query rows each. A computing warpgroup issues q k^T of the next key block and p v
of this one together, and takes the softmax of the first while the second still runs; warpgroups may
take turns at issuing, so that one's softmax hides under another's products. Blocks are persistent:
the loader runs ahead into the next tile while the others finish the last one, and these issue the
next tile's first product before they store their output. Tiles of work are handed out heaviest
first, within groups of heads whose keys and values fit the L2 cache.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention import mosaic_common as common
from jaxtrain_kernels.attention.mosaic_common import MATRIX, Mask
from jaxtrain_kernels.attention.mosaic_forward_load import (
    TILE,
    Arrays,
    ForwardTiling,
    Memory,
    Plan,
    load,
)
from jaxtrain_kernels.attention.mosaic_forward_softmax import (
    Keys,
    State,
    Work,
    no_state,
    rescaled,
    softmax,
)


def default_tiling(head_dim: int, segments: bool = False) -> ForwardTiling:
    if head_dim <= 64:
        return ForwardTiling(warpgroups=3, v_stages=3)
    if head_dim <= 128:
        # Segment ids need shared memory too.
        return ForwardTiling(k_stages=2 if segments else 3)
    return ForwardTiling(block_kv=64, k_stages=2, q_stages=1)


def forward(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B T K H"],
    v_BSKH: Float[Array, "B T K H"],
    ids_BT: Int[Array, "B T"] | None = None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    tiling: ForwardTiling | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Attention's output in q's dtype and its log-sum-exp in float32 (-inf for a row without keys).

    bfloat16 or float16; N a multiple of K; H a multiple of 32 up to 256; scale > 0; any T; the
    arguments otherwise as those of `attention`. interpret: plgpu.InterpretGPUParams, on a CPU.
    """
    B, T, N, H = q_BTNH.shape
    tiling = tiling or default_tiling(H, ids_BT is not None)
    mask = Mask(causal, window)
    ranges = common.block_ranges(mask, T, 64 * tiling.warpgroups, tiling.block_kv, ids_BT)
    plan = Plan(
        B=B,
        T=T,
        N=N,
        K=k_BSKH.shape[2],
        H=H,
        dtype=q_BTNH.dtype,
        mask=mask,
        softcap=softcap,
        scale=scale,
        segments=ids_BT is not None,
        tiling=tiling,
        blocks=0,
        group=_heads_together(B * N, N // k_BSKH.shape[2], T * H * 4, tiling.l2_bytes),
        extra_masked=ids_BT is not None or _extra_masked(ranges),
        interpret=bool(interpret),
    )
    wanted = common.sm_count() if tiling.blocks is None else tiling.blocks or plan.n_tiles
    plan = plan._replace(blocks=min(wanted, plan.n_tiles))
    # TMA needs whole rows of 8 tokens; it fills with zeros and drops what lies outside the arrays.
    pad = lambda x: jnp.pad(x, [(0, -T % 8 if d == 1 else 0) for d in range(x.ndim)])
    arrays = [pad(x) for x in (q_BTNH, k_BSKH, v_BSKH)]
    runs = jnp.zeros_like(ranges.lo)
    if ids_BT is not None:
        limits_B3T, runs_B = _limits(mask, ids_BT)
        runs = jnp.broadcast_to(runs_B[:, None].astype(jnp.int32), ranges.lo.shape)
        arrays += [jnp.pad(limits_B3T, ((0, 0), (0, 0), (0, -T % plan.rows))), pad(ids_BT)]
    arrays.insert(3, jnp.stack((*ranges, runs), -1))
    out_BTNH, lse_BNT = _call(plan, arrays, interpret)
    return out_BTNH[:, :T], lse_BNT[:, :, :T]


def _heads_together(heads: int, shared_by: int, kv_bytes: int, l2_bytes: int) -> int:
    """The most heads, a divisor of all of them, whose keys and values fit `l2_bytes`."""
    fit = max(1, l2_bytes // kv_bytes * shared_by)
    return max(d for d in range(1, min(fit, heads) + 1) if heads % d == 0)


def _extra_masked(ranges: common.BlockRanges) -> bool:
    return bool(np.any((ranges.full_hi < ranges.hi - 1) | (ranges.full_lo > ranges.lo)))


def _limits(mask: Mask, ids_BT: Any) -> tuple[Any, Any]:
    """int32 [B, 3, T]: the first key that a query sees and the one after the last, its id; [B].

    The limits hold for the batch rows of the second result: where ids grow, if padding is left out.
    """
    B, T = ids_BT.shape
    t = jnp.arange(T, dtype=jnp.int32)[None]
    begins = jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    first = _running_max(jnp.where(begins, t, 0))
    last = T - 1 - _running_max(jnp.where(ends, T - 1 - t, 0)[:, ::-1])[:, ::-1]
    if mask.window is not None:
        first = jnp.maximum(first, t - mask.window)
    if mask.causal:
        last = jnp.broadcast_to(t, (B, T))
    some = ids_BT > 0
    limits = jnp.where(some, first, 0), jnp.where(some, last + 1, 0), ids_BT
    earlier = jnp.pad(_running_max(jnp.maximum(ids_BT, 0))[:, :-1], ((0, 0), (1, 0)))
    return jnp.stack(limits, 1), (~(some & begins) | (ids_BT > earlier)).all(1)


def _running_max(x_BT: Any, block: int = 128) -> Any:
    """Of entries that are at least 0: two levels, each one fused kernel, in place of a scan."""
    B, T = x_BT.shape
    x = jnp.pad(x_BT, ((0, 0), (0, -T % block))).reshape(B, -1, block)
    inside = jnp.where(np.tri(block, dtype=bool), x[:, :, None], 0).max(-1)
    before = jnp.where(np.tri(x.shape[1], k=-1, dtype=bool), inside[:, None, :, -1], 0).max(-1)
    return jnp.maximum(inside, before[..., None]).reshape(B, -1)[:, :T]


def _call(plan: Plan, arrays: list, interpret: Any):
    tiling, rows, i32 = plan.tiling, plan.rows, jnp.int32
    block = (tiling.block_kv, plan.H)
    arrivals = 2 if plan.segments else 1
    scratch: dict[str, Any] = dict(
        q=common.tiles((tiling.q_stages, rows, plan.H), plan.dtype),
        k=common.tiles((tiling.k_stages, *block), plan.dtype),
        v=common.tiles((tiling.v_stages, *block), plan.dtype),
        lse=plgpu.SMEM((tiling.warpgroups, 64), jnp.float32),
        tile=plgpu.SMEM((tiling.q_stages + 1, len(TILE)), i32),
        q_full=plgpu.Barrier(num_barriers=tiling.q_stages, num_arrivals=arrivals),
        k_full=plgpu.Barrier(num_barriers=tiling.k_stages, num_arrivals=arrivals),
        v_full=plgpu.Barrier(num_barriers=tiling.v_stages),
    )
    if plan.segments:
        scratch["limits"] = plgpu.SMEM((tiling.q_stages, 3, rows), i32)
        scratch["k_ids"] = plgpu.SMEM((tiling.k_stages, tiling.block_kv), i32)

    def attention_forward(*refs, **memory):
        q, k, v, ranges, *ids, out, lse = refs
        limits, ids = ids or (None, None)
        _block(plan, Arrays(q, k, v, ranges, limits, ids, out, lse), Memory(**memory))

    padded_T = plan.row_blocks * rows
    return plgpu.kernel(
        attention_forward,
        out_type=(
            jax.ShapeDtypeStruct(arrays[0].shape, plan.dtype),
            jax.ShapeDtypeStruct((plan.B, plan.N, padded_T), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        interpret=interpret,
    )(*arrays)


def _block(plan: Plan, arrays: Arrays, memory: Memory):
    """One CUDA block."""
    warpgroup = lax.axis_index("warpgroup")
    counter = None
    if plan.tiling.dynamic and not plan.interpret and plan.blocks < plan.n_tiles:
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
    # Registers of 64 Ki in all, in multiples of 8 a thread.
    few, many = (24, 240) if plan.tiling.warpgroups == 2 else (32, 160)

    def loader():
        plgpu.set_max_registers(few, action="decrease")
        load(plan, arrays, memory, counter)

    def computing():
        plgpu.set_max_registers(many, action="increase")
        _compute(plan, arrays, memory, warpgroup)

    lax.cond(warpgroup < plan.tiling.warpgroups, computing, loader)


def _compute(plan: Plan, arrays: Arrays, memory: Memory, warpgroup: Any):
    """A computing warpgroup: 64 rows of each tile."""
    tiling = plan.tiling
    everyone = tiling.warpgroups + 1
    for name, stages in (("q", tiling.q_stages), ("k", tiling.k_stages), ("v", tiling.v_stages)):
        for stage in range(stages):
            common.bar_arrive(plan.barrier(name) + stage, everyone)
    if tiling.turns:
        # The last warpgroup gives the first its first turn.
        last = tiling.warpgroups - 1
        pl.when(warpgroup == last)(lambda: common.bar_arrive(plan.barrier("turn"), 2))

    def release_q(step):
        """The output of that tile has left shared memory, or will have when this returns."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        common.bar_arrive(plan.barrier("q") + lax.rem(step, tiling.q_stages), everyone)

    def compute_tile(carry):
        step, used, _, *scores = carry
        stage = lax.rem(step, tiling.q_stages)
        tile = {name: memory.tile[stage, i] for i, name in enumerate(TILE)}
        work = Work(plan, memory, warpgroup, stage, used, tile)
        following = work._replace(
            stage=lax.rem(step + 1, tiling.q_stages), used=used + work.blocks(), tile={}
        )
        scores = scores[0] if plan.ahead else _first_scores(work)
        state = no_state(plan)
        mask = plan.mask._replace(window=None) if plan.halves_left else plan.mask
        p, peak, total, *_ = softmax(work, scores, work.first(), state, mask, not plan.halves)
        state = State(state.out, p.astype(plan.dtype), peak, total)
        if tiling.q_stages > 1:
            pl.when(step > 0)(lambda: release_q(step - 1))
        state = _key_blocks(work, state)
        if plan.ahead:
            more = _last_values_and_next(work, following, arrays, state)
        else:
            _finish(work, arrays, _last_values(work, state))
            if tiling.q_stages == 1:
                release_q(step)
            more = (_await_tile(following),)
        return step + 1, following.used, *more

    start = Work(plan, memory, warpgroup, jnp.int32(0), jnp.int32(0), {})
    carry = jnp.int32(0), start.used, _await_tile(start)
    if plan.ahead:
        carry += (_first_scores(start),)
    lax.while_loop(lambda carry: carry[2] >= 0, compute_tile, carry)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _await_tile(work: Work) -> Any:
    """Its queries have been loaded; negative if there is no such tile."""
    plgpu.barrier_wait(work.memory.q_full.at[work.stage])
    return work.memory.tile[work.stage, 0]


def _scores_accumulator(keys: Keys) -> Any:
    return plgpu.WGMMAAccumulatorRef((64, keys.width), jnp.float32)


def _first_scores(work: Work):
    """q k^T of the tile's first keys."""
    keys = work.first()
    plgpu.barrier_wait(work.memory.k_full.at[work.k_slot(0)])
    if work.plan.interpret:
        return _dot(work.q()[...], work.k(keys)[...].T)

    def multiply(scores):
        plgpu.wgmma(scores, work.q(), work.k(keys).T)
        return scores[...]

    return pl.run_scoped(multiply, _scores_accumulator(keys))


def _dot(a, b):
    """wgmma, where it is interpreted."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _key_blocks(work: Work, state: State) -> State:
    """The keys after the first; what is left is to add the values of all of the last block."""
    plan, tile, done = work.plan, work.tile, 1
    if plan.halves:
        state, done = _diagonal(work, state)
    else:
        work.await_keys(1)

    def step(mask):
        return lambda t, state: _step(work, work.all(t), work.all(t - 1), state, mask)

    if plan.extra_masked and not plan.halves_left:
        masked = tile["hi"] - tile["full_hi"] + tile["full_lo"] - tile["lo"]
        state = lax.fori_loop(done, masked, step(plan.mask), state)
        done = jnp.maximum(done, masked)
    return lax.fori_loop(done, work.blocks(), step(None), state)


def _diagonal(work: Work, state: State) -> tuple[State, Any]:
    """The rest of the diagonal's block, that at the window's edge, and one more: how many blocks.

    In the first two, a warpgroup starts with the 64 keys that only a part of its rows sees.
    """
    plan, window = work.plan, work.plan.mask.window
    work.await_values(0)
    some_hidden = plan.segments or (window is not None and window < plan.rows)

    def towards_first(i, state):
        at = (work.warpgroup - i) * 64
        mask = plan.mask if some_hidden else None
        return _step(work, Keys(0, at - 64, 64), Keys(0, at, 64), state, mask, False)

    state = lax.fori_loop(0, work.warpgroup, towards_first, state)
    work.free("k", 0)
    work.await_keys(1)

    def edge(state):
        at = work.warpgroup * 64
        mask = Mask(False, window)
        state = _step(work, Keys(1, at, 64), Keys(0, 0, 64), state, mask)
        work.await_values(1)

        def towards_last(i, state):
            return _step(work, Keys(1, i * 64 + 64, 64), Keys(1, i * 64, 64), state, None, False)

        last = plan.tiling.warpgroups - 1
        state = lax.fori_loop(work.warpgroup, last, towards_last, state)
        work.free("k", 1)
        work.await_keys(2)
        return state

    before, t = Keys(0, 0, 64), 1
    if plan.halves_left:
        at_edge = work.tile["full_lo"] - work.tile["lo"]
        state = lax.cond(at_edge > 0, edge, lambda state: state, state)
        before, t = Keys(at_edge, at_edge * (plan.rows - 64), 64), at_edge + 1

    def another(state):
        mask = plan.mask if plan.extra_masked and not plan.halves_left else None
        return _step(work, work.all(t), before, state, mask)

    def none(state):
        rest = jnp.zeros((64, plan.tiling.block_kv - 64), plan.dtype)
        p = jnp.concatenate([state.p, plgpu.layout_cast(rest, MATRIX)], axis=1)
        return state._replace(p=p)

    return lax.cond(work.blocks() > t, another, none, state), t + 1


def _step(
    work: Work, keys: Keys, before: Keys, state: State, mask: Mask | None, moves: bool = True
) -> State:
    """Scores and softmax of `keys`, while the products with the values of `before` run.

    moves: on to another block. Blocks in halves are awaited by the caller, their keys also freed.
    """
    plan, turn = work.plan, work.plan.barrier("turn")
    tiling = plan.tiling
    whole = keys.width == tiling.block_kv
    turns = tiling.turns and whole

    if turns:
        common.bar_sync(turn + work.warpgroup, 2)

    def issue_values(out):
        if before.width == tiling.block_kv:
            work.await_values(before.t)
        result = _dot(state.p, work.v(before)[...]) if plan.interpret else None
        if not plan.interpret:
            plgpu.wgmma(out, state.p, work.v(before))
        if turns:
            common.bar_arrive(turn + lax.rem(work.warpgroup + 1, tiling.warpgroups), 2)
        return result

    def await_next():
        if whole:
            work.await_keys(keys.t + 1)

    if plan.interpret:
        scores = _dot(work.q()[...], work.k(keys)[...].T)
        out = state.out + issue_values(None)
        p, peak, total, *shrink = softmax(work, scores, keys, state, mask, whole)
        await_next()
    else:

        def products(refs):
            out, *results = refs

            def with_scores(scores):
                plgpu.wgmma(scores, work.q(), work.k(keys).T)
                issue_values(out)
                return plgpu.wgmma_accumulator_load(scores, wait_n=1)

            scores = pl.run_scoped(with_scores, _scores_accumulator(keys))
            # The barriers keep the compiler from moving the softmax out from between the waits for
            # the two products.
            scores = lax.optimization_barrier(scores)
            result = softmax(work, scores, keys, state, mask, whole)
            for ref, x in zip(results, (*lax.optimization_barrier(result[:-1]), result[-1])):
                ref[...] = x
            # This wait is here because ptxas moves the one for the second product to the start of
            # its basic block, which without a branch in between would be before the softmax.
            await_next()

        p = plgpu.layout_cast(jnp.zeros((64, keys.width), jnp.float32), MATRIX)
        initial = plgpu.WGMMAAccumulatorRef.init(state.out), p, state.peak, state.total
        initial += state.peak, jnp.int32(0)
        out, p, peak, total, *shrink = pl.run_state(products)(initial)
        out = lax.optimization_barrier(out)
    if moves:
        work.free("v", before.t)
    return State(rescaled(plan, out, *shrink), p.astype(plan.dtype), peak, total)


def _await_last_values(work: Work):
    """Unless the last block is the diagonal's, which has been waited for."""
    last = work.blocks() - 1
    pl.when(last >= (1 if work.plan.halves else 0))(lambda: work.await_values(last))


def _last_values(work: Work, state: State) -> State:
    """Adds the last block's values."""
    _await_last_values(work)
    values = work.v(work.all(work.blocks() - 1))
    if work.plan.interpret:
        out = state.out + _dot(state.p, values[...])
    else:
        add = lambda out: plgpu.wgmma(out, state.p, values)
        out = lax.optimization_barrier(pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(state.out)))
    work.free("v", work.blocks() - 1)
    return state._replace(out=out)


def _last_values_and_next(work: Work, following: Work, arrays: Arrays, state: State):
    """As _last_values, and stores the output while the next tile's first product runs.

    Returns whether there is one (else negative), and its scores.
    """
    plan, last, first = work.plan, work.blocks() - 1, following.first()
    values = work.v(work.all(last))

    def await_next():
        more = _await_tile(following)
        loaded = work.memory.k_full.at[following.k_slot(0)]
        pl.when(more >= 0)(lambda: plgpu.barrier_wait(loaded))
        return more

    if plan.interpret:
        state = _last_values(work, state)
        more = await_next()
        scores = _dot(following.q()[...], following.k(first)[...].T)
        _finish(work, arrays, state)
        return more, scores

    def products(refs):
        out, more_ref, scores_ref = refs
        _await_last_values(work)
        plgpu.wgmma(out, state.p, values)
        more_ref[...] = await_next()

        def with_scores(scores):
            # If there is no next tile, this multiplies what is left of earlier ones.
            plgpu.wgmma(scores, following.q(), following.k(first).T)
            result = lax.optimization_barrier(plgpu.wgmma_accumulator_load(out, wait_n=1))
            work.free("v", last)
            _finish(work, arrays, state._replace(out=result))
            return scores[...]

        scores_ref[...] = pl.run_scoped(with_scores, _scores_accumulator(first))

    scores = plgpu.layout_cast(jnp.zeros((64, first.width), jnp.float32), MATRIX)
    initial = plgpu.WGMMAAccumulatorRef.init(state.out), jnp.int32(0), scores
    _, more, scores = pl.run_state(products)(initial)
    return more, scores


def _finish(work: Work, arrays: Arrays, state: State):
    """Normalises, and stores through the shared memory that held the queries."""
    plan, memory, tile = work.plan, work.memory, work.tile
    total = state.total.sum(axis=1)
    some = total > 0
    inverse = jnp.where(some, 1.0, 0.0) / jnp.where(some, total, 1.0)
    out = state.out * common.rows_to(inverse, state.out)
    work.q()[...] = out.astype(plan.dtype)
    lse = state.peak * math.log(2.0) + jnp.log(jnp.where(some, total, 1.0))
    memory.lse[work.warpgroup] = jnp.where(some, lse, -jnp.inf)
    plgpu.commit_smem()
    row = tile["row"] + work.warpgroup * 64

    # This branch, too, keeps a wait for a product from moving up: that of the next tile.
    @pl.when(row < plan.T)
    def _():
        at = tile["batch"], tile["head"], pl.ds(row, 64)
        plgpu.copy_smem_to_gmem(work.q(), arrays.out.at[at[0], at[2], at[1]])
        plgpu.copy_smem_to_gmem(memory.lse.at[work.warpgroup], arrays.lse.at[at])
