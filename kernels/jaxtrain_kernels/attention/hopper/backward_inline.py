"""Inline MLIR and PTX of the backward kernels, for operations that Pallas lacks.

Most of it saves registers: the accumulators leave few, and the compiler would keep addresses and
column indices in registers during the whole loop.

Matrices have wgmma's register layout. Each of 4 warps holds 16 rows. Of each 8 columns, a thread
(r = 0 to 7, c = 0 to 3) holds the pair of columns 2 c and 2 c + 1, in rows r and r + 8.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from jaxtrain_kernels.hopper import COLUMNS, MATRIX, Index, Ref

SPLAT = plgpu.Layout.WG_SPLAT
# As MATRIX, in vectors of one: LLVM keeps vectors of two in registers of 64 bits, which it would
# fill by instructions that read a running matmul's result.
SINGLES: Any = plgpu.Layout.TILED(
    fragmented_array.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)


def fence():
    """Make the threads' writes to shared memory visible to TMA and wgmma."""

    space: Any = nvvm.SharedSpace.shared_cta
    # The interpreter recognizes this name. (Not a def, which a type checker may wrap.)
    fence_async_shared_cta = lambda _: (
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=space) and None
    )
    fence_async_shared_cta.__qualname__ = "fence_async_shared_cta"
    plgpu.inline_mgpu()(fence_async_shared_cta)()


def await_reads():
    """Wait until the thread's own TMA stores have read shared memory, without a thread barrier."""
    wait = lambda _: nvvm.cp_async_bulk_wait_group(0, read=True) and None
    plgpu.inline_mgpu()(wait)()


def opaque(x: Index) -> jax.Array:
    """Copy an int32 so that the compiler cannot know that the copies are equal."""

    def move(_, x):
        y = _asm(_i32(), [x.registers[()]], "mov.b32 $0, $1;", "=r,r")
        return mgpu.FragmentedArray.splat(y, shape=(), is_signed=True)

    result: Any = plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT)
    moved: Any = plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=result)(move)
    return moved(x)


def column_less_row(shape: tuple[int, int], start: Index) -> jax.Array:
    """int32 matrix of start + column - row."""

    def fill(_, start):
        warp, row, column = _thread()
        row = arith.addi(arith.muli(warp, _c(16)), row)
        base = arith.addi(start.registers[()], arith.subi(arith.muli(column, _c(2)), row))
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        pairs = registers.reshape(shape[1] // 8, 2)
        for eight, half in np.ndindex(pairs.shape):
            values = [arith.addi(base, _c(8 * eight + e - 8 * half)) for e in range(2)]
            pairs[eight, half] = _pair(_i32(), values)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    layout: Any = mgpu.WGMMA_LAYOUT
    result: Any = plgpu.ShapeDtypeStruct(shape, jnp.int32, MATRIX)
    filled: Any = plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=result)(fill)
    return filled(opaque(start))


def load_for_columns(ref: Ref, row: Index, width: int) -> jax.Array:
    """Load row `row` of float32 [..., width] in shared memory, in the layout of matrix columns."""

    def load(_, ref, row):
        f32 = ir.F32Type.get()
        offset = arith.addi(
            arith.muli(row.registers[()], _c(4 * width)), arith.muli(_thread()[2], _c(8))
        )
        address = _shared_address(ref, offset)
        two = ir.Type.parse("!llvm.struct<(f32, f32)>")
        registers = np.empty(layout.registers_shape((width,)), dtype=object)
        for eight in range(width // 8):
            ptx = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {32 * eight}];"
            loaded = _asm(two, [address], ptx, "=f,=f,r")
            values = [llvm.extractvalue(f32, loaded, [e]) for e in range(2)]
            registers.reshape(-1)[eight] = _pair(f32, values)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    layout: Any = mgpu.WGMMA_LAYOUT.reduce((0,))
    result: Any = plgpu.ShapeDtypeStruct((width,), jnp.float32, COLUMNS)
    types = plgpu.RefType(), SPLAT
    loaded: Any = plgpu.inline_mgpu(arg_types=types, return_type=result)(load)
    return loaded(ref, opaque(row))


def issue_product(a: Ref, b: Ref, transforms: tuple, width: int) -> jax.Array:
    """Issue a @ b.T of a [64, columns] and b [width, columns] in shared memory, as one group.

    The result must be waited for. Unlike an accumulator it needs no zeros: those would take
    registers, and as instructions between two matmuls make the compiler run them one by one.
    """

    def issue(_, a, b):
        f32 = ir.F32Type.get()
        b = mgpu.memref_transpose(b, (1, 0, 3, 2))
        same: Any = dict(swizzle=128)
        (a_start, _), (_, a_stride), _ = mma_utils.create_descriptor(
            a, large_tile=(64, 64), group_size=(64, 64), logical_k_major=False, **same
        )
        (b_start, _), (_, b_stride), _ = mma_utils.create_descriptor(
            b, large_tile=(64, 64), group_size=(64, width), logical_k_major=True, **same
        )
        kind = str(ir.MemRefType(b.type).element_type)
        n, parts = width // 2, 4 * (ir.MemRefType(b.type).shape[0])
        out: list[Any] = []
        nvvm.wgmma_fence_aligned()
        for part in range(parts):
            group, within = divmod(part, 4)
            descriptors = [
                llvm.add(x, _c64((group * stride + 32 * within) >> 4), _plain())
                for x, stride in ((a_start, a_stride), (b_start, b_stride))
            ]
            into = ",".join(f"${i}" for i in range(n))
            ins = n + len(out)
            ptx = (
                f"{{ .reg .pred p; setp.ne.b32 p, {int(part > 0)}, 0; "
                f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} "
                f"{{{into}}}, ${ins}, ${ins + 1}, p, 1, 1, 0, 0; }}"
            )
            constraints = ",".join(["=f"] * n + [str(i) for i in range(len(out))] + ["l", "l"])
            struct: Any = llvm.StructType.get_literal([f32] * n)
            result = _asm(struct, [*out, *descriptors], ptx, constraints)
            out = [llvm.extractvalue(f32, result, [i]) for i in range(n)]
        _asm(_nothing(), [], "wgmma.commit_group.sync.aligned;", "")
        one = ir.VectorType.get((1,), f32)
        registers = np.empty((n,), dtype=object)
        for i, x in enumerate(out):
            registers[i] = llvm.insertelement(llvm.mlir_undef(one), x, _c(0))
        registers = registers.reshape(singles.registers_shape((64, width)))
        return mgpu.FragmentedArray(_registers=registers, _layout=singles, _is_signed=None)

    singles: Any = SINGLES.to_mgpu()
    result: Any = plgpu.ShapeDtypeStruct((64, width), jnp.float32, SINGLES)
    tiled: Any = plgpu.RefType(transforms)
    issued: Any = plgpu.inline_mgpu(arg_types=(tiled, tiled), return_type=result)(issue)
    return issued(a, b)


def await_product(x: jax.Array, pending: int) -> jax.Array:
    """Return what `issue_product` issued, once at most `pending` later groups still run."""

    def wait(_, x):
        nvvm.wgmma_wait_group_sync_aligned(pending)
        return fragmented_array.optimization_barrier(x.to_layout(mgpu.WGMMA_LAYOUT))

    result: Any = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, MATRIX)
    waited: Any = plgpu.inline_mgpu(arg_types=(SINGLES,), return_type=result)(wait)
    return waited(x)


def store_rows(ref: Ref, transforms: tuple, at: Index, x: jax.Array) -> None:
    """Store 16-bit x [64, columns] from row 64 * at on of shared memory [..., columns].

    `transforms` gives tiles of 8 x 64; the 16-byte parts of row r are swizzled by xor with r.
    """

    def store(_, ref, at, x):
        columns = x.shape[1]
        lane = arith.remui(mgpu.utils.thread_idx(), _c(32))
        warp, row = _thread()[0], arith.remui(lane, _c(8))
        # Threads 8 m to 8 m + 7 hold the addresses of the rows of the m-th 8 x 8 matrix.
        half, right = arith.remui(arith.divui(lane, _c(8)), _c(2)), arith.divui(lane, _c(16))
        tile = arith.addi(arith.muli(at.registers[()], _c(8)), arith.muli(warp, _c(2)))
        tile = arith.muli(arith.addi(tile, half), _c(16 * columns))
        part = arith.muli(arith.xori(right, row), _c(16))
        offset = arith.addi(tile, arith.addi(arith.muli(row, _c(128)), part))
        start = _shared_address(ref, offset)
        pairs = x.registers.reshape(columns // 8, 2)
        for eight in range(0, columns // 8, 2):
            values = [pairs[eight + right, half] for right in range(2) for half in range(2)]
            address = arith.xori(start, _c(16 * (eight % 8)))
            _asm(
                _nothing(),
                [address, *(llvm.bitcast(_i32(), x) for x in values)],
                f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0 + {eight // 8 * 1024}], "
                "{$1, $2, $3, $4};",
                "r,r,r,r,r",
            )

    tiled: Any = plgpu.RefType(transforms)
    plgpu.inline_mgpu(arg_types=(tiled, SPLAT, MATRIX))(store)(ref, at, x)


def _thread() -> tuple[Any, Any, Any]:
    """(warp, r, c) of the thread in its warpgroup."""
    thread = mgpu.utils.thread_idx()
    warp = arith.remui(arith.divui(thread, _c(32)), _c(4))
    return warp, arith.divui(arith.remui(thread, _c(32)), _c(4)), arith.remui(thread, _c(4))


def _shared_address(ref: Any, offset: Any) -> Any:
    """32-bit address of a byte in shared memory."""
    return arith.addi(llvm.ptrtoint(_i32(), mgpu.utils.memref_ptr(ref)), offset)


def _pair(kind: Any, values: list) -> Any:
    pair = llvm.mlir_undef(ir.VectorType.get((2,), kind))
    for e, value in enumerate(values):
        pair = llvm.insertelement(pair, value, _c(e))
    return pair


def _asm(result: Any, arguments: list, ptx: str, constraints: str) -> Any:
    return llvm.inline_asm(result, arguments, ptx, constraints, has_side_effects=True)


def _nothing() -> Any:
    return ir.Type.parse("!llvm.void")


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _c64(x: int) -> Any:
    return mgpu.c(x, ir.IntegerType.get_signless(64))


def _plain() -> Any:
    return llvm.IntegerOverflowFlags.none


def _c(x: int) -> Any:
    return mgpu.c(x, _i32())
