"""Matmuls of 1 to 32 rows with integer codes in Pallas Triton: Ampere and newer.

XLA compiles these kernels itself, and CUDA graphs can contain them. For up to `FRAGMENT_ROWS` rows
of inputs, codes in the order of `fragment_order.py` become operands of tensor cores in registers
(`fragments.py`); a program has 32 columns. Codes in rows are multiplied by tiles in shared memory.
Where the columns give too few programs, one reads only a split of the inputs (split-K), and XLA
adds the splits in float32, always in the same order.
The kernels are in `kernels.py`, imported by the first call: Pallas takes a while to import.
JAX 0.11.2 warns that a later version will have no Triton backend of Pallas.

A copy at 4.2 TB/s moves 32 bytes per nanosecond to each of 132 multiprocessors, with a latency of
about 1,000 ns. So 32 KiB are in flight: 2 loads of 16 bytes for each of 1,024 threads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.matmul.few_rows.operations import GATED, NOTHING, InputNorm, Operations
from jaxtrain_kernels.matmul.integers import dot
from jaxtrain_kernels.matmul.integers.around import columns_by_size, with_operations
from jaxtrain_kernels.matmul.integers.fragment_order import COLUMNS, ROWS, from_fragments

MOST_ROWS = 32
PROCESSORS = 132  # multiprocessors (SMs) of a Hopper GPU
MOST_SPLITS = 16  # which one thread of XLA's sum reads, one after another
FRAGMENT_ROWS = 8  # more rows use shared memory
LEAST_WARPS, MOST_WARPS, MOST_LOADS = 4, 32, 2  # of a program of fragments; of a warp in a step
# Of a multiprocessor: with up to 64 registers a lane, and with 72, as the norm of int4's input has.
RESIDENT_WARPS, RESIDENT_NORM_WARPS = 32, 28
FORMULAS = {"int4": dot.w4a16_matmul, "int8": dot.w8a16_matmul}  # XLA's, for gradients
# Pallas indexes up to 2^32 bytes in int32, in which indices from 2^31 on are negative.
UNCOUNTED = range(2**31, 2**32 + 1)


class Tile(NamedTuple):
    """A program's warps, which read different blocks of codes of the same columns.

    loads: blocks of a warp per step. A program reads one of `splits` splits of the inputs.
    """

    warps: int
    loads: int
    splits: int

    columns = COLUMNS

    @property
    def rows(self) -> int:
        """Rows of codes of a program's step."""
        return ROWS * self.loads * self.warps


class DotTile(NamedTuple):
    """Rows of codes and columns of a step of products in shared memory."""

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


class IntegerPlan(NamedTuple):
    """Compile-time constants of one call's kernel. eps: of the input's norm, None without one.
    sizes: columns of each result."""

    form: str
    dtype: str
    tile: Tile | DotTile
    eps: float | None
    activation: str | None
    sizes: tuple[int, ...]
    interpret: bool


class IntegerOperands(NamedTuple):
    """Arrays of one call, or the kernel's references to them; [L, ..] for L layers. layer_1: index
    of the layer, None if there is one."""

    x_MK: Any
    codes: Any
    scales: Any
    offsets: Any | None
    layer_1: Any | None
    gain_K: Any | None
    residual_MN: Any | None


def supports(target: Target, form: str, x_MK, codes, scales) -> str | None:
    """Return why this backend cannot serve the call; None = it can. form: int4 or int8."""
    if reason := triton_unsupported(target):
        return reason
    M, K = x_MK.shape
    most = FRAGMENT_ROWS if codes.dtype == jnp.int32 else MOST_ROWS
    if M > most:
        return f"needs at most {most} rows, got {M}"
    if x_MK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {x_MK.dtype}"
    if codes.dtype != jnp.int32:
        if codes.ndim > 2 and codes.size in UNCOUNTED:
            return f"needs a stack below 2^31 bytes of codes or above 2^32, got {codes.size}"
        if codes.shape[-1] % 32:
            return f"needs a multiple of 32 columns, got {codes.shape[-1]}"
        if codes.shape[-2] % 16:
            return f"needs a multiple of 16 rows of codes, got {codes.shape[-2]}"
    if form == "int4":
        group = K // scales.shape[-2]
        if scales.dtype != jnp.bfloat16:
            return f"needs scales in bfloat16, got {scales.dtype}"
        if group % 32:
            return f"needs groups of a multiple of 32 inputs, got {group}"
    return None


def w8a16_matmul(
    x_MK, codes, scales_N, layer=None, operations=NOTHING, sizes=None, tile=None, interpret=False
):
    """Backend of the public function; returns a tuple if codes are in fragments, which alone take
    operations and sizes. tile: one that replaces `fragment_tile`'s or `dot_tile`'s, to measure it.
    """
    arrays = codes, scales_N
    return _product("int8", tile, interpret, x_MK, arrays, layer, operations, sizes)


def w4a16_matmul(
    x_MK, codes, scales_GN, offsets_GN=None, layer=None, operations=NOTHING, sizes=None, tile=None,
    interpret=False,
):  # fmt: skip
    """Backend of the public function. Arguments and result as of `w8a16_matmul`."""
    arrays = (codes, scales_GN) if offsets_GN is None else (codes, scales_GN, offsets_GN)
    return _product("int4", tile, interpret, x_MK, arrays, layer, operations, sizes)


def fragment_tile(
    R: int, N: int, group: int | None, whole: bool = False, norm: bool = False
) -> Tile:
    """Tile for codes [R, N] in fragments, which it divides: no mask is needed. group: int4's.
    whole: a program reads all inputs, as operations around the product need; norm: one is of them.

    All programs run at once if they can, so that all bytes are asked for early.
    """
    blocks, programs = R // ROWS, N // COLUMNS
    loads = min(MOST_LOADS, _power_of_two(blocks))
    if group is not None:  # a step of a warp lies in one group
        loads = min(loads, _power_of_two(group // 2 // ROWS))
    most = _power_of_two(blocks // loads)
    warps, of_one = min(LEAST_WARPS, most), -(-programs // PROCESSORS)
    resident = RESIDENT_NORM_WARPS if norm else RESIDENT_WARPS
    while warps < min(MOST_WARPS, most) and 2 * warps * of_one <= resident:
        warps *= 2
    splits = 1
    most_splits = 1 if whole else min(most // warps, MOST_SPLITS)
    while 2 * splits * programs <= PROCESSORS and splits < most_splits:
        splits *= 2
    return Tile(warps, loads, splits)


def dot_tile(R: int, N: int, group: int | None) -> DotTile:
    """Tile for codes [R, N] in rows: of 9 to 24 a shape within 4% of the fastest (8 rows, H200)."""
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


def _product(
    form: str, tile: Tile | DotTile | None, interpret: bool, x_MK, arrays, layer, operations, sizes
):
    """Call the kernel of int4 or int8.

    The kernel reads the layer index from memory, so that all layers share one compiled kernel.
    """
    norm, _, activation, residual_MN = operations
    codes, scales = arrays[:2]
    in_fragments, N = codes.dtype == jnp.int32, scales.shape[-1]
    shape = codes.shape[-3 if in_fragments else -2 :]
    R, group = x_MK.shape[1], None
    if form == "int4":
        R, group = R // 2, R // scales.shape[-2]
    if tile is None and in_fragments:
        whole = operations != NOTHING or sizes is not None
        tile = fragment_tile(R, N, group, whole, norm is not None)
    elif tile is None:
        tile = dot_tile(R, N, group)
    eps = None if norm is None else norm.eps
    columns = sizes or (N // 2 if activation in GATED else N,)
    plan = IntegerPlan(form, x_MK.dtype.name, tile, eps, activation, columns, interpret)

    def formula(x_MK, arrays, layer_1, gain_K, residual_MN):
        codes, *others = arrays if layer_1 is None else [array[layer_1[0]] for array in arrays]
        if in_fragments:
            codes = from_fragments(codes, form)
        norm = None if eps is None else InputNorm(eps, gain_K)
        around = Operations(norm, None, activation, residual_MN)
        y_MN = with_operations(FORMULAS[form], x_MK, (codes, *others), around)
        return tuple(columns_by_size(y_MN, columns))

    @jax.custom_vjp
    def product(x_MK, arrays, *rest):
        def call(x_MK, arrays, *rest):
            from jaxtrain_kernels.matmul.integers.triton import kernels

            codes = arrays[0].reshape(-1, *shape)
            scales, *offsets = (array.reshape(len(codes), -1, N) for array in arrays[1:])
            given = x_MK, codes, scales, offsets[0] if offsets else None, *rest
            return tuple(kernels.call(plan, IntegerOperands(*given)))

        return jax.custom_batching.sequential_vmap(call)(x_MK, arrays, *rest)

    def backward(inputs, gradients):
        return jax.vjp(formula, *inputs)[1](gradients)

    product.defvjp(lambda *inputs: (product(*inputs), inputs), backward)
    layer_1 = None if layer is None else jnp.asarray(layer, jnp.int32)[None]
    gain_K = None if norm is None else norm.gain_K
    ys = product(x_MK, arrays, layer_1, gain_K, residual_MN)
    return ys if in_fragments else ys[0]
