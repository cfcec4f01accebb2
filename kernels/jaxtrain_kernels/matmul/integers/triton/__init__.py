"""Matmuls of 1 to 32 rows with integer codes in Pallas Triton: Ampere and newer.

XLA compiles these kernels itself, and CUDA graphs can contain them. A program has a tile of columns
and reads all inputs. Where the columns give too few programs, it reads only a split of the inputs
(split-K), and XLA adds the splits in float32, always in the same order. For up to `FRAGMENT_ROWS`
rows, codes become operands of tensor cores in registers (`fragments.py`).
The kernels are in `kernels.py`, imported by the first call: Pallas takes a while to import.
JAX 0.11.2 warns that a later version will have no Triton backend of Pallas.

A copy at 4.2 TB/s moves 32 bytes per nanosecond to each of 132 multiprocessors, with a latency of
about 1,000 ns. So 32 KiB are in flight: 16 loads of 8 bytes for each of 256 threads. Pieces of rows
of 32, 64 and 128 bytes are read at 1.2, 1.6 and 2.1 TB/s, however many are in flight (an H200).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.matmul.integers import dot

MOST_ROWS = 32
PROCESSORS = 132  # multiprocessors (SMs) of a Hopper GPU
MOST_SPLITS = 16  # which one thread of XLA's sum reads, one after another
ENOUGH = 0.8  # of the multiprocessors have a program, if the sizes allow
FRAGMENT_ROWS = 8  # more rows use shared memory
WIDE_ROWS = 2  # up to these, all lanes of a warp are side by side
# Pallas indexes up to 2^32 bytes in int32, in which indices from 2^31 on are negative.
UNCOUNTED = range(2**31, 2**32 + 1)


class Tile(NamedTuple):
    """A program's warps, which read different rows of codes in the same columns.

    width: adjacent columns of a lane. each: rows of codes of a lane per step. wide: all 32 lanes
    of a warp are side by side, for 2 rows of x at a time; else 8 are, and 4 behind one another, for
    8 rows of x. A program reads one of `splits` splits of the inputs.
    """

    width: int
    warps: int
    each: int
    splits: int
    wide: bool

    @property
    def columns(self) -> int:
        """Columns of a program."""
        return (32 if self.wide else 8) * self.width

    @property
    def rows(self) -> int:
        """Rows of codes of a program's step."""
        return (1 if self.wide else 4) * self.each * self.warps


class DotTile(NamedTuple):
    """Rows of codes and columns of a step of products in shared memory."""

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


def supports(target: Target, x_MK, codes, scales) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    if reason := triton_unsupported(target):
        return reason
    M, K = x_MK.shape
    if M > MOST_ROWS:
        return f"needs at most {MOST_ROWS} rows, got {M}"
    if x_MK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {x_MK.dtype}"
    if codes.shape[-1] % 32:
        return f"needs a multiple of 32 columns, got {codes.shape[-1]}"
    if codes.ndim > 2 and codes.size in UNCOUNTED:
        return f"needs a stack below 2^31 bytes of codes or above 2^32, got {codes.size}"
    if codes.shape[-2] % 16:
        return f"needs a multiple of 16 rows of codes, got {codes.shape[-2]}"
    if codes.dtype == jnp.uint8:
        group = K // scales.shape[-2]
        if scales.dtype != jnp.bfloat16:
            return f"needs scales in bfloat16, got {scales.dtype}"
        if group % 32:
            return f"needs groups of a multiple of 32 inputs, got {group}"
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


def tile_of(M: int, R: int, N: int, group: int | None) -> Tile | DotTile:
    """Tile for M rows and codes [R, N], which it divides: no mask is needed. group: int4's size.

    Of pieces of rows of 128 to 1,024 bytes, 256 (wide) and 128 gave the fastest chains (an H200).
    """
    if M > FRAGMENT_ROWS:
        return _dot_tile(R, N, group)
    wide = M <= WIDE_ROWS and N % 128 == 0
    lanes, behind = (32, 1) if wide else (8, 4)
    lane = R if group is None else group // 2  # a step of a warp lies in one group
    each = min(16, _power_of_two(R) // behind, _power_of_two(lane) // behind)
    most = _power_of_two(R // (behind * each))
    width = min(8 if wide else 16, _power_of_two(N) // lanes)
    programs = lambda: N // (lanes * width)
    while programs() * min(most, MOST_SPLITS) < ENOUGH * PROCESSORS and width > 4:
        width //= 2
    splits = 1
    while programs() * splits < 2 * ENOUGH * PROCESSORS and splits < min(most, MOST_SPLITS):
        splits *= 2
    return Tile(width, min(8, most // splits), each, splits, wide)


def _dot_tile(R: int, N: int, group: int | None) -> DotTile:
    """Tile for shared memory: of 9 to 24 per shape within 4% of the fastest (8 rows, H200)."""
    columns = min(128, _power_of_two(N))
    rows = min(64, _power_of_two(R), R if group is None else _power_of_two(group // 2))
    steps, programs = R // rows, N // columns
    splits = 1
    while steps % (2 * splits) == 0 and 2 * splits * programs <= 2 * PROCESSORS:
        splits *= 2
    return DotTile(rows, columns, splits, 4, 5 if group is None else 3)


def _power_of_two(n: int) -> int:
    """Largest power of two that divides n."""
    return n & -n


def _product(formula, tile: Tile | DotTile, interpret: bool, x_MK, arrays, layer):
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
