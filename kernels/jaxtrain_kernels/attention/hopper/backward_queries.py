"""Hopper backward kernel over blocks of queries, for dQ alone: bitwise repeatable.

One warpgroup loads by TMA. The others own 64 queries each and visit the key blocks that these see,
as in the forward pass. dS leaves the tensor cores as the left operand of dQ += dS K; dQ stays in
registers until the end. The warpgroups do not synchronize, so one's matmuls hide the other's
exponentials:

    issue S_t; issue dP_t;  wait S_t;   P = exp2(S)       while dP_t runs
                            wait dP_t;  dS
    issue dQ_t;             wait dQ_t
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper import backward_inline as inline
from jaxtrain_kernels.attention.hopper import backward_tiles as tiles
from jaxtrain_kernels.attention.hopper.backward_plan import QueryPlan
from jaxtrain_kernels.attention.hopper.backward_scores import (
    accumulator,
    finished,
    narrow,
    probabilities,
    score_gradient,
    visible_keys,
)
from jaxtrain_kernels.attention.hopper.backward_tiles import BackwardArrays, BackwardTile
from jaxtrain_kernels.hopper import COLUMNS, ROWS, Index, Ref


class QueryMemory(NamedTuple):
    """Shared memory. stats: LSE and delta. *_full: load barriers; hardware barriers free slots."""

    q: Any
    do: Any  # finally dq
    stats: Any
    k: Any
    v: Any
    tile: Any
    q_full: Any
    do_full: Any
    k_full: Any
    v_full: Any
    q_ids: Any = None
    k_ids: Any = None
    registers: Any = None


def call(plan: QueryPlan, arrays: list[jax.Array], interpret: hopper.Interpret) -> jax.Array:
    """Return dq in q's dtype."""
    tiling, rows, warpgroups = plan.tiling, plan.rows, plan.warpgroups
    loads = 2 if plan.segments else 1
    scratch: dict[str, Any] = dict(
        q=hopper.tiles((rows, plan.H), plan.dtype),
        do=hopper.tiles((rows, plan.H), plan.dtype),
        stats=plgpu.SMEM((2, rows), jnp.float32),
        k=hopper.tiles((tiling.k_stages, tiling.block_kv, plan.H), plan.dtype),
        v=hopper.tiles((tiling.v_stages, tiling.block_kv, plan.H), plan.dtype),
        tile=tiles.memory(),
        q_full=plgpu.Barrier(num_barriers=1, num_arrivals=1 + loads),
        do_full=plgpu.Barrier(num_barriers=1),
        k_full=plgpu.Barrier(num_barriers=tiling.k_stages, num_arrivals=loads),
        v_full=plgpu.Barrier(num_barriers=tiling.v_stages),
    )
    if plan.segments:
        scratch["q_ids"] = plgpu.SMEM((rows,), jnp.int32)
        scratch["k_ids"] = plgpu.SMEM((tiling.k_stages, tiling.block_kv), jnp.int32)
    if plan.interpret:
        scratch["registers"] = hopper.tiles((warpgroups, 64, tiling.block_kv), plan.dtype)

    def attention_backward_queries(refs, memory):
        q, k, v, do, stats, ranges, *ids, dq = refs
        arrays = BackwardArrays(q, k, v, do, stats, ranges, ids[0] if ids else None, dq)
        _block(plan, arrays, QueryMemory(**memory))

    out_type = jax.ShapeDtypeStruct(arrays[0].shape, plan.dtype)
    return tiles.launch(plan, attention_backward_queries, scratch, out_type, arrays, interpret)


def _block(plan: QueryPlan, arrays: BackwardArrays, memory: QueryMemory):
    """One CUDA block."""
    counter = tiles.counter(plan)
    hopper.specialize_warpgroups(
        plan.warpgroups,
        lambda: _load(plan, arrays, memory, counter),
        lambda warpgroup: _compute(plan, arrays, memory, warpgroup),
    )


def _load(plan: QueryPlan, arrays: BackwardArrays, memory: QueryMemory, counter: Ref | None):
    """Load each tile's queries, then its key and value blocks from the last to the first."""
    tiling, everyone = plan.tiling, plan.warpgroups + 1

    def load_block(name, stages, used, tile, t):
        slot = lax.rem(used + t, stages)
        rows = pl.ds((tile.hi - 1 - t) * tiling.block_kv, tiling.block_kv)
        head = lax.div(tile.head, plan.N // plan.K)
        array, to = getattr(arrays, name), getattr(memory, name)
        full = getattr(memory, f"{name}_full").at[slot]
        hopper.bar_sync(plan.barrier(name) + slot, everyone)
        plgpu.copy_gmem_to_smem(array.at[tile.b, rows, head], to.at[slot], full)
        if plan.segments and name == "k":
            plgpu.copy_gmem_to_smem(arrays.ids.at[tile.b, rows], memory.k_ids.at[slot], full)

    def load_tile(used, tile):
        rows, full = pl.ds(tile.block * plan.rows, plan.rows), memory.q_full.at[0]
        hopper.bar_sync(plan.barrier("q"), everyone)
        tiles.tell_tile(memory.tile, tile)
        plgpu.copy_gmem_to_smem(arrays.q.at[tile.b, rows, tile.head], memory.q, full)
        stats = arrays.stats.at[tile.b, tile.head, :, rows]
        plgpu.copy_gmem_to_smem(stats, memory.stats, full)
        if plan.segments:
            plgpu.copy_gmem_to_smem(arrays.ids.at[tile.b, rows], memory.q_ids, full)
        load_block("k", tiling.k_stages, used, tile, 0)
        hopper.bar_sync(plan.barrier("do"), everyone)
        full = memory.do_full.at[0]
        plgpu.copy_gmem_to_smem(arrays.do.at[tile.b, rows, tile.head], memory.do, full)
        load_block("v", tiling.v_stages, used, tile, 0)

        def load_both(t, _):
            load_block("k", tiling.k_stages, used, tile, t)
            load_block("v", tiling.v_stages, used, tile, t)

        lax.fori_loop(1, tile.hi - tile.lo, load_both, None)
        return used + tile.hi - tile.lo

    tiles.load_tiles(plan, arrays.ranges, memory.tile, counter, load_tile)
    hopper.bar_sync(plan.barrier("q"), everyone)
    tiles.tell_end(memory.tile, memory.q_full.at[0], 3 if plan.segments else 2)


class QueryWork(NamedTuple):
    """A warpgroup's part of a tile. used: key blocks visited in this CUDA block's past tiles.

    lse, delta, ids: values of the warpgroup's queries.
    """

    plan: QueryPlan
    arrays: BackwardArrays
    memory: QueryMemory
    warpgroup: jax.Array
    used: jax.Array
    tile: BackwardTile
    lse: Any
    delta: Any
    ids: Any

    def afresh(self) -> "QueryWork":
        """Return a copy whose addresses the compiler recomputes instead of keeping in registers."""
        if self.plan.interpret:
            return self
        return self._replace(warpgroup=inline.opaque(self.warpgroup))

    def rows(self) -> pl.Slice:
        return pl.ds(self.warpgroup * 64, 64)

    def free(self, name: str, slot: Index = 0):
        if self.plan.interpret:
            plgpu.commit_smem()  # interpreted wgmma reads by ordinary loads
        hopper.bar_arrive(self.plan.barrier(name) + slot, self.plan.warpgroups + 1)


def _compute(plan: QueryPlan, arrays: BackwardArrays, memory: QueryMemory, warpgroup: Any):
    """Compute one warpgroup's 64 queries of each tile."""
    for name, number in plan.barriers.items():
        for slot in range(number):
            hopper.bar_arrive(plan.barrier(name) + slot, plan.warpgroups + 1)

    def compute_tile(used, tile):
        work = QueryWork(plan, arrays, memory, warpgroup, used, tile, None, None, None)
        _compute_tile(work.afresh())
        return used + tile.hi - tile.lo

    tiles.compute_tiles(memory.tile, memory.q_full.at[0], compute_tile)
    plgpu.wait_smem_to_gmem(0)


def _compute_tile(work: QueryWork):
    plan, memory, tile, rows = work.plan, work.memory, work.tile, work.rows()
    lse, delta = (plgpu.load(memory.stats.at[i, rows], layout=ROWS) for i in range(2))
    ids = plgpu.load(memory.q_ids.at[rows], layout=ROWS) if plan.segments else None
    work = work._replace(lse=lse, delta=delta, ids=ids)
    n_steps = tile.hi - tile.lo

    def sums(dq):
        if plan.early:
            _await_keys(work, 0)
        lax.fori_loop(0, n_steps, lambda t, _: _step(work, t, n_steps, dq), None)
        return narrow(plan, lax.optimization_barrier(dq[...]) * plan.scale)

    dq = pl.run_scoped(sums, accumulator(64, plan.H))
    work = work.afresh()
    staged = memory.do.at[work.rows()]
    staged[...] = dq
    plgpu.commit_smem()
    to = pl.ds(tile.block * plan.rows + work.rows().start, 64)
    plgpu.copy_smem_to_gmem(staged, work.arrays.dq.at[tile.b, to, tile.head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    work.free("do")


def _await_keys(work: QueryWork, t: Any):
    slot = lax.rem(work.used + t, work.plan.tiling.k_stages)
    plgpu.barrier_wait(work.memory.k_full.at[slot])


def _step(work: QueryWork, t: Any, n_steps: Any, dq: Any):
    """Add key block t's contribution to dq."""
    work = work.afresh()
    plan, memory, rows = work.plan, work.memory, work.rows()
    k_slot, v_slot = (
        lax.rem(work.used + t, stages) for stages in (plan.tiling.k_stages, plan.tiling.v_stages)
    )
    k, v = memory.k.at[k_slot], memory.v.at[v_slot]
    if not plan.early:
        _await_keys(work, t)

    def issue_dp(dp):
        pl.when(t == 0)(lambda: plgpu.barrier_wait(memory.do_full.at[0]))
        plgpu.barrier_wait(memory.v_full.at[v_slot])
        plgpu.wgmma(dp, memory.do.at[rows], v.T)

    def slope_of(scores, pending):
        s = finished(scores, pending)
        _, slope = _probabilities(work, k_slot, work.tile.hi - 1 - t, s)
        pl.when(t == n_steps - 1)(lambda: work.free("q"))
        if plan.early:
            # Waits here, because without a branch ptxas moves the wait for dp before the exp2's.
            pl.when(t < n_steps - 1)(lambda: _await_keys(work, t + 1))
        return slope

    def together(scores, dp):
        plgpu.wgmma(scores, memory.q.at[rows], k.T)
        issue_dp(dp)
        return slope_of(scores, pending=1), finished(dp, pending=0)

    def scores_alone(scores):
        plgpu.wgmma(scores, memory.q.at[rows], k.T)
        return slope_of(scores, pending=0)

    def dp_alone(dp):
        issue_dp(dp)
        return finished(dp, pending=0)

    block = accumulator(64, plan.tiling.block_kv)
    if plan.tiling.together:
        slope, dp = pl.run_scoped(together, block, block)
    else:
        slope, dp = pl.run_scoped(scores_alone, block), pl.run_scoped(dp_alone, block)
    work.free("v", v_slot)
    ds = score_gradient(plan, slope, dp, work.delta, transposed=False)
    plgpu.wgmma(dq, _left(work, ds), k)
    plgpu.wgmma_wait(0)
    work.free("k", k_slot)


def _probabilities(work: QueryWork, k_slot: Any, block: Any, s: Any) -> tuple[Any, Any]:
    plan, tile = work.plan, work.tile

    def mask():
        ids = None
        if plan.segments:
            ids = work.ids, plgpu.load(work.memory.k_ids.at[k_slot], layout=COLUMNS)
        t0, width = tile.block * plan.rows + work.rows().start, plan.tiling.block_kv
        return visible_keys(plan, t0, block * width, width, ids, transposed=False)

    return probabilities(plan, s, work.lse, tile.masked(block), mask, transposed=False)


def _left(work: QueryWork, ds: Any) -> Any:
    """Return ds as the left operand of a matmul: in registers; in memory if interpreted."""
    if not work.plan.interpret:
        return ds
    ref = work.memory.registers.at[work.warpgroup]
    ref[...] = ds
    return ref
