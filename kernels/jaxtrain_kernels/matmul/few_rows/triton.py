"""Matmuls of one to four rows in Pallas Triton: Ampere and newer.

XLA compiles the kernel itself, and CUDA graphs can contain it. A program has a tile of columns of
one of the matrices and reads all inputs, so one launch computes the products of all matrices. The
kernel is in `kernel.py`, imported by the first call: Pallas takes a while to import.

A copy at 4.2 TB/s moves 32 bytes per nanosecond to each of 132 multiprocessors, with a latency of
about 1,000 ns. So 32 KiB are in flight: 4 to 8 loads of 16 bytes for each of 512 threads.

A matrix is [K, N], or transposed. Programs for all multiprocessors leave 64 or 128 bytes of each
row of a large [K, N], which are read at 2.0 or 3.5 TB/s; rows of [N, K] are read as a whole.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.matmul.few_rows import xla
from jaxtrain_kernels.matmul.few_rows.operations import (
    GATED,
    NOTHING,
    InputNorm,
    Operations,
    composed,
)

MOST_ROWS = 4
MOST_WEIGHTS = 2**31  # per matrix: their indices have 32 bits
# Weights of a matrix [K, N], from which on cuBLAS is faster: it reads 4.0 TB/s. An engine of few
# slots stores such matrices transposed.
LARGE = 10_000_000
FEWEST_PROGRAMS = 72  # a Hopper GPU has 132 multiprocessors
WIDEST = 64  # columns of a tile
MOST_WARPS = 16
SHORT_ROW = 4096  # inputs, up to which 8 warps read rows of a transposed matrix
MOST_LOADS = 8  # per thread at once; with more, ptxas delays the later ones to save registers


class Operands(NamedTuple):
    """Arrays of one call, or the kernel's references to them."""

    x_MK: Any
    matrices: tuple[Any, ...]
    gain_K: Any | None
    biases: tuple[Any | None, ...] | None
    residual_MN: Any | None


class RowTile(NamedTuple):
    """A program's tile: columns of a matrix, and inputs per load. Each of `steps` steps has `loads`
    loads in flight at once."""

    columns: int
    inputs: int
    loads: int
    steps: int
    warps: int


class RowPlan(NamedTuple):
    """Compile-time constants of one call's kernel. eps: of the input's norm, None without one."""

    tile: RowTile
    eps: float | None
    activation: str | None
    transposed: bool
    interpret: bool


def supports(target: Target, x_MK, *matrices, transposed=False) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    if reason := triton_unsupported(target):
        return reason
    if x_MK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {x_MK.dtype}"
    M, K = x_MK.shape
    if M > (most := 1 if transposed else MOST_ROWS):  # cuBLAS reads [N, K] faster for four
        return f"needs at most {most} rows, got {M}"
    if K % 64:
        return f"needs a multiple of 64 inputs, got {K}"
    for matrix in matrices:
        if matrix.dtype != x_MK.dtype:
            return f"needs matrices in {x_MK.dtype}, got {matrix.dtype}"
        if (N := matrix.shape[1 - transposed]) % 8:
            return f"needs a multiple of 8 columns, got {N}"
        if matrix.size >= (most := MOST_WEIGHTS if transposed else LARGE):
            return f"needs fewer than {most} weights, got {matrix.size}"
    return None


def few_rows_matmul(
    x_MK, *matrices, operations=NOTHING, transposed=False, tile=None, interpret=False
):
    """Backend of the public function."""
    norm, biases, activation, residual_MN = operations
    pair = activation in GATED
    K, sizes = x_MK.shape[1], [matrix.shape[1 - transposed] for matrix in matrices]
    if tile is None:
        tile = transposed_tile_of(K, pair) if transposed else tile_of(K, sizes, pair)
    eps = None if norm is None else norm.eps
    plan = RowPlan(tile, eps, activation, transposed, interpret)
    gain_K = None if norm is None else norm.gain_K

    @jax.custom_vjp
    def products(*arrays):
        from jaxtrain_kernels.matmul.few_rows import kernel

        return tuple(kernel.call(plan, Operands(*arrays)))

    def formula(x_MK, matrices, gain_K, biases, residual_MN):
        norm = None if eps is None else InputNorm(eps, gain_K)
        around = Operations(norm, biases, activation, residual_MN)
        matmul = functools.partial(xla.few_rows_matmul, transposed=transposed)
        return composed(matmul, x_MK, *matrices, operations=around)

    def backward(arrays, gradients):
        return jax.vjp(formula, *arrays)[1](gradients)

    products.defvjp(lambda *arrays: (products(*arrays), arrays), backward)
    return products(x_MK, matrices, gain_K, biases, residual_MN)


def tile_of(K: int, columns: list[int], pair: bool = False) -> RowTile:
    """Tile for K inputs and matrices of these numbers of columns, which it divides: no mask needed.
    pair: a program has the same columns of two matrices.

    The tile is as wide as leaves programs for half of the multiprocessors, at most 128 bytes of a
    row. It has two or more steps if each step then has three or more loads. Of all tiles of 4 to 32
    warps that divide the matmuls of a layer of 768 and of 1,536 channels, these are within 3% of
    the best (an H200, LOG.md). A thread reads 16 bytes of a row at a time.
    """
    divides = lambda n: all(N % n == 0 for N in columns)
    results = columns[0] if pair else sum(columns)
    most = MOST_LOADS // 2 if pair else MOST_LOADS
    width = 8
    while width < WIDEST and divides(2 * width) and results // (2 * width) >= FEWEST_PROGRAMS:
        width *= 2
    inputs = min(_power_of_two(K), MOST_WARPS * 32 * 8 // width)
    parts = K // inputs
    every = [n for n in range(1, most + 1) if parts % n == 0]
    loads = max([n for n in every if n >= 3 and n < parts] or every)
    return RowTile(width, inputs, loads, parts // loads, max(1, inputs * width // (32 * 8)))


def transposed_tile_of(K: int, pair: bool = False) -> RowTile:
    """Tile for matrices [N, K]; pair: as of `tile_of`. The best of 12 to 24 for each matmul of
    llama_8b on an H200, within 2% (LOG.md): 4 rows of the matrix, or 2 of each of a pair."""
    warps = 1 if pair else 8 if K <= SHORT_ROW else 2
    inputs = min(_power_of_two(K), warps * 32 * 8)
    return RowTile(2 if pair else 4, inputs, 1, K // inputs, max(1, inputs // 256))


def _power_of_two(n: int) -> int:
    """Largest power of two that divides n."""
    return n & -n
