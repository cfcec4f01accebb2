"""A float8 matmul's result as it lies in registers, for `hopper`: neighbours in one thread.

wgmma gives thread (r, l) of a warp's 8 x 4, of 16 x 8 values, those of rows r and r + 8 and of
columns 2 l and 2 l + 1. Where one accumulator has the even rows and another the odd ones, and the
even columns come before the odd ones, a thread has 2 x 4 neighbours (`BLOCKS`).

Pallas's interpret mode runs no `inline_mgpu`, so on a CPU each function has a plain form.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxtrain_kernels import hopper

# Of 128 rows and 16 columns: 32 rows per warp, of which 8 x 4 threads have 16, then the next 16.
TILES = (128, 16), (32, 16), (16, 16), (2, 4)
BLOCKS: Any = plgpu.Layout.TILED(
    fragmented_array.Tiling(TILES), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)
THREADS: Any = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def zero_per_thread() -> jax.Array:
    """Float32 [128], one for each thread."""
    return plgpu.layout_cast(jnp.zeros((128,), jnp.float32), THREADS)


def interleave_halves(even: jax.Array, odd: jax.Array, interpret: bool) -> jax.Array:
    """Rows and columns in order. even, odd: those rows, each with the even columns first."""
    rows, columns = even.shape
    shape = 2 * rows, columns
    if interpret:
        both = jnp.stack([even, odd]).reshape(2, rows, 2, columns // 2)
        return both.transpose(1, 0, 3, 2).reshape(shape)

    def relabel(_, *halves):
        layout = BLOCKS.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for at in np.ndindex(*registers.shape):
            group, below, half = at[1], at[4], at[8]
            groups = group, group + columns // 16
            pairs = [halves[half].registers[0, n, 0, 0, below, 0, 0, 0, 0] for n in groups]
            registers[at] = _joined([_element(pair, n) for n in (0, 1) for pair in pairs])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    given = hopper.MATRIX, hopper.MATRIX
    return _inline(relabel, given, plgpu.ShapeDtypeStruct(shape, jnp.float32, BLOCKS))(even, odd)


def fp32_to_bf16(values: jax.Array, interpret: bool) -> jax.Array:
    """Float32 in bfloat16, two at a time, which the compiler does not always do by itself."""
    if interpret:
        return values.astype(jnp.bfloat16)

    def convert(four):
        i32 = ir.IntegerType.get_signless(32)
        pairs = [
            mgpu.utils.inline_ptx(
                "cvt.rn.bf16x2.f32 $0, $2, $1;",
                *(_element(four, n + m) for m in (0, 1)),
                result_types=i32,
            )
            for n in (0, 2)
        ]
        return mgpu.utils.bitcast(_joined(pairs), ir.VectorType.get((4,), ir.BF16Type.get()))

    return _each(convert, values, jnp.bfloat16)


def bf16_to_fp32(values: jax.Array, interpret: bool) -> jax.Array:
    """bfloat16 in float32, with one instruction for each; the compiler takes 1.5."""
    if interpret:
        return values.astype(jnp.float32)

    def convert(four):
        i32 = ir.IntegerType.get_signless(32)
        const = lambda x: arith.constant(i32, ir.IntegerAttr.get(i32, x))
        both, found = mgpu.utils.bitcast(four, ir.VectorType.get((2,), i32)), []
        for pair in [_element(both, n) for n in (0, 1)]:
            found += [arith.shli(pair, const(16)), arith.andi(pair, const(-(2**16)))]
        return _joined([arith.bitcast(ir.F32Type.get(), x) for x in found])

    return _each(convert, values, jnp.float32)


def max_per_thread(values: jax.Array, most: jax.Array, interpret: bool) -> jax.Array:
    """Maximum [128] of `most` and of the values that each thread has."""
    if interpret:
        return jnp.maximum(most, jnp.max(values))

    def reduce(_, values, most):
        [old] = most.registers.flat
        four = functools.reduce(arith.maximumf, values.registers.flat)
        top = functools.reduce(arith.maximumf, [_element(four, n) for n in range(4)])
        registers = np.empty_like(most.registers)
        registers.flat[0] = _joined([arith.maximumf(_element(old, 0), top)])
        return mgpu.FragmentedArray(_registers=registers, _layout=most.layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct((128,), jnp.float32, THREADS)
    return _inline(reduce, (BLOCKS, THREADS), result)(values, most)


def store_both_layouts(cast: jax.Array, q: Any, qt: Any, first: int, interpret: bool) -> None:
    """Store float8 values [128, columns] to columns of q and to rows of qt, from `first`.

    q [128, width], qt [width, 128]: in shared memory. Two neighbours of a column are one element of
    the matrices of 8 x 8 that `stmatrix` transposes. Threads swap values so that the rows of a
    matrix are in different banks.
    """
    if interpret:
        at = pl.ds(first, cast.shape[1])
        q[:, at], qt[at] = cast, cast.T
        return
    types = [plgpu.RefType(hopper.tiles(x.shape, cast.dtype).transforms) for x in (q, qt)]
    run = lambda _, *given: _store(given, q.shape[1], first)
    _inline(run, (BLOCKS, *types))(cast, q, qt)


def _store(given: tuple[Any, ...], width: int, first: int) -> None:
    cast, q, qt = given
    i32 = ir.IntegerType.get_signless(32)
    const = lambda x: arith.constant(i32, x)
    times = lambda x, factor: arith.muli(x, const(factor))
    total = lambda *terms: functools.reduce(arith.addi, terms)
    bits = lambda x, start, count: arith.andi(arith.shrui(x, const(start)), const(2**count - 1))
    address = lambda ref: llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
    thread = mgpu.utils.thread_idx()
    lane, warp = bits(thread, 0, 5), bits(thread, 5, 2)

    # A thread gives the address of row c of matrix (below, second) of four.
    c, second, below = bits(lane, 0, 3), bits(lane, 3, 1), bits(lane, 4, 1)
    second = arith.xori(second, bits(c, 2, 1))  # the second half of the rows swaps
    row = total(times(warp, 32), times(below, 16), times(c, 2), second)
    swizzle = {128: bits(row, 0, 3), 64: bits(row, 1, 2)}[width]
    q_address = total(address(q), times(row, width), times(swizzle, 16))
    row = total(times(bits(c, 1, 2), 4), times(second, 2), bits(c, 0, 1))
    swizzle = arith.xori(arith.addi(times(warp, 2), below), bits(row, 0, 3))
    qt_address = total(address(qt), times(row, 128), times(swizzle, 16))

    def either(bit, yes, no):
        set_ = arith.cmpi(arith.CmpIPredicate.ne, bits(lane, bit, 1), const(0))
        return arith.select(set_, yes, no)

    # Bytes 0 and 1 of two rows, or 2 and 3.
    low, high = const(0x5140), const(0x7362)
    choices = either(1, high, low), either(1, low, high)

    def matrices(how: str, here, values):
        mgpu.utils.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x4{how}.shared::cta.b16 [$0], {{$1, $2, $3, $4}};",
            here, *values, has_side_effects=True,
        )  # fmt: skip

    for column in range(cast.registers.shape[1]):
        straight, turned = [], []
        for below in (0, 1):
            at = 0, column, 0, 0, below, 0, 0, 0
            rows = [mgpu.utils.bitcast(cast.registers[(*at, n, 0)], i32) for n in (0, 1)]
            straight += [either(4, *rows[::-1]), either(4, *rows)]
            ptx = "prmt.b32 $0, $1, $2, $3;"
            turned += [mgpu.utils.inline_ptx(ptx, *rows, x, result_types=i32) for x in choices]
        chunk = first // 16 + column
        matrices("", arith.xori(q_address, const(16 * chunk)), straight)
        matrices(".trans", arith.addi(qt_address, const(16 * 128 * chunk)), turned)


def _inline(function: Callable[..., Any], types: tuple[Any, ...], result: Any = None) -> Any:
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=result)
    return inline(function)


def _each(convert: Callable[[Any], Any], values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The values with `convert` applied to each vector of four."""

    def run(_, values):
        registers = np.empty_like(values.registers)
        for at, register in np.ndenumerate(values.registers):
            registers[at] = convert(register)
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(values.shape, jnp.dtype(dtype), BLOCKS)
    return _inline(run, (BLOCKS,), result)(values)


def _element(values: Any, n: int) -> Any:
    return vector.extract(values, [], [n])


def _joined(values: list[Any]) -> Any:
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)
