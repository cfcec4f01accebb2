"""Mask of the Mosaic GPU attention kernels, and the ranges of blocks that it leaves visible."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper

LOG2E = math.log2(math.e)
# Initial value of a row's maximum. It is finite, so that a query without keys has
# p = exp2(-inf - FLOOR) = 0 instead of NaN; and far below any score: exp2(FLOOR - maximum) = 0.
FLOOR = -1e30


class Mask(NamedTuple):
    """Key s is visible to query t if s <= t (causal) and s >= t - window (None = all)."""

    causal: bool
    window: int | None


class Heads(NamedTuple):
    """Number of query heads and KV heads, and the index of the first head of q, k, v and of v's
    gradient in their arrays, which may be one array.
    """

    N: int
    K: int
    q: int = 0
    k: int = 0
    v: int = 0
    dv: int = 0


def of_separate(q_BTNH: Any, k_BSKH: Any) -> Heads:
    """Return the heads of q and k in separate arrays."""
    return Heads(q_BTNH.shape[2], k_BSKH.shape[2])


def heads_together(heads: int, fit: int, tiles: int, blocks: int) -> int:
    """Number of heads whose tiles are scheduled together, heaviest first: a divisor of `heads`.

    fit: heads that fit the L2 cache. tiles: of each head. With fewer tiles than `blocks` CUDA
    blocks, the next heads' tiles run beside them anyway, and their longest ones would end last.
    """
    divisors = [d for d in range(1, heads + 1) if heads % d == 0]
    enough = next((d for d in divisors if 10 * d * tiles >= 9 * blocks), heads)
    return max(enough, *(d for d in divisors if d <= max(fit, 1)))


def rows_to(x_T: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast one value per row over the matrix."""
    return lax.broadcast_in_dim(x_T, like.shape, [0])


def is_visible(
    mask: Mask,
    t0: jax.Array,
    s0: jax.Array,
    shape: tuple[int, int],
    length: int | None,
    ids: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Mask bool [queries from t0 on, keys from s0 on] in wgmma's layout.

    length: sequence length, if a block may reach beyond it; ids: segment ids (of the queries, of
    the keys) or None.
    """
    t = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=hopper.MATRIX)
    s = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=hopper.MATRIX)
    conditions = []
    if mask.causal:
        conditions.append(t + (t0 - s0) >= s)
    if mask.window is not None:
        conditions.append(t + (t0 - s0 - mask.window) <= s)
    if length is not None:
        conditions.append(s < length - s0)
    if ids is not None:
        row_ids, column_ids = (lax.broadcast_in_dim(x, shape, [d]) for d, x in enumerate(ids))
        conditions += [row_ids == column_ids, row_ids > 0]
    return functools.reduce(jnp.logical_and, conditions)


class BlockRanges(NamedTuple):
    """Key blocks of a query block: it visits [lo, hi); [full_lo, full_hi) need no mask."""

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any


def block_ranges(
    mask: Mask, length: int, rows: int, columns: int, ids_BT: jax.Array | None
) -> BlockRanges:
    """Key blocks (`columns` keys) of each query block (`rows` queries): int32 [B or 1, blocks].

    At least one block is visited, and the last one (hi - 1) always with the mask. Without ids numpy
    computes the ranges, so they are static. With ids, a key block is skipped if the range of its
    ids and that of the queries' ids do not overlap: always correct, and exact where ids increase
    along the sequence.
    """
    n_rows, n_columns = -(-length // rows), -(-length // columns)
    first = np.arange(n_rows, dtype=np.int32)[None] * rows
    last = np.minimum(first + rows, length) - 1
    window = length if mask.window is None else mask.window
    hi = last // columns + 1 if mask.causal else np.full_like(first, n_columns)
    lo = np.maximum(0, first - window) // columns
    full_hi = (first + 1 if mask.causal else np.full_like(first, length)) // columns
    full_lo = -(-np.maximum(0, last - window) // columns)
    xp: Any = np
    if ids_BT is not None:
        xp = jnp
        some, full = _block_ids(ids_BT, length, rows, columns)
        j = jnp.arange(n_columns)[None, None]
        inside = some & (lo[..., None] <= j) & (j < hi[..., None])
        if not mask.causal:  # else the diagonal block is the last
            hi = jnp.maximum(jnp.where(inside, j + 1, 0).max(-1), 1)
            full_hi = jnp.minimum(full_hi, hi - 1)
        lo = jnp.minimum(jnp.where(inside, j, n_columns).min(-1), hi - 1)
        # The full blocks are the last run of them, up to the limit without ids.
        full &= full_lo[..., None] <= j
        full_lo = jnp.where(~full & (j < full_hi[..., None]), j + 1, 0).max(-1)
    full_hi = xp.clip(full_hi, lo, hi - 1)
    full_lo = xp.clip(full_lo, lo, full_hi)
    ranges = xp.broadcast_arrays(lo, full_lo, full_hi, hi)
    return BlockRanges(*(xp.asarray(x, xp.int32) for x in ranges))


def _block_ids(ids_BT: Any, length: int, rows: int, columns: int) -> tuple[Any, Any]:
    """bool [B, query blocks, key blocks]: may share an id; all ids of both are equal."""

    def bounds(size):
        blocks = jnp.pad(ids_BT, ((0, 0), (0, -length % size))).reshape(len(ids_BT), -1, size)
        smallest = jnp.where(blocks > 0, blocks, jnp.iinfo(jnp.int32).max).min(-1)
        return smallest, blocks.max(-1), blocks.min(-1)

    row_lo, row_hi, row_all = (x[:, :, None] for x in bounds(rows))
    column_lo, column_hi, column_all = (x[:, None] for x in bounds(columns))
    some = (row_lo <= column_hi) & (column_lo <= row_hi)
    # `*_all` is the minimum with padding: a block has a single id if this equals its maximum.
    full = (row_all == row_hi) & (column_all == column_hi) & (row_hi == column_hi) & (row_hi > 0)
    return some, full
