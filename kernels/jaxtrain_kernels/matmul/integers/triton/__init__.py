"""Products of 1 to 32 rows with integer codes in Pallas for Triton: Ampere and newer.

XLA compiles these kernels itself, and CUDA graphs hold them. A few rows are multiplied and added
(`VECTOR_ROWS`), by programs that read all inputs of a tile of columns, so that one launch is the
whole product. More rows go through tensor cores; where the columns give too few programs, each
reads a part of the inputs (a split), and XLA adds the parts in float32, always in one order.
The kernels are in `kernels.py`, imported by the first call: Pallas takes a while to import.
JAX 0.11.2 warns that a later version will have no Triton backend of Pallas.

The tiles of one row and a large matrix were measured on an H100 (`_large_tile`); other tiles and
`VECTOR_ROWS` follow from counts of bytes and instructions.
A copy at 4.2 TB/s takes 32 bytes a nanosecond from each of 132 processors, and waits some 1,000 ns
for the first: 32 KiB are on their way at once, 8 loads of 16 bytes for each of 256 threads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.matmul.integers import dot

MOST_ROWS = 32
VECTOR_ROWS = {"uint8": 2, "int8": 4}  # more go through tensor cores
PROCESSORS = 132  # of a Hopper
LARGE_BYTES, WIDE = 2**22, 8192  # of codes, columns: from here on tiles were measured
# Pallas counts in int32 up to 2^32 bytes, which are negative from 2^31 on.
UNCOUNTED = range(2**31, 2**32 + 1)


class Tile(NamedTuple):
    """A program's step: rows of codes x columns, of one of `splits` parts of the inputs.

    each: rows of codes that a thread reads one below the other, `rows` times (vectors alone).
    dot: by tensor cores.
    """

    rows: int
    columns: int
    each: int
    splits: int
    warps: int
    stages: int
    dot: bool


def supports(target: Target, x_MK, codes, scales) -> str | None:
    """The reason why a call cannot be served; None = it can."""
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
    """As the public function. tile: a `Tile`, to measure another than `tile_of`'s."""
    R, N = codes_KN.shape[-2:]
    tile = tile or tile_of(len(x_MK), R, N, None)
    return _product(dot.w8a16_matmul, tile, interpret, x_MK, (codes_KN, scales_N), layer)


def w4a16_matmul(
    x_MK, codes_HN, scales_GN, offsets_GN=None, layer=None, tile=None, interpret=False
):
    """As the public function. tile: a `Tile`, to measure another than `tile_of`'s."""
    group = x_MK.shape[1] // scales_GN.shape[-2]
    R, N = codes_HN.shape[-2:]
    tile = tile or tile_of(len(x_MK), R, N, group)
    arrays = (codes_HN, scales_GN) if offsets_GN is None else (codes_HN, scales_GN, offsets_GN)
    return _product(dot.w4a16_matmul, tile, interpret, x_MK, arrays, layer)


def tile_of(M: int, R: int, N: int, group: int | None) -> Tile:
    """The tile for M rows and codes [R, N]; group: of int4. All divide: no mask is needed."""
    if M > VECTOR_ROWS["int8" if group is None else "uint8"]:
        return _dot_tile(R, N, group)
    if M == 1 and R * N >= LARGE_BYTES:
        tile = _large_tile(N, group)
        if N % tile.columns == 0 and R % (tile.rows * tile.each * tile.splits) == 0:
            return tile
    columns, enough = 16, 0.9 * PROCESSORS  # 32 columns are a sector of memory
    while columns < 128 and N % (2 * columns) == 0 and N // (2 * columns) >= enough:
        columns, enough = 2 * columns, 3 * PROCESSORS
    warps = 16 if N // columns < 2 * PROCESSORS else 8
    rows = min(_power_of_two(R), 32 * warps * 16 // columns)  # 16 bytes a thread
    warps = max(1, rows * columns // (32 * 16))
    in_group = R if group is None else group // 2
    most = 8 if M == 1 else 4
    return Tile(rows, columns, min(most, _power_of_two(R // rows), _power_of_two(in_group)),
                1, warps, 1, False)  # fmt: skip


def _large_tile(N: int, group: int | None) -> Tile:
    """Of one row and a large matrix: the fastest of 34 to 148 tiles a shape."""
    if group is None:
        return Tile(32, 128, 2, 4, 8, 1, False) if N >= WIDE else Tile(64, 64, 2, 4, 8, 1, False)
    if N >= WIDE and group % 8 == 0:
        return Tile(16, 256, 4, 4, 8, 1, False)
    return Tile(64, 64, 1, 4, 8, 1, False)


def _dot_tile(R: int, N: int, group: int | None) -> Tile:
    columns = min(64, _power_of_two(N))
    rows = min(64, _power_of_two(R), R if group is None else _power_of_two(group // 2))
    steps, programs = R // rows, N // columns
    splits = 1
    while steps % (2 * splits) == 0 and 2 * splits * programs <= 4 * PROCESSORS:
        splits *= 2
    return Tile(rows, columns, 1, splits, 4, 4, True)


def _power_of_two(n: int) -> int:
    """The largest that divides n."""
    return n & -n


def _product(formula, tile: Tile, interpret: bool, x_MK, arrays, layer):
    """formula: the same in XLA, for the gradient.

    The layer is read from memory, so that one kernel serves all layers: each would be compiled.
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
