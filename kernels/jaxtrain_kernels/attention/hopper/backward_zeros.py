"""Zeros that the Hopper key-block backward kernel adds dQ to, written by its own load warpgroup.

A tile zeroes a part of dQ of the head that lies `plan.heads_ahead` heads ahead, then counts the
part. A tile of that head waits until all parts are counted. The zeros are still in the L2 cache
when dQ is added to them, and their stores run beside the matmuls: a piece with each of the first
steps. The count, which waits until the stores have arrived, comes a step after the last piece.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxtrain_kernels.attention.hopper.backward_plan import KeyPlan
from jaxtrain_kernels.attention.hopper.backward_tiles import BackwardArrays, BackwardTile
from jaxtrain_kernels.hopper import Index, Ref

PIECES = 4  # of a tile's part


def _head_ahead(plan: KeyPlan, tile: BackwardTile) -> jax.Array:
    return tile.b * plan.heads + tile.head + plan.heads_ahead


def zero_piece(plan: KeyPlan, arrays: BackwardArrays, tile: BackwardTile, piece: Index) -> None:
    """Zero a piece of the tile's part of dQ of a later head, in all as many rows as a key block."""
    head, shared, rows = _head_ahead(plan, tile), plan.N // plan.K, plan.tiling.block_kv // PIECES

    def zero():
        b, first = lax.div(head, plan.heads), lax.rem(head, plan.heads) * shared
        here = pl.ds((tile.block * PIECES + piece) * rows, rows)
        for i in range(shared):
            zero_rows(arrays.dq.at[b, here, first + i])

    pl.when((head < plan.B * plan.heads) & (piece < PIECES))(zero)


def count_part(plan: KeyPlan, arrays: BackwardArrays, tile: BackwardTile) -> None:
    """Count the tile's part of a later head, once all its pieces are zero."""
    head = _head_ahead(plan, tile)
    pl.when(head < plan.B * plan.heads)(lambda: _count(arrays.counters.at[1 + head]))


def await_zeros(plan: KeyPlan, arrays: BackwardArrays, tile: BackwardTile) -> None:
    """Wait until dQ of the tile's head is zero, if tiles of this kernel zero it."""
    head = tile.b * plan.heads + tile.head
    counter, parts = arrays.counters.at[1 + head], plan.tile_blocks
    pl.when(head >= plan.heads_ahead)(lambda: _await_count(counter, parts))


def zero_rows(ref: Ref) -> None:
    """Store zeros in float32 [rows, columns] in device memory, one warpgroup in 16-byte vectors."""

    def store(_, ref):
        kind = ir.MemRefType(ref.type)
        rows, columns = kind.shape
        stride = kind.get_strides_and_offset()[0][0]
        vectors = columns // 4
        thread = arith.remui(mgpu.utils.thread_idx(), _c(128))
        row, column = arith.divui(thread, _c(vectors)), arith.remui(thread, _c(vectors))
        offset = arith.addi(arith.muli(row, _c(4 * stride)), arith.muli(column, _c(16)))
        stores = [
            f"st.global.v4.b32 [a + {4 * stride * at}], {{$2, $2, $2, $2}};"
            for at in range(0, rows, 128 // vectors)
        ]
        _asm(
            [mgpu.utils.memref_ptr(ref), offset, _c(0)],
            "{ .reg .b64 a; cvt.u64.u32 a, $1; add.u64 a, a, $0; " + " ".join(stores) + " }",
            "l,r,r",
        )

    _inline(store)(ref)


def _count(counter: Ref) -> None:
    """Add 1 to the counter when all threads' stores of zeros are visible to the whole device."""

    def count(_, counter):
        # TMA adds to the zeros; to it they are writes of another proxy.
        _asm([], "fence.proxy.async.global;", "")
        mgpu.utils.warpgroup_barrier()
        _asm(
            [mgpu.utils.memref_ptr(counter), _one_thread()],
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p red.release.gpu.global.add.u32 [$0], 1; }",
            "l,r",
        )

    _inline(count)(counter)


def _await_count(counter: Ref, parts: Index) -> None:
    """Wait until the counter is `parts`."""

    def wait(_, counter):
        _asm(
            [mgpu.utils.memref_ptr(counter), _one_thread()],
            "{ .reg .pred p; .reg .b32 n; setp.ne.b32 p, $1, 0;"
            " AGAIN: @p ld.acquire.gpu.global.u32 n, [$0];"
            f" @p setp.lt.u32 p, n, {parts}; @p bra AGAIN; fence.proxy.async.global; }}",
            "l,r",
        )
        mgpu.utils.warpgroup_barrier()

    _inline(wait)(counter)


def _inline(function: Any) -> Any:
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(function)


def _one_thread() -> Any:
    one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
    return arith.extui(ir.IntegerType.get_signless(32), one)


def _asm(arguments: list, ptx: str, constraints: str) -> None:
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, arguments, ptx, constraints, has_side_effects=True)


def _c(x: int) -> Any:
    return mgpu.c(x, ir.IntegerType.get_signless(32))
