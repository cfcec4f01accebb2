"""A float8 matmul's result as it lies in registers, for `hopper`: neighbours in one thread.

wgmma gives thread (w, r, l) of 4 x 8 x 4, of each 64 x 8 values, rows 16 w + r and 8 below, and
columns 2 l and 2 l + 1. Where the operands' even rows come before the odd ones, these are rows
2 (16 w + r) and the next one, and four neighbouring columns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxtrain_kernels import hopper

TILES = (128, 16), (32, 16), (16, 16), (2, 4)
# Of 128 x 16 values: 32 rows a warp, in turn 8 x 4 threads, each with 2 x 4 values, and those 16
# rows below.
BLOCKS: Any = plgpu.Layout.TILED(
    fragmented_array.Tiling(TILES), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)
THREADS: Any = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def zeros() -> jax.Array:
    """A float32 for each thread."""
    return plgpu.layout_cast(jnp.zeros((128,), jnp.float32), THREADS)


def in_blocks(even: jax.Array, odd: jax.Array, interpret: bool) -> jax.Array:
    """Rows and columns in order. even, odd: those rows, each with the even columns first."""
    rows, columns = even.shape
    shape = 2 * rows, columns
    if interpret:
        both = jnp.stack([even, odd]).reshape(2, rows, 2, columns // 2)
        return both.transpose(1, 0, 3, 2).reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=(hopper.MATRIX, hopper.MATRIX),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, BLOCKS),
    )
    def relabel(_, *halves):
        layout = BLOCKS.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        kind = ir.VectorType.get((4,), ir.F32Type.get())
        for at in np.ndindex(*registers.shape):
            group, below, half = at[1], at[4], at[8]
            groups = group, group + columns // 16
            pairs = [halves[half].registers[0, n, 0, 0, below, 0, 0, 0, 0] for n in groups]
            values = [vector.extract(pair, [], [n]) for n in (0, 1) for pair in pairs]
            registers[at] = vector.from_elements(kind, values)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return relabel(even, odd)


def rounded(values: jax.Array, interpret: bool) -> jax.Array:
    """The values in bfloat16: two at a time, which the compiler does not do by itself."""
    if interpret:
        return values.astype(jnp.bfloat16)
    kind = plgpu.ShapeDtypeStruct(values.shape, jnp.bfloat16, BLOCKS)

    @plgpu.inline_mgpu(arg_types=(BLOCKS,), return_type=kind)
    def convert(_, values):
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty_like(values.registers)
        for at, register in np.ndenumerate(values.registers):
            four = [vector.extract(register, [], [n]) for n in range(4)]
            ptx = "cvt.rn.bf16x2.f32 $0, $2, $1;"
            pairs = [
                mgpu.utils.inline_ptx(ptx, *four[n : n + 2], result_types=i32) for n in (0, 2)
            ]
            registers[at] = mgpu.utils.vector_concat([mgpu.utils.bitcast(x, pair) for x in pairs])
        return mgpu.FragmentedArray(
            _registers=registers, _layout=values.layout, _is_signed=None
        )

    return convert(values)


def widened(values: jax.Array, interpret: bool) -> jax.Array:
    """bfloat16 values in float32, by one instruction each (the compiler takes 1.5)."""
    if interpret:
        return values.astype(jnp.float32)
    kind = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, BLOCKS)

    @plgpu.inline_mgpu(arg_types=(BLOCKS,), return_type=kind)
    def convert(_, values):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        const = lambda x: arith.constant(i32, ir.IntegerAttr.get(i32, x))
        registers = np.empty_like(values.registers)
        for at, register in np.ndenumerate(values.registers):
            both = mgpu.utils.bitcast(register, ir.VectorType.get((2,), i32))
            found = []
            for n in (0, 1):
                pair = vector.extract(both, [], [n])
                found.append(arith.shli(pair, const(16)))
                found.append(arith.andi(pair, const(-65536)))
            found = [arith.bitcast(f32, x) for x in found]
            registers[at] = vector.from_elements(ir.VectorType.get((4,), f32), found)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=values.layout, _is_signed=None
        )

    return convert(values)


def peaks(values: jax.Array, most: jax.Array, interpret: bool) -> jax.Array:
    """The maximum of `most` and of the values that a thread has. values: not negative."""
    if interpret:
        return jnp.maximum(most, jnp.max(values))

    @plgpu.inline_mgpu(
        arg_types=(BLOCKS, THREADS),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.float32, THREADS),
    )
    def reduce(_, values, most):
        [old] = most.registers.flat
        found = list(values.registers.flat)
        while len(found) > 1:
            pairs = zip(found[::2], found[1::2])
            found = [arith.maximumf(*pair) for pair in pairs] + found[len(found) // 2 * 2 :]
        kind = old.type
        elements = [vector.extract(found[0], [], [n]) for n in range(4)]
        top = vector.extract(old, [], [0])
        for element in elements:
            top = arith.maximumf(top, element)
        registers = np.asarray([vector.from_elements(kind, [top])], dtype=object)
        registers = registers.reshape(most.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=most.layout, _is_signed=None)

    return reduce(values, most)


def store(cast: jax.Array, q: Any, qt: Any, first: int, interpret: bool) -> None:
    """Store float8 values [128, columns] to columns of q and to rows of qt, from `first`.

    q [128, width], qt [width, 128]: in shared memory. Two neighbours of a column are one element of
    the matrices of 8 x 8 that `stmatrix` transposes. Threads swap values so that the rows of a
    matrix are in different banks.
    """
    if interpret:
        at = pl.ds(first, cast.shape[1])
        q[:, at], qt[at] = cast, cast.T
        return
    types = [plgpu.RefType(hopper.tiles(to.shape, cast.dtype).transforms) for to in (q, qt)]
    plgpu.inline_mgpu(arg_types=(BLOCKS, *types))(lambda _, *args: _store(*args, first))(cast, q, qt)


def _store(cast: Any, q: Any, qt: Any, first: int) -> None:
    width = ir.MemRefType(qt.type).shape[0] * 8
    i32 = ir.IntegerType.get_signless(32)
    const = lambda x: arith.constant(i32, x)
    times = lambda x, factor: arith.muli(x, const(factor))
    address = lambda ref: llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))

    def bits(x, start, count):
        return arith.andi(arith.shrui(x, const(start)), const(2**count - 1))

    def total(*terms):
        return functools.reduce(arith.addi, terms)

    def either(x, yes, no):
        return arith.select(arith.cmpi(arith.CmpIPredicate.ne, x, const(0)), yes, no)

    thread = mgpu.utils.thread_idx()
    lane, warp = bits(thread, 0, 5), bits(thread, 5, 2)
    # The thread gives the address of row c of matrix (below, second).
    c, second, below = bits(lane, 0, 3), bits(lane, 3, 1), bits(lane, 4, 1)

    odd = arith.xori(second, bits(c, 2, 1))
    row = total(times(warp, 32), times(below, 16), times(c, 2), odd)
    bank = {128: bits(row, 0, 3), 64: bits(row, 1, 2), 32: bits(row, 2, 1)}[width]
    q_address = total(address(q), times(row, width), times(bank, 16))

    pair = arith.xori(second, bits(c, 2, 1))
    row = total(times(bits(c, 1, 2), 4), times(pair, 2), bits(c, 0, 1))
    bank = arith.xori(arith.addi(times(warp, 2), below), bits(row, 0, 3))
    qt_address = total(address(qt), times(row, 128), times(bank, 16))
    low, high = const(0x5140), const(0x7362)  # bytes 0 and 1 of both rows, or 2 and 3
    choices = either(bits(lane, 1, 1), high, low), either(bits(lane, 1, 1), low, high)

    def matrices(ptx, here, values):
        mgpu.utils.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x4{ptx}.shared::cta.b16 [$0], {{$1, $2, $3, $4}};",
            here, *values, has_side_effects=True,
        )  # fmt: skip

    for column in range(cast.registers.shape[1]):
        straight, turned = [], []
        for below in (0, 1):
            at = 0, column, 0, 0, below, 0, 0, 0
            rows = [mgpu.utils.bitcast(cast.registers[(*at, n, 0)], i32) for n in (0, 1)]
            straight += [either(bits(lane, 4, 1), *rows[::-1]), either(bits(lane, 4, 1), *rows)]
            ptx = "prmt.b32 $0, $1, $2, $3;"
            turned += [mgpu.utils.inline_ptx(ptx, *rows, x, result_types=i32) for x in choices]
        chunk = first // 16 + column
        matrices("", arith.xori(q_address, const(16 * chunk)), straight)
        matrices(".trans", arith.addi(qt_address, const(16 * 128 * chunk)), turned)
