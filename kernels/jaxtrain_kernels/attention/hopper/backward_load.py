"""Shared memory, order of steps and load warpgroup of the Hopper key-block backward kernel."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper import backward_inline as inline
from jaxtrain_kernels.attention.hopper import backward_tiles as tiles
from jaxtrain_kernels.attention.hopper.backward_plan import KeyPlan
from jaxtrain_kernels.attention.hopper.backward_tiles import BackwardArrays, BackwardTile
from jaxtrain_kernels.hopper import Index, Ref


class KeyMemory(NamedTuple):
    """Shared memory. stats: LSE and delta. *_full: load barriers; hardware barriers free slots."""

    k: Any
    v: Any
    q: Any
    do: Any
    stats: Any
    tile: Any
    k_full: Any
    v_full: Any
    q_full: Any
    do_full: Any
    k_ids: Any = None
    q_ids: Any = None
    registers: Any = None
    outputs: Any = None  # dk and dv, without dq
    ds: Any = None
    dq_outputs: Any = None  # dq; dk and dv in the same memory


def steps(plan: KeyPlan, tile: BackwardTile) -> jax.Array:
    return (tile.hi - tile.lo) * (plan.N // plan.K)


def query_block(plan: KeyPlan, tile: BackwardTile, t: Index) -> tuple[jax.Array, jax.Array]:
    """Return (head, query block) of a tile's step t."""
    width = tile.hi - tile.lo
    shared = plan.N // plan.K
    if shared == 1:
        return tile.head, tile.lo + t
    return tile.head * shared + lax.div(t, width), tile.lo + lax.rem(t, width)


class KeyWork(NamedTuple):
    """A warpgroup's part of a tile. used: query blocks visited in this CUDA block's past tiles."""

    plan: KeyPlan
    arrays: BackwardArrays
    memory: KeyMemory
    warpgroup: jax.Array
    used: jax.Array
    tile: BackwardTile

    def afresh(self) -> "KeyWork":
        """Return a copy whose addresses the compiler recomputes instead of keeping in registers."""
        if self.plan.interpret:
            return self
        return self._replace(warpgroup=inline.opaque(self.warpgroup))

    def slot(self, t: Index) -> jax.Array:
        return lax.rem(self.used + t, self.plan.tiling.stages)

    def ds_slot(self, t: Index) -> jax.Array:
        return lax.rem(self.used + t, 2)

    def keys(self) -> pl.Slice:
        """Slice of the key block whose scores the warpgroup computes."""
        return pl.ds(0 if self.plan.tiling.split == "dims" else self.warpgroup * 64, 64)

    def columns(self) -> pl.Slice:
        """Columns of dk and dv that the warpgroup accumulates."""
        if self.plan.tiling.split == "dims":
            return pl.ds(self.warpgroup * self.plan.columns, self.plan.columns)
        return pl.ds(0, self.plan.columns)

    def outputs(self) -> Ref:
        return self.memory.dq_outputs[1] if self.plan.with_dq else self.memory.outputs

    def free(self, name: str, slot: Index = 0):
        if self.plan.interpret:
            plgpu.commit_smem()  # interpreted wgmma reads by ordinary loads
        hopper.bar_arrive(self.plan.barrier(name) + slot, self.plan.warpgroups + 1)

    def tell_ds(self, t: Index):
        """Signal that the warpgroup has stored its dS of step t, and read all of step t - 1's."""
        if self.plan.interpret:
            plgpu.commit_smem()
        hopper.bar_arrive(self._ds_barrier(t, self.warpgroup), 2)

    def await_ds(self, t: Index):
        """Wait for the other warpgroup's `tell_ds`, and for the store of this one's last dq."""
        if not self.plan.interpret:
            inline.await_reads()
        hopper.bar_sync(self._ds_barrier(t, 1 - self.warpgroup), 2)

    def _ds_barrier(self, t: Index, writer: Index) -> Index:
        # (Two of each writer: one may tell of the next step before the other awaits this one.)
        return self.plan.barrier("ds") + 2 * self.ds_slot(t) + writer

    def read(self, ref: Any) -> Any:
        """Return a matmul's operand. The interpreter's race detector sees ordinary loads alone."""
        if self.plan.interpret:
            plgpu.load(ref)
        return ref

    def left(self, x: jax.Array) -> jax.Array | Ref:
        """Return x as the left operand of a matmul: x in registers; in memory if interpreted."""
        if not self.plan.interpret:
            return x
        ref = self.memory.registers.at[self.warpgroup]
        ref[...] = x
        return ref


def load(plan: KeyPlan, arrays: BackwardArrays, memory: KeyMemory, counter: Ref | None):
    """Load each tile's keys and values, and its query blocks in visiting order."""
    tiling, everyone = plan.tiling, plan.warpgroups + 1
    bq, bk = tiling.block_q, tiling.block_kv

    def load_queries(used, tile, t):
        slot = lax.rem(used + t, tiling.stages)
        head, block = query_block(plan, tile, t)
        rows, full = pl.ds(block * bq, bq), memory.q_full.at[slot]
        hopper.bar_sync(plan.barrier("stage") + slot, everyone)
        plgpu.copy_gmem_to_smem(
            arrays.q.at[tile.b, rows, plan.at.q + head], memory.q.at[slot], full
        )
        stats = arrays.stats.at[tile.b, head, :, rows]
        plgpu.copy_gmem_to_smem(stats, memory.stats.at[slot], full)
        if plan.segments:
            plgpu.copy_gmem_to_smem(arrays.ids.at[tile.b, rows], memory.q_ids.at[slot], full)

    def load_douts(used, tile, t):
        slot = lax.rem(used + t, tiling.stages)
        head, block = query_block(plan, tile, t)
        rows, full = pl.ds(block * bq, bq), memory.do_full.at[slot]
        plgpu.copy_gmem_to_smem(arrays.do.at[tile.b, rows, head], memory.do.at[slot], full)

    def load_tile(used, tile):
        load_queries(used, tile, 0)
        keys, full = pl.ds(tile.block * bk, bk), memory.k_full.at[0]
        hopper.bar_sync(plan.barrier("kv"), everyone)
        tiles.tell_tile(memory.tile, tile)
        plgpu.copy_gmem_to_smem(arrays.k.at[tile.b, keys, plan.at.k + tile.head], memory.k, full)
        if plan.segments:
            plgpu.copy_gmem_to_smem(arrays.ids.at[tile.b, keys], memory.k_ids, full)
        load_douts(used, tile, 0)
        full = memory.v_full.at[0]
        plgpu.copy_gmem_to_smem(arrays.v.at[tile.b, keys, plan.at.v + tile.head], memory.v, full)

        def load_both(t, _):
            load_queries(used, tile, t)
            load_douts(used, tile, t)

        lax.fori_loop(1, steps(plan, tile), load_both, None)
        return used + steps(plan, tile)

    tiles.load_tiles(plan, arrays.ranges, memory.tile, counter, load_tile)
    hopper.bar_sync(plan.barrier("kv"), everyone)
    tiles.tell_end(memory.tile, memory.k_full.at[0], 2 if plan.segments else 1)
