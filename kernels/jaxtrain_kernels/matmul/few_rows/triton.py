"""Matmuls of one to four rows in Pallas Triton: Ampere and newer.

XLA compiles the kernel itself, and CUDA graphs can contain it. A program has a tile of columns of
one of the matrices and reads all inputs, so one launch computes the products of all matrices. The
kernel is in `kernel.py`, imported by the first call: Pallas takes a while to import.

A copy at 4.2 TB/s moves 32 bytes per nanosecond to each of 132 multiprocessors, with a latency of
about 1,000 ns. So 32 KiB are in flight: 4 to 8 loads of 16 bytes for each of 512 threads.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.matmul.few_rows import xla

MOST_ROWS = 4
MOST_WEIGHTS = 10_000_000  # per matrix; XLA gives larger ones to cuBLAS, even with one row
FEWEST_PROGRAMS = 72  # a Hopper GPU has 132 multiprocessors
WIDEST = 64  # columns of a tile
MOST_WARPS = 16
MOST_LOADS = 8  # per thread at once; with more, ptxas delays the later ones to save registers


class RowTile(NamedTuple):
    """A program's tile: columns of a matrix, and inputs per load. Each of `steps` steps has `loads`
    loads in flight at once."""

    columns: int
    inputs: int
    loads: int
    steps: int
    warps: int


def supports(target: Target, x_MK, *matrices) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    if reason := triton_unsupported(target):
        return reason
    if x_MK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {x_MK.dtype}"
    M, K = x_MK.shape
    if M > MOST_ROWS:
        return f"needs at most {MOST_ROWS} rows, got {M}"
    if K % 64:
        return f"needs a multiple of 64 inputs, got {K}"
    for matrix in matrices:
        if matrix.dtype != x_MK.dtype:
            return f"needs matrices in {x_MK.dtype}, got {matrix.dtype}"
        if matrix.shape[1] % 8:
            return f"needs a multiple of 8 columns, got {matrix.shape[1]}"
        if matrix.size >= MOST_WEIGHTS:
            return f"needs less than {MOST_WEIGHTS} weights, got {matrix.size}"
    return None


def few_rows_matmul(x_MK, *matrices, relu2=False, interpret=False):
    """Backend of the public function."""
    K, columns = x_MK.shape[1], [matrix.shape[1] for matrix in matrices]
    tile = tile_of(K, columns)

    @jax.custom_vjp
    def products(x_MK, *matrices):
        from jaxtrain_kernels.matmul.few_rows import kernel

        return tuple(kernel.call(tile, relu2, interpret, x_MK, *matrices))

    def backward(inputs, gradients):
        formula = functools.partial(xla.few_rows_matmul, relu2=relu2)
        return jax.vjp(formula, *inputs)[1](gradients)

    products.defvjp(lambda *inputs: (products(*inputs), inputs), backward)
    return products(x_MK, *matrices)


def tile_of(K: int, columns: list[int]) -> RowTile:
    """Tile for K inputs and matrices of these numbers of columns, which it divides: no mask needed.

    The tile is as wide as leaves programs for half of the multiprocessors, at most 128 bytes of a
    row. It has two or more steps if each step then has three or more loads. Of all tiles of 4 to 32
    warps that divide the matmuls of a layer of 768 and of 1,536 channels, these are within 3% of
    the best (an H200, LOG.md). A thread reads 16 bytes of a row at a time.
    """
    divides = lambda n: all(N % n == 0 for N in columns)
    width = 8
    while width < WIDEST and divides(2 * width) and sum(columns) // (2 * width) >= FEWEST_PROGRAMS:
        width *= 2
    inputs = min(_power_of_two(K), MOST_WARPS * 32 * 8 // width)
    parts = K // inputs
    every = [n for n in range(1, MOST_LOADS + 1) if parts % n == 0]
    loads = max([n for n in every if n >= 3 and n < parts] or every)
    return RowTile(width, inputs, loads, parts // loads, max(1, inputs * width // (32 * 8)))


def _power_of_two(n: int) -> int:
    """Largest power of two that divides n."""
    return n & -n
