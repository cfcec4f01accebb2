"""Computing warpgroup of the Hopper forward kernel: the order of its matmuls and softmaxes."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper import common
from jaxtrain_kernels.attention.hopper.common import Mask
from jaxtrain_kernels.attention.hopper.forward_load import (
    TILE,
    ForwardArrays,
    ForwardMemory,
    ForwardPlan,
)
from jaxtrain_kernels.attention.hopper.forward_softmax import (
    ForwardWork,
    Keys,
    SoftmaxState,
    no_state,
    rescaled,
    softmax,
)
from jaxtrain_kernels.hopper import MATRIX, Index


def compute(plan: ForwardPlan, arrays: ForwardArrays, memory: ForwardMemory, warpgroup: jax.Array):
    """Compute one warpgroup's 64 rows of each tile."""
    tiling = plan.tiling
    everyone = tiling.warpgroups + 1
    for name, stages in (("q", tiling.q_stages), ("k", tiling.k_stages), ("v", tiling.v_stages)):
        for stage in range(stages):
            hopper.bar_arrive(plan.barrier(name) + stage, everyone)
    if tiling.turns:
        # The last warpgroup lets the first one start.
        last = tiling.warpgroups - 1
        pl.when(warpgroup == last)(lambda: hopper.bar_arrive(plan.barrier("turn"), 2))

    def release_q(step):
        """Wait until that tile's output has left shared memory, then free its memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        hopper.bar_arrive(plan.barrier("q") + lax.rem(step, tiling.q_stages), everyone)

    def compute_tile(carry):
        step, used, _, *scores = carry
        stage = lax.rem(step, tiling.q_stages)
        tile = {name: memory.tile[stage, i] for i, name in enumerate(TILE)}
        work = ForwardWork(plan, memory, warpgroup, stage, used, tile)
        following = work._replace(
            stage=lax.rem(step + 1, tiling.q_stages), used=used + work.blocks(), tile={}
        )
        scores = scores[0] if plan.ahead else _first_scores(work)
        state = no_state(plan)
        mask = plan.mask._replace(window=None) if plan.halves_left else plan.mask
        p, peak, total, *_ = softmax(work, scores, work.first(), state, mask, not plan.halves)
        state = SoftmaxState(state.out, p.astype(plan.dtype), peak, total)
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

    start = ForwardWork(plan, memory, warpgroup, jnp.int32(0), jnp.int32(0), {})
    carry = jnp.int32(0), start.used, _await_tile(start)
    if plan.ahead:
        carry += (_first_scores(start),)
    lax.while_loop(lambda carry: carry[2] >= 0, compute_tile, carry)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _await_tile(work: ForwardWork) -> jax.Array:
    """Wait until the tile's queries are loaded. Returns a negative value if there is no tile."""
    plgpu.barrier_wait(work.memory.q_full.at[work.stage])
    return work.memory.tile[work.stage, 0]


def _scores_accumulator(keys: Keys) -> plgpu.WGMMAAccumulatorRef:
    return plgpu.WGMMAAccumulatorRef((64, keys.width), jnp.float32)


def _first_scores(work: ForwardWork):
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
    """Stand-in for wgmma in interpret mode."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _key_blocks(work: ForwardWork, state: SoftmaxState) -> SoftmaxState:
    """Process the keys after the first. The values of the last block are not yet added."""
    plan, tile, done = work.plan, work.tile, 1
    if plan.halves:
        state, done = _diagonal(work, state)
    else:
        work.await_keys(1)

    def step(mask):
        return lambda t, state: _step(work, work.all(t), work.all(t - 1), state, mask)

    if plan.extra_masked and not plan.halves_left:
        masked = tile["hi"] - tile["full_hi"] + tile["full_lo"] - tile["lo"]
        state = lax.fori_loop(done, masked, step(plan.earlier_mask), state)
        done = jnp.maximum(done, masked)
    return lax.fori_loop(done, work.blocks(), step(None), state)


def _diagonal(work: ForwardWork, state: SoftmaxState) -> tuple[SoftmaxState, Index]:
    """Process the rest of the diagonal block, the window edge's block, one more; count them too.

    In the first two, a warpgroup starts with the 64 keys that only some of its rows see.
    """
    plan, window = work.plan, work.plan.mask.window
    work.await_values(0)
    some_hidden = plan.segments or (window is not None and window < plan.rows)

    def towards_first(i, state):
        at = (work.warpgroup - i) * 64
        mask = plan.earlier_mask if some_hidden else None
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
        mask = plan.earlier_mask if plan.extra_masked and not plan.halves_left else None
        return _step(work, work.all(t), before, state, mask)

    def none(state):
        rest = jnp.zeros((64, plan.tiling.block_kv - 64), plan.dtype)
        p = jnp.concatenate([state.p, plgpu.layout_cast(rest, MATRIX)], axis=1)
        return state._replace(p=p)

    return lax.cond(work.blocks() > t, another, none, state), t + 1


def _step(
    work: ForwardWork,
    keys: Keys,
    before: Keys,
    state: SoftmaxState,
    mask: Mask | None,
    moves: bool = True,
) -> SoftmaxState:
    """Compute scores and softmax of `keys`, while the matmul with the values of `before` runs.

    moves: whether `keys` are in another block than `before`. For blocks in halves, the caller waits
    for the loads and frees the keys.
    """
    plan, turn = work.plan, work.plan.barrier("turn")
    tiling = plan.tiling
    whole = keys.width == tiling.block_kv
    turns = tiling.turns and whole

    if turns:
        hopper.bar_sync(turn + work.warpgroup, 2)

    def issue_values(out):
        if before.width == tiling.block_kv:
            work.await_values(before.t)
        result = _dot(state.p, work.v(before)[...]) if plan.interpret else None
        if not plan.interpret:
            plgpu.wgmma(out, state.p, work.v(before))
        if turns:
            hopper.bar_arrive(turn + lax.rem(work.warpgroup + 1, tiling.warpgroups), 2)
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
            # the two matmuls.
            scores = lax.optimization_barrier(scores)
            result = softmax(work, scores, keys, state, mask, whole)
            for ref, x in zip(results, (*lax.optimization_barrier(result[:-1]), result[-1])):
                ref[...] = x
            # This wait is a branch: ptxas moves the wait for the second matmul to the start of its
            # basic block, which without a branch here would be before the softmax.
            await_next()

        p = plgpu.layout_cast(jnp.zeros((64, keys.width), jnp.float32), MATRIX)
        initial = plgpu.WGMMAAccumulatorRef.init(state.out), p, state.peak, state.total
        initial += state.peak, jnp.int32(0)
        out, p, peak, total, *shrink = pl.run_state(products)(initial)
        out = lax.optimization_barrier(out)
    if moves:
        work.free("v", before.t)
    return SoftmaxState(rescaled(plan, out, *shrink), p.astype(plan.dtype), peak, total)


def _await_last_values(work: ForwardWork):
    """Wait for the last block's values, unless it is the diagonal block, already waited for."""
    last = work.blocks() - 1
    pl.when(last >= (1 if work.plan.halves else 0))(lambda: work.await_values(last))


def _last_values(work: ForwardWork, state: SoftmaxState) -> SoftmaxState:
    """Add the last block's values."""
    _await_last_values(work)
    values = work.v(work.all(work.blocks() - 1))
    if work.plan.interpret:
        out = state.out + _dot(state.p, values[...])
    else:
        add = lambda out: plgpu.wgmma(out, state.p, values)
        out = lax.optimization_barrier(pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(state.out)))
    work.free("v", work.blocks() - 1)
    return state._replace(out=out)


def _last_values_and_next(
    work: ForwardWork, following: ForwardWork, arrays: ForwardArrays, state: SoftmaxState
):
    """Add the last block's values; store the output while the next tile's first matmul runs.

    Returns a value that is negative if there is no next tile, and the next tile's scores.
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
            # If there is no next tile, this multiplies stale data of earlier ones.
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


def _finish(work: ForwardWork, arrays: ForwardArrays, state: SoftmaxState):
    """Normalize the output and store it through the shared memory that held the queries."""
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

    # This branch, too, keeps a wait for a matmul (the next tile's) from moving up.
    @pl.when(row < plan.T)
    def _():
        at = tile["batch"], tile["head"], pl.ds(row, 64)
        plgpu.copy_smem_to_gmem(work.q(), arrays.out.at[at[0], at[2], at[1]])
        plgpu.copy_smem_to_gmem(memory.lse.at[work.warpgroup], arrays.lse.at[at])
