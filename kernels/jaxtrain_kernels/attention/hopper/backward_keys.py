"""Hopper backward kernel over blocks of keys: dK, dV and, unless it has its own kernel, dQ.

One warpgroup loads by TMA, the others own 64 keys each. They compute the transposed scores K Q^T,
so that P^T and dS^T leave the tensor cores in the layout of a left operand: dV += P^T dO and
dK += dS^T Q read them from registers. Only dS goes to shared memory, for dQ = dS K. dQ is summed
over key blocks in float32 in device memory (as in FlashAttention-3, arXiv:2407.08608).

dQ is a step late, so that the two warpgroups may be a step apart: one computes exponentials while
the other's matmuls run. Order of step t where `dv_first` holds:

    issue S, dP;                             send dQ of step t - 2          while S runs
    wait S;                                  P = exp2(S)                    while dP runs
    issue dV;                                wait dP; compute dS            while dV runs
    wait for the other's dS of step t - 1;   dS to shared memory
    issue dQ of step t - 1, dK;              wait dQ; dQ to shared memory   while dK runs

Elsewhere the other's dS is awaited before dP, and dV is issued once dS is in shared memory. Each
order is used where it was measured to be faster (benchmarks/LOG.md).
"""

from collections.abc import Callable
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
    zeros: jax.Array | None,
    interpret: hopper.Interpret,
    into: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    """Return (dq in float32 not yet scaled, or None without dq; dk; dv). zeros: for dq, or None.

    into: references that dk and dv are written to instead of being returned, at the heads that the
    plan gives; one reference if both are in one array.
    """

    def attention_backward(refs, memory):
        q, k, v, do, stats, ranges, *rest = refs
        ids = rest.pop(0) if plan.segments else None
        dq = rest.pop(0) if plan.with_dq else None
        _block(
            plan,
            BackwardArrays(q, k, v, do, stats, ranges, ids, dq, rest[0], rest[-1]),
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
        zeros = jnp.zeros(shape, jnp.float32)
    sums = jax.new_ref(zeros.reshape(shape))
    rest = launch(sums, *into)
    dq = jax.freeze(sums)
    return dq.sum(0) if plan.interpret else dq, *(() if into else rest)


def _scratch(plan: KeyPlan) -> dict[str, Any]:
    tiling, warpgroups = plan.tiling, plan.warpgroups
    bq, bk, stages = tiling.block_q, tiling.block_kv, tiling.stages
    # Large heads or more stages leave no shared memory for more; with dq, its memory is there.
    width = 64 if tiling.split == "dims" else plan.H
    buffers = 1 if tiling.split == "dims" or plan.H * stages > 256 else 2
    buffers = bq // 64 if plan.with_dq else buffers
    outputs = hopper.tiles((warpgroups, buffers, 64, width), plan.dtype)
    scratch: dict[str, Any] = dict(
        k=hopper.tiles((bk, plan.H), plan.dtype),
        v=hopper.tiles((bk, plan.H), plan.dtype),
        q=hopper.tiles((stages, bq, plan.H), plan.dtype),
        do=hopper.tiles((stages, bq, plan.H), plan.dtype),
        stats=plgpu.SMEM((stages, 2, bq), jnp.float32),
        tile=tiles.memory(),
        k_full=plgpu.Barrier(num_barriers=1, num_arrivals=2 if plan.segments else 1),
        v_full=plgpu.Barrier(num_barriers=1),
        q_full=plgpu.Barrier(num_barriers=stages, num_arrivals=3 if plan.segments else 2),
        do_full=plgpu.Barrier(num_barriers=stages),
    )
    if not plan.with_dq:
        scratch["outputs"] = outputs
    else:
        scratch["ds"] = hopper.tiles((2, bk, bq), plan.dtype)
        # (To the interpreter's race detector, one warpgroup's outputs would be the other's dq.)
        union = (lambda *refs: refs) if plan.interpret else plgpu.RefUnion
        scratch["dq_outputs"] = union(dqs.memory(plan), outputs)
    if plan.segments:
        scratch["k_ids"] = plgpu.SMEM((bk,), jnp.int32)
        scratch["q_ids"] = plgpu.SMEM((stages, bq), jnp.int32)
    if plan.interpret:
        scratch["registers"] = hopper.tiles((warpgroups, 64, bq), plan.dtype)
    return scratch


def _block(plan: KeyPlan, arrays: BackwardArrays, memory: KeyMemory):
    """One CUDA block."""
    counter = tiles.counter(plan)
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
        # (Of a sum that ptxas can look into, it keeps more in registers than there are.)
        more = steps(plan, tile)
        return used + (more if plan.interpret else inline.opaque(more))

    tiles.compute_tiles(memory.tile, memory.k_full.at[0], compute_tile)
    plgpu.wait_smem_to_gmem(0)


def _compute_tile(work: KeyWork):
    plan, n_steps = work.plan, steps(work.plan, work.tile)

    def sums(dk, dv):
        if plan.with_dq:
            _steps(work, n_steps, dk, dv)
        else:
            step = lambda t, _: _step_without_dq(work.afresh(), t, dk, dv)
            lax.fori_loop(0, n_steps, step, None)
            work.free("kv")
        return narrow(plan, lax.optimization_barrier(dk[...]) * plan.scale), narrow(plan, dv[...])

    sum_ = accumulator(64, plan.columns)
    dk, dv = pl.run_scoped(sums, sum_, sum_)
    _finish(work, dk, dv)


def _steps(work: KeyWork, n_steps: Any, dk: Any, dv: Any):
    """Issue all of a tile's matmuls, each dQ one step late."""
    if work.plan.dv_first:
        _step(work.afresh(), 0, False, dk, dv)
        step = lambda t, _: _step(work.afresh(), t, True, dk, dv)
        lax.fori_loop(1, n_steps, step, None)
    else:
        step = lambda t, _: _step(work.afresh(), t, t > 0, dk, dv)
        lax.fori_loop(0, n_steps, step, None)
    work = work.afresh()
    pl.when(n_steps > 1)(lambda: dqs.send(work.afresh(), n_steps - 2))
    work.await_ds(n_steps - 1)

    def last_dq(dq):
        dqs.issue(work, n_steps - 1, dq)
        done = finished(dq, pending=0)
        work.free("kv")
        dqs.store_dq(work.afresh(), done)

    pl.run_scoped(last_dq, accumulator(*dqs.shape(work.plan)))
    dqs.send(work.afresh(), n_steps - 1)


def _step(work: KeyWork, t: Any, later: Any, dk: Any, dv: Any):
    """Issue the matmuls for query block t, and dQ's for block t - 1. later: whether t > 0."""
    plan = work.plan
    scores, dp = _issue_scores(work, t)
    pl.when(t > 1)(lambda: dqs.send(work.afresh(), t - 2))
    await_ds = lambda: pl.when(later)(lambda: work.await_ds(t - 1))
    if plan.dv_first:
        p, ds = _p_and_ds(work, t, scores, dp, lambda p: _issue_dv(work, t, dv, p), pending=1)
        await_ds()
        _store_ds(work, t, ds)
    else:
        # The branch keeps the compiler from computing P only once dP is there.
        p, ds = _p_and_ds(work, t, scores, dp, lambda _: await_ds())
        _store_ds(work, t, ds)
        _issue_dv(work, t, dv, p)
    inline.fence()

    def issue_both():
        def to_dq(dq):
            dqs.issue(work, t - 1, dq)
            _issue_dk(work, t, dk, ds)
            done = finished(dq, pending=1)
            work.tell_ds(t)
            dqs.store_dq(work.afresh(), done)

        pl.run_scoped(to_dq, accumulator(*dqs.shape(plan)))
        plgpu.wgmma_wait(0)

    def issue_dk():
        _issue_dk(work, t, dk, ds)
        work.tell_ds(t)
        plgpu.wgmma_wait(0)

    if isinstance(later, bool):
        (issue_both if later else issue_dk)()
    else:
        lax.cond(later, issue_both, issue_dk)
    work.free("stage", work.slot(t))


def _step_without_dq(work: KeyWork, t: Any, dk: Any, dv: Any):
    """Issue the four matmuls for query block t other than dQ's."""
    p, ds = _p_and_ds(work, t, *_issue_scores(work, t))
    _issue_dv(work, t, dv, p)
    _issue_dk(work, t, dk, ds)
    plgpu.wgmma_wait(0)
    work.free("stage", work.slot(t))


def _issue_scores(work: KeyWork, t: Any) -> tuple[Any, Any]:
    """Issue the matmuls for S and dP."""
    memory, slot = work.memory, work.slot(t)
    plgpu.barrier_wait(memory.q_full.at[slot])
    scores = _product(work, memory.k, memory.q.at[slot])
    pl.when(t == 0)(lambda: plgpu.barrier_wait(memory.v_full.at[0]))
    plgpu.barrier_wait(memory.do_full.at[slot])
    return scores, _product(work, memory.v, memory.do.at[slot])


def _product(work: KeyWork, of_keys: Any, of_queries: Any) -> Any:
    """Issue the product of the warpgroup's keys or values with a query block."""
    plan, of_keys = work.plan, of_keys.at[work.keys()]
    if plan.interpret:
        return jnp.dot(of_keys[...], of_queries[...].T, preferred_element_type=jnp.float32)
    transforms = hopper.tiles((plan.H,), plan.dtype).transforms
    return inline.issue_product(of_keys, of_queries, transforms, plan.tiling.block_q)


def _issue_dv(work: KeyWork, t: Any, dv: Any, p: Any):
    do = work.read(work.memory.do.at[work.slot(t), :, work.columns()])
    plgpu.wgmma(dv, work.left(p), do)


def _issue_dk(work: KeyWork, t: Any, dk: Any, ds: Any):
    q = work.read(work.memory.q.at[work.slot(t), :, work.columns()])
    plgpu.wgmma(dk, work.left(ds), q)


def _p_and_ds(
    work: KeyWork,
    t: Any,
    scores: Any,
    dp: Any,
    between: Callable[[Any], None] = lambda _: None,
    pending: int = 0,
) -> tuple[Any, Any]:
    """Return P and dS in 16 bits. between: run with P before dP, which `pending` matmuls follow."""
    # More queries leave no registers for loads before they are needed.
    early = work.plan.tiling.block_q <= 64
    lse = _stats(work, t, 0) if early else None
    s = _finished(work, scores, pending=1)
    p, slope = _probabilities(work, t, _stats(work, t, 0) if lse is None else lse, s)
    between(p)
    delta = _stats(work, t, 1) if early else None
    dp = _finished(work, dp, pending)
    delta = _stats(work, t, 1) if delta is None else delta
    return p, score_gradient(work.plan, slope, dp, delta, transposed=True)


def _finished(work: KeyWork, product: Any, pending: int) -> Any:
    return product if work.plan.interpret else inline.await_product(product, pending)


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
    if plan.interpret:
        work.memory.ds[work.ds_slot(t), keys] = ds
        return
    transforms = hopper.tiles((plan.tiling.block_q,), plan.dtype).transforms
    at = work.ds_slot(t) * (plan.tiling.block_kv // 64) + lax.div(keys.start, 64)
    inline.store_rows(work.memory.ds, transforms, at, ds)


def _finish(work: KeyWork, dk: Any, dv: Any):
    """Store dk and dv, staged in shared memory: with dq, in that of the warpgroup's own dq."""
    work = work.afresh()
    plan, tile, arrays = work.plan, work.tile, work.arrays
    # Wait until earlier stores have read this memory.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    keys = work.keys()
    rows = pl.ds(tile.block * plan.tiling.block_kv + keys.start, keys.size)
    outputs: Any = work.outputs()
    _, buffers, _, width = outputs.shape
    pieces = [
        (array, head + tile.head, x, at)
        for array, head, x in ((arrays.dk, plan.at.k, dk), (arrays.dv, plan.at.dv, dv))
        for at in range(0, plan.columns, width)
    ]
    for i, (array, head, x, at) in enumerate(pieces):
        if i >= buffers:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = outputs.at[work.warpgroup, i % buffers]
        staged[...] = x[:, at : at + width]
        plgpu.commit_smem()
        columns = pl.ds(work.columns().start + at, width)
        plgpu.copy_smem_to_gmem(staged, array.at[tile.b, rows, head, columns])
