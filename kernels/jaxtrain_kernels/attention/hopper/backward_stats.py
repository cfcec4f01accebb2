"""Per-query inputs of the Hopper backward kernels: the log-sum-exp and the sum of p * dp."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper.common import LOG2E
from jaxtrain_kernels.hopper import Interpret
from jaxtrain_kernels.rows.hopper.launch import lanes_layout, launch, load, rows_layout

# Replaces the log-sum-exp of a query without keys, so that exp2(score - NO_KEYS) = 0.
NO_KEYS = 1e30
ELEMENTS = 4096  # per block and array: 4 vectors of 16 bytes per thread


def row_stats(
    out_BTNH,
    lse_BNT,
    dout_BTNH,
    dlse_BNT,
    rows: int,
    zeros: bool = False,
    interpret: Interpret = False,
) -> list[Any]:
    """Return float32 [B, N, 2, T']: lse in base 2; the sum over keys of p * dp, minus dlse.

    That sum equals the sum of out * dout over the head dim. T' is a multiple of `rows`; a padding
    query has no keys. `zeros`: also return B T' N H zeros in one dimension, or None. Made in this
    kernel, they take no memory before they are needed.
    """
    T, H = out_BTNH.shape[1], out_BTNH.shape[3]
    if H in (64, 128, 256) and T % math.lcm(rows, ELEMENTS // H) == 0:
        return _in_one_pass(out_BTNH, lse_BNT, dout_BTNH, dlse_BNT, zeros, interpret)
    product_BTNH = out_BTNH.astype(jnp.float32) * dout_BTNH.astype(jnp.float32)
    # The barrier stops a fusion in which each thread reads a whole row, 8 times as slow.
    delta_BNT = lax.optimization_barrier(product_BTNH.sum(-1)).swapaxes(1, 2)
    lse_BNT, delta_BNT = _finished(lse_BNT, delta_BNT, dlse_BNT)
    padding = (0, 0), (0, 0), (0, -T % rows)
    lse_BNT = jnp.pad(lse_BNT, padding, constant_values=NO_KEYS)
    return [jnp.stack((lse_BNT, jnp.pad(delta_BNT, padding)), 2), *[None] * zeros]


def _finished(lse: Any, delta: Any, dlse: Any) -> tuple[Any, Any]:
    if dlse is not None:
        delta -= dlse
    some = lse > -jnp.inf
    return jnp.where(some, lse * LOG2E, NO_KEYS), jnp.where(some, delta, 0.0)


def _in_one_pass(
    out_BTNH, lse_BNT, dout_BTNH, dlse_BNT, zeros: bool, interpret: Interpret
) -> list[Any]:
    B, T, N, H = out_BTNH.shape
    rows = ELEMENTS // H
    layout = lanes_layout(H) if H < 256 else rows_layout(H)

    def row_stats(block, out_ref, dout_ref, lse_ref, *refs):
        *dlse_ref, stats_ref = refs[: len(refs) - zeros]
        # Heads vary fastest, because the heads of a query are adjacent in memory.
        b, t, n = lax.div(block, N * (T // rows)), lax.rem(lax.div(block, N), T // rows), block % N
        here = pl.ds(t * rows, rows)
        out, dout = (load(ref.at[b, here, n], layout) for ref in (out_ref, dout_ref))
        lse, *dlse = (
            hopper.untyped.load(ref.at[b, n, here], layout=layout.reduce(1), optimized=False)
            for ref in (lse_ref, *dlse_ref)
        )
        stats = _finished(lse, jnp.sum(out * dout, 1), dlse[0] if dlse else None)
        for i, x in enumerate(stats):
            stats_ref[b, n, i, here] = x
        if zeros:
            refs[-1][pl.ds(block * ELEMENTS, ELEMENTS)] = jnp.zeros(ELEMENTS, jnp.float32)

    arrays = [out_BTNH, dout_BTNH, lse_BNT] + ([] if dlse_BNT is None else [dlse_BNT])
    shapes = [(B, N, 2, T), *[(B * N * T * H,)] * zeros]
    out_types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return launch(row_stats, out_types, B * N * (T // rows), *arrays, interpret=interpret)
