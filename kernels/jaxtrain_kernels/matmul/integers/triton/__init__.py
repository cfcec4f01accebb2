"""Matmuls of 1 to 32 rows with integer codes in Pallas Triton: Ampere and newer.

XLA compiles these kernels itself, and CUDA graphs can contain them. Up to `VECTOR_ROWS` rows are
multiplied and added; more rows use tensor cores. A program reads all inputs of a tile of columns.
Where the columns give too few programs, and for one row and a large matrix, it reads only a split
of the inputs (split-K), and XLA adds the splits in float32, always in the same order.
The kernels are in `kernels.py`, imported by the first call: Pallas takes a while to import.
JAX 0.11.2 warns that a later version will have no Triton backend of Pallas.

The tiles of one row and a large matrix were measured on an H100 (`_large_tile`), those of tensor
cores on an H200; other tiles and `VECTOR_ROWS` follow from counts of bytes and instructions.
A copy at 4.2 TB/s moves 32 bytes per nanosecond to each of 132 multiprocessors, with a latency of
about 1,000 ns. So 32 KiB are in flight: 8 loads of 16 bytes for each of 256 threads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.matmul.integers import dot

MOST_ROWS = 32
VECTOR_ROWS = {"uint8": 2, "int8": 4}  # more rows use tensor cores
PROCESSORS = 132  # multiprocessors (SMs) of a Hopper GPU
LARGE_BYTES, WIDE = 2**22, 8192  # bytes of codes, columns: from here on tiles were measured
# Pallas indexes up to 2^32 bytes in int32, in which indices from 2^31 on are negative.
UNCOUNTED = range(2**31, 2**32 + 1)


class Tile(NamedTuple):
    """A program's step: rows of codes x columns, in one of `splits` splits of the inputs.

    each: adjacent rows of codes that a thread reads per step; a step then has rows * each rows
    (vector kernels only). dot: whether tensor cores are used.
    """

    rows: int
    columns: int
    each: int
    splits: int
    warps: int
    stages: int
    dot: bool


def supports(target: Target, x_MK, codes, scales) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    if reason := triton_unsupported(target):
        return reason
    M, K = x_MK.shape
    if M > MOST_ROWS:
        return f"needs at most {MOST_ROWS} rows, got {M}"
    if x_MK.dtype not in (jnp.bfloat16, jnp.float16) and (M > 1 or x_MK.dtype != jnp.float32):
        return f"needs bfloat16 or float16, or one row of float32, got {M} of {x_MK.dtype}"
    if codes.shape[-1] % 16:
        return f"needs a multiple of 16 columns, got {codes.shape[-1]}"
    if codes.ndim > 2 and codes.size in UNCOUNTED:
        return f"needs a stack below 2^31 bytes of codes or above 2^32, got {codes.size}"
    if codes.shape[-2] % 16:
        return f"needs a multiple of 16 rows of codes, got {codes.shape[-2]}"
    if codes.dtype == jnp.uint8:
        group = K // scales.shape[-2]
        if scales.dtype != jnp.bfloat16:
            return f"needs scales in bfloat16, got {scales.dtype}"
        if M > VECTOR_ROWS["uint8"] and group % 32:
            return f"needs groups of a multiple of 32 inputs for {M} rows, got {group}"
    return None


def w8a16_matmul(x_MK, codes_KN, scales_N, layer=None, tile=None, interpret=False):
    """Backend of the public function. tile: a `Tile` that replaces `tile_of`'s, to measure it."""
    R, N = codes_KN.shape[-2:]
    tile = tile or tile_of(len(x_MK), R, N, None)
    return _product(dot.w8a16_matmul, tile, interpret, x_MK, (codes_KN, scales_N), layer)


def w4a16_matmul(
    x_MK, codes_HN, scales_GN, offsets_GN=None, layer=None, tile=None, interpret=False
):
    """Backend of the public function. tile: a `Tile` that replaces `tile_of`'s, to measure it."""
    group = x_MK.shape[1] // scales_GN.shape[-2]
    R, N = codes_HN.shape[-2:]
    tile = tile or tile_of(len(x_MK), R, N, group)
    arrays = (codes_HN, scales_GN) if offsets_GN is None else (codes_HN, scales_GN, offsets_GN)
    return _product(dot.w4a16_matmul, tile, interpret, x_MK, arrays, layer)


def tile_of(M: int, R: int, N: int, group: int | None) -> Tile:
    """Tile for M rows and codes [R, N], which it divides: no mask is needed. group: int4's size."""
    if M > VECTOR_ROWS["int8" if group is None else "uint8"]:
        return _dot_tile(R, N, group)
    if M == 1 and R * N >= LARGE_BYTES:
        tile = _large_tile(N, group)
        if N % tile.columns == 0 and R % (tile.rows * tile.each * tile.splits) == 0:
            return tile
    columns, enough = 16, 0.9 * PROCESSORS  # 32 columns (bytes) are a memory sector
    while columns < 128 and N % (2 * columns) == 0 and N // (2 * columns) >= enough:
        columns, enough = 2 * columns, 3 * PROCESSORS
    warps = 16 if N // columns < 2 * PROCESSORS else 8
    rows = min(_power_of_two(R), 32 * warps * 16 // columns)  # 16 bytes per thread
    warps = max(1, rows * columns // (32 * 16))
    in_group = R if group is None else group // 2
    most = 8 if M == 1 else 4
    return Tile(rows, columns, min(most, _power_of_two(R // rows), _power_of_two(in_group)),
                1, warps, 1, False)  # fmt: skip


def _large_tile(N: int, group: int | None) -> Tile:
    """Tile for one row and a large matrix: the fastest of 34 to 148 measured tiles per shape."""
    if group is None:
        return Tile(32, 128, 2, 4, 8, 1, False) if N >= WIDE else Tile(64, 64, 2, 4, 8, 1, False)
    if N >= WIDE and group % 8 == 0:
        return Tile(16, 256, 4, 4, 8, 1, False)
    return Tile(64, 64, 1, 4, 8, 1, False)


def _dot_tile(R: int, N: int, group: int | None) -> Tile:
    """Tile for tensor cores: the fastest or within 4% of it of 9 to 24 per shape (8 rows, H200)."""
    columns = min(128, _power_of_two(N))
    rows = min(64, _power_of_two(R), R if group is None else _power_of_two(group // 2))
    steps, programs = R // rows, N // columns
    splits = 1
    while steps % (2 * splits) == 0 and 2 * splits * programs <= 2 * PROCESSORS:
        splits *= 2
    return Tile(rows, columns, 1, splits, 4, 5 if group is None else 3, True)


def _power_of_two(n: int) -> int:
    """Largest power of two that divides n."""
    return n & -n


def _product(formula, tile: Tile, interpret: bool, x_MK, arrays, layer):
    """Call the kernel. formula: the same function in XLA, for the gradient.

    The kernel reads the layer index from memory, so that all layers share one compiled kernel.
    """

    def formula_of_layer(x_MK, arrays, *layer_1):
        matrix = [array[layer_1[0][0]] for array in arrays] if layer_1 else arrays
        return formula(x_MK, *matrix)

    @jax.custom_vjp
    def product(x_MK, arrays, *layer_1):
        def call(x_MK, arrays, *layer_1):
            from jaxtrain_kernels.matmul.integers.triton import kernels

            codes = arrays[0].reshape(-1, *arrays[0].shape[-2:])
            others = [array.reshape(len(codes), -1, codes.shape[-1]) for array in arrays[1:]]
            return kernels.call(tile, interpret, x_MK, codes, *others, layer_1=layer_1)

        return jax.custom_batching.sequential_vmap(call)(x_MK, arrays, *layer_1)

    def backward(inputs, dy_MN):
        return jax.vjp(formula_of_layer, *inputs)[1](dy_MN)

    product.defvjp(lambda *inputs: (product(*inputs), inputs), backward)
    layer_1 = () if layer is None else (jnp.asarray(layer, jnp.int32)[None],)
    return product(x_MK, arrays, *layer_1)
