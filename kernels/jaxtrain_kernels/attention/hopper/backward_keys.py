"""Hopper backward kernel over blocks of keys: dK, dV and, unless it has its own kernel, dQ.

One warpgroup loads by TMA, the others own 64 keys each. They compute the transposed scores K Q^T,
so that P^T and dS^T leave the tensor cores in the layout of a left operand: dV += P^T dO and
dK += dS^T Q read them from registers. Only dS goes to shared memory, for dQ = dS K. dQ is summed
over key blocks in float32 in device memory (as in FlashAttention-3, arXiv:2407.08608).

Order of one step. The warpgroups synchronize once, when all of dS is in shared memory:

    issue S, dP;     send the last step's dQ           while S runs
    wait S;          P = exp2(S)                       while dP runs
    issue dV;        wait dP; dS to shared memory      while dV runs
    synchronize;     issue dQ, dK; wait dQ; dQ to shared memory   while dK runs
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper import backward_dq as dqs
from jaxtrain_kernels.attention.hopper import backward_inline as inline
from jaxtrain_kernels.attention.hopper import backward_tiles as tiles
from jaxtrain_kernels.attention.hopper.backward_load import (
    KeyMemory,
    KeyWork,
    load,
    query_block,
    steps,
)
from jaxtrain_kernels.attention.hopper.backward_plan import KeyPlan
from jaxtrain_kernels.attention.hopper.backward_scores import (
    accumulator,
    finished,
    narrow,
    probabilities,
    score_gradient,
    visible_keys,
)
from jaxtrain_kernels.attention.hopper.backward_tiles import BackwardArrays
from jaxtrain_kernels.hopper import COLUMNS, ROWS


def call(
    plan: KeyPlan,
    arrays: list[jax.Array],
    zeros: list[jax.Array] | None,
    interpret: hopper.Interpret,
    into: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    """Return (dq in float32 not yet scaled, or None without dq; dk; dv).

    zeros: for dq, zero as far as the plan says, and the counters of a plan that zeroes ahead; None
    without dq, or to make them here.
    into: references that dk and dv are written to instead of being returned, at the heads that the
    plan gives; one reference if both are in one array.
    """

    def attention_backward(refs, memory):
        q, k, v, do, stats, ranges, *rest = refs
        ids = rest.pop(0) if plan.segments else None
        dq = rest.pop(0) if plan.with_dq else None
        counters = rest.pop(0) if plan.heads_ahead else None
        _block(
            plan,
            BackwardArrays(q, k, v, do, stats, ranges, ids, dq, rest[0], rest[-1], counters),
            KeyMemory(**memory),
        )

    out_type = [] if into else [jax.ShapeDtypeStruct(arrays[1].shape, plan.dtype)] * 2
    launch = lambda *more: tiles.launch(
        plan, attention_backward, _scratch(plan), out_type, [*arrays, *more], interpret
    )
    if not plan.with_dq:
        return None, *launch()
    shape = dqs.sums_shape(plan, arrays[3].shape)
    if zeros is None or plan.interpret:
        plan = plan.without_ahead()
        zeros = [jnp.zeros(shape, jnp.float32)]
    sums = jax.new_ref(zeros[0].reshape(shape))
    rest = launch(sums, *map(jax.new_ref, zeros[1:]), *into)
    dq = jax.freeze(sums)
    return dq.sum(0) if plan.interpret else dq, *(() if into else rest)


def _scratch(plan: KeyPlan) -> dict[str, Any]:
    tiling, warpgroups = plan.tiling, plan.warpgroups
    bq, bk, stages = tiling.block_q, tiling.block_kv, tiling.stages
    # Large heads or more stages leave no shared memory for more.
    width = 64 if tiling.split == "dims" else plan.H
    buffers = 1 if tiling.split == "dims" or plan.H * stages > 256 else 2
    output = hopper.tiles((warpgroups, 64, width), plan.dtype)
    ds = hopper.tiles((2, bk, bq), plan.dtype) if plan.with_dq else dqs.memory(plan)
    scratch: dict[str, Any] = dict(
        k=hopper.tiles((bk, plan.H), plan.dtype),
        v=hopper.tiles((bk, plan.H), plan.dtype),
        q=hopper.tiles((stages, bq, plan.H), plan.dtype),
        do=hopper.tiles((stages, bq, plan.H), plan.dtype),
        stats=plgpu.SMEM((stages, 2, bq), jnp.float32),
        own=plgpu.RefUnion([ds, dqs.memory(plan)], [output] * buffers),
        tile=tiles.memory(),
        k_full=plgpu.Barrier(num_barriers=1, num_arrivals=2 if plan.segments else 1),
        v_full=plgpu.Barrier(num_barriers=1),
        q_full=plgpu.Barrier(num_barriers=stages, num_arrivals=3 if plan.segments else 2),
        do_full=plgpu.Barrier(num_barriers=stages),
    )
    if plan.segments:
        scratch["k_ids"] = plgpu.SMEM((bk,), jnp.int32)
        scratch["q_ids"] = plgpu.SMEM((stages, bq), jnp.int32)
    if plan.interpret:
        scratch["registers"] = hopper.tiles((warpgroups, 64, bq), plan.dtype)
    return scratch


def _block(plan: KeyPlan, arrays: BackwardArrays, memory: KeyMemory):
    """One CUDA block."""
    counter = arrays.counters.at[0] if plan.heads_ahead else tiles.counter(plan)
    hopper.specialize_warpgroups(
        plan.warpgroups,
        lambda: load(plan, arrays, memory, counter),
        lambda warpgroup: _compute(plan, arrays, memory, warpgroup),
    )


def _compute(plan: KeyPlan, arrays: BackwardArrays, memory: KeyMemory, warpgroup: Any):
    """Compute one warpgroup's part of each tile."""
    everyone = plan.warpgroups + 1
    hopper.bar_arrive(plan.barrier("kv"), everyone)
    for stage in range(plan.tiling.stages):
        hopper.bar_arrive(plan.barrier("stage") + stage, everyone)

    def compute_tile(used, tile):
        _compute_tile(KeyWork(plan, arrays, memory, warpgroup, used, tile))
        return used + steps(plan, tile)

    tiles.compute_tiles(memory.tile, memory.k_full.at[0], compute_tile)
    plgpu.wait_smem_to_gmem(0)


def _compute_tile(work: KeyWork):
    plan, n_steps = work.plan, steps(work.plan, work.tile)

    def sums(dk, dv):
        step = _step if plan.with_dq else _step_without_dq
        lax.fori_loop(0, n_steps, lambda t, _: step(work.afresh(), t, dk, dv), None)
        if plan.with_dq:
            dqs.send(work.afresh(), n_steps - 1)
        work.free("kv")
        return narrow(plan, lax.optimization_barrier(dk[...]) * plan.scale), narrow(plan, dv[...])

    sum_ = accumulator(64, plan.columns)
    dk, dv = pl.run_scoped(sums, sum_, sum_)
    _finish(work, dk, dv)


def _step(work: KeyWork, t: Any, dk: Any, dv: Any):
    """Issue the five matmuls of query block t."""
    plan, slot, bq = work.plan, work.slot(t), work.plan.tiling.block_q
    q = work.memory.q.at[slot]
    plgpu.barrier_wait(work.memory.q_full.at[slot])

    def to_ds(scores, dp):
        _issue_scores(work, t, scores, dp)
        pl.when(t > 0)(lambda: dqs.send(work.afresh(), t - 1))
        return _ds(work, t, scores, dp, dv)

    # (Allocate both accumulators at once: between two scopes it would wait for the first matmul.)
    ds = pl.run_scoped(to_ds, accumulator(64, bq), accumulator(64, bq))
    # Wait until the previous tile's stores have read this memory.
    pl.when(t == 0)(lambda: _await_stores(work))
    _store_ds(work, t, ds)
    inline.fence()
    work.meet()

    def to_dq(dq):
        dqs.issue(work, t, dq)
        plgpu.wgmma(dk, work.left(ds), q.at[:, work.columns()])
        dqs.store_dq(work.afresh(), finished(dq, pending=1))

    pl.run_scoped(to_dq, accumulator(*dqs.shape(plan)))
    plgpu.wgmma_wait(0)
    work.free("stage", slot)


def _step_without_dq(work: KeyWork, t: Any, dk: Any, dv: Any):
    """Issue the four matmuls of query block t other than dQ's."""
    slot, bq = work.slot(t), work.plan.tiling.block_q
    q = work.memory.q.at[slot]
    plgpu.barrier_wait(work.memory.q_full.at[slot])

    def to_ds(scores, dp):
        _issue_scores(work, t, scores, dp)
        return _ds(work, t, scores, dp, dv)

    ds = pl.run_scoped(to_ds, accumulator(64, bq), accumulator(64, bq))
    plgpu.wgmma(dk, work.left(ds), q.at[:, work.columns()])
    plgpu.wgmma_wait(0)
    work.free("stage", slot)


def _issue_scores(work: KeyWork, t: Any, scores: Any, dp: Any):
    memory, slot, keys = work.memory, work.slot(t), work.keys()
    plgpu.wgmma(scores, memory.k.at[keys], memory.q.at[slot].T)
    pl.when(t == 0)(lambda: plgpu.barrier_wait(memory.v_full.at[0]))
    plgpu.barrier_wait(memory.do_full.at[slot])
    plgpu.wgmma(dp, memory.v.at[keys], memory.do.at[slot].T)


def _ds(work: KeyWork, t: Any, scores: Any, dp: Any, dv: Any) -> Any:
    """Return dS; also issue the matmul for dV."""
    plan = work.plan
    do = work.memory.do.at[work.slot(t), :, work.columns()]
    if plan.tiling.block_q > 64:
        # There are no registers for early loads, nor for P in float32.
        s = finished(scores, pending=1)
        p, slope = _probabilities(work, t, _stats(work, t, 0), s)
        plgpu.wgmma(dv, work.left(p), do)
        slope, dp = p if plan.softcap is None else slope, finished(dp, pending=1)
        return score_gradient(plan, slope, dp, _stats(work, t, 1), transposed=True)
    lse = _stats(work, t, 0)
    p, slope = _probabilities(work, t, lse, finished(scores, pending=1))
    plgpu.wgmma(dv, work.left(p), do)
    delta = _stats(work, t, 1)
    return score_gradient(plan, slope, finished(dp, pending=1), delta, transposed=True)


def _probabilities(work: KeyWork, t: Any, lse: Any, s: Any) -> tuple[Any, Any]:
    plan, memory, tile = work.plan, work.memory, work.tile
    _, block = query_block(plan, tile, t)

    def mask():
        keys, ids = work.keys(), None
        if plan.segments:
            ids = plgpu.load(memory.k_ids.at[keys], layout=ROWS)
            ids = ids, plgpu.load(memory.q_ids.at[work.slot(t)], layout=COLUMNS)
        s0 = tile.block * plan.tiling.block_kv + keys.start
        t0 = block * plan.tiling.block_q
        return visible_keys(plan, t0, s0, plan.tiling.block_q, ids, transposed=True)

    return probabilities(plan, s, lse, tile.masked(block), mask, transposed=True)


def _stats(work: KeyWork, t: Any, which: int) -> Any:
    """Load the log-sum-exps (0) or deltas (1), laid out as the columns of transposed scores."""
    plan, slot = work.plan, work.slot(t)
    if plan.interpret:
        return plgpu.load(work.memory.stats.at[slot, which], layout=COLUMNS)
    return inline.load_for_columns(work.memory.stats, 2 * slot + which, plan.tiling.block_q)


def _store_ds(work: KeyWork, t: Any, ds: Any):
    plan, keys = work.plan, work.keys()

    def store():
        if plan.interpret:
            work.ds()[lax.rem(t, 2), keys] = ds
            return
        transforms = hopper.tiles((plan.tiling.block_q,), plan.dtype).transforms
        at = lax.rem(t, 2) * (plan.tiling.block_kv // 64) + lax.div(keys.start, 64)
        inline.store_rows(work.ds(), transforms, at, ds)

    if plan.tiling.split == "dims":
        pl.when(work.warpgroup == 0)(store)
    else:
        store()


def _await_stores(work: KeyWork):
    """Wait until all warpgroups' stores have read shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    work.meet()


def _finish(work: KeyWork, dk: Any, dv: Any):
    """Store dk and dv, staged in the shared memory of ds and dq."""
    work = work.afresh()
    plan, tile, arrays = work.plan, work.tile, work.arrays
    _await_stores(work)
    keys = work.keys()
    rows = pl.ds(tile.block * plan.tiling.block_kv + keys.start, keys.size)
    buffers = work.memory.own[1]
    width = buffers[0].shape[-1]
    pieces = [
        (array, head + tile.head, x, at)
        for array, head, x in ((arrays.dk, plan.at.k, dk), (arrays.dv, plan.at.dv, dv))
        for at in range(0, plan.columns, width)
    ]
    for i, (array, head, x, at) in enumerate(pieces):
        if i >= len(buffers):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = buffers[i % len(buffers)].at[work.warpgroup]
        staged[...] = x[:, at : at + width]
        plgpu.commit_smem()
        columns = pl.ds(work.columns().start + at, width)
        plgpu.copy_smem_to_gmem(staged, array.at[tile.b, rows, head, columns])
