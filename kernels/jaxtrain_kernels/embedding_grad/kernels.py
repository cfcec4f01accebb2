"""Kernels of `embedding_grad.triton`: a program has a table's row, or a piece of its tokens."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.embedding_grad.triton import PIECE

ROWS = 4  # that a program loads at once
WARPS = 4
WIDEST = 512


def parts_of_row(D: int) -> list[tuple[int, int]]:
    """(first, width) of parts of a row: the largest powers of two that divide D, up to WIDEST."""
    width = min(D & -D, WIDEST)
    return [(first, width) for first in range(0, D, width)]


def sum_rows(index_of: Callable, ref, columns_W, begin, end, total_W):
    """total + the rows index_of(begin), ..., index_of(end - 1) of ref, in float32."""

    def add(step, total_W):
        at_R = begin + step * ROWS + jnp.arange(ROWS)
        inside_R = at_R < end
        row_R = index_of(at_R, inside_R)
        rows_RW = plgpu.load(
            ref.at[row_R[:, None], columns_W[None]], mask=inside_R[:, None], other=0
        )
        return total_W + jnp.sum(rows_RW.astype(jnp.float32), axis=0)

    return lax.fori_loop(0, pl.cdiv(end - begin, ROWS), add, total_W)


@functools.partial(jax.jit, static_argnums=0)
def sum_pieces(interpret: bool, g_MD, order_M, start_S, token_E, first_E):
    """Return the sum of each further piece of a row's tokens [E, D], in float32; unwritten where
    there is none."""
    (M, D), E = g_MD.shape, len(first_E)

    def kernel(g_ref, order_ref, start_ref, token_ref, first_ref, parts_ref):
        piece = pl.program_id(0)
        begin, token = first_ref[piece], token_ref[piece]
        end = jnp.where(begin < M, jnp.minimum(begin + PIECE, start_ref[token + 1]), begin)
        order = lambda at_R, inside_R: plgpu.load(order_ref.at[at_R], mask=inside_R, other=0)
        for first, width in parts_of_row(D):
            at_W = first + jnp.arange(width)
            sum_W = sum_rows(order, g_ref, at_W, begin, end, jnp.zeros(width, jnp.float32))
            plgpu.store(parts_ref.at[piece, at_W], sum_W, mask=(at_W < D) & (begin < M))

    return pl.pallas_call(
        kernel,
        grid=(E,),
        out_shape=jax.ShapeDtypeStruct((E, D), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="embedding_sum_pieces",
    )(g_MD, order_M, start_S, token_E, first_E)


@functools.partial(jax.jit, static_argnums=(0, 1))
def sum_tokens(interpret: bool, dtype, g_MD, parts_ED, order_M, start_S, slot_M):
    """Return the sum of each row's tokens: of its first PIECE, and of its further pieces."""
    (M, D), V = g_MD.shape, len(start_S) - 1

    def kernel(g_ref, parts_ref, order_ref, start_ref, slot_ref, sums_ref):
        row = pl.program_id(0)
        begin, end = start_ref[row], start_ref[row + 1]
        pieces = jnp.maximum(end - begin - 1, 0) // PIECE
        after = jnp.minimum(begin + PIECE, end)
        slot = slot_ref[jnp.minimum(begin + PIECE, M - 1)]
        order = lambda at_R, inside_R: plgpu.load(order_ref.at[at_R], mask=inside_R, other=0)
        itself = lambda at_R, inside_R: at_R
        for first, width in parts_of_row(D):
            at_W = first + jnp.arange(width)
            sum_W = jnp.zeros(width, jnp.float32)
            sum_W = sum_rows(order, g_ref, at_W, begin, after, sum_W)
            sum_W = sum_rows(itself, parts_ref, at_W, slot, slot + pieces, sum_W)
            plgpu.store(sums_ref.at[row, at_W], sum_W.astype(dtype))

    return pl.pallas_call(
        kernel,
        grid=(V,),
        out_shape=jax.ShapeDtypeStruct((V, D), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="embedding_sum_tokens",
    )(g_MD, parts_ED, order_M, start_S, slot_M)
