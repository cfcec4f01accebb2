"""Matmuls of 1 to 32 rows with integer codes in Pallas Triton: Ampere and newer.

XLA compiles these kernels itself, and CUDA graphs can contain them. A program has a tile of columns
and reads all inputs. Where the columns give too few programs, it reads only a split of the inputs
(split-K), and XLA adds the splits in float32, always in the same order. Codes become operands of
tensor cores in registers (`fragments.py`).
The kernels are in `kernels.py`, imported by the first call: Pallas takes a while to import.
JAX 0.11.2 warns that a later version will have no Triton backend of Pallas.

A copy at 4.2 TB/s moves 32 bytes per nanosecond to each of 132 multiprocessors, with a latency of
about 1,000 ns. So 32 KiB are in flight: 16 loads of 8 bytes for each of 256 threads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.matmul.integers import dot

MOST_ROWS = 32
PROCESSORS = 132  # multiprocessors (SMs) of a Hopper GPU
WARPS = 12  # of a multiprocessor
MOST_SPLITS = 16
# Pallas indexes up to 2^32 bytes in int32, in which indices from 2^31 on are negative.
UNCOUNTED = range(2**31, 2**32 + 1)


class Tile(NamedTuple):
    """A program's warps: `across` of them side by side, `along` behind one another.

    width: adjacent columns of a lane. each: rows of codes of a lane per step. wide: a warp's 32 lanes
    lie side by side, for 2 rows of x at a time; else 8 do, with 4 behind one another, for 8 rows.
    A program reads one of `splits` splits of the inputs.
    """

    width: int
    across: int
    along: int
    each: int
    splits: int
    wide: bool

    @property
    def columns(self) -> int:
        """Columns of a program."""
        return (32 if self.wide else 8) * self.width * self.across

    @property
    def rows(self) -> int:
        """Rows of codes of a program's step."""
        return (1 if self.wide else 4) * self.each * self.along


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


def tile_of(M: int, R: int, N: int, group: int | None) -> Tile:
    """Tile for M rows and codes [R, N], which it divides: no mask is needed. group: int4's size."""
    wide = M <= 2 and N % 128 == 0
    lanes = 32 if wide else 8
    width = min(8 if wide else 16 if M <= 8 else 8, _power_of_two(N) // lanes)
    across = min(512 // (lanes * width), _power_of_two(N // (lanes * width)))
    lane = R if group is None else group // 2  # a step of a warp lies in one group
    behind = 1 if wide else 4
    each = min(128 // width, 16, _power_of_two(R) // behind, _power_of_two(lane) // behind)
    parts, most = 1, _power_of_two(R // (behind * each))
    while N // (lanes * width) * parts < WARPS * PROCESSORS and parts < most:
        parts *= 2
    while across > 1 and parts * across > 8 * MOST_SPLITS:
        across //= 2
    along = min(parts, 8 // across)
    return Tile(width, across, along, each, parts // along, wide)


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
