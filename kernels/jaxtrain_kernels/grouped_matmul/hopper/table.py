"""Which rows belong to which group, as tables that the kernels read from device memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class RowTiles(NamedTuple):
    """Pairs of a tile of rows and a group with rows in it, by row; arrays, or references to them.

    pairs_P4: first row of the tile, group, first row of the group, end of the group. The rows after
    the last group are group E. A tile in which groups meet occurs once for each of them.
    counts_2: number of pairs of groups 0 .. E - 1, and number of all pairs.
    """

    pairs_P4: Any
    counts_2: Any


def row_tiles(sizes_E: Int[Array, "E"], M: int, rows: int) -> tuple[RowTiles, Int[Array, " M"]]:
    """Pairs of M rows in tiles of `rows`; and each row's position in a list of all pairs' rows."""
    ends_G = _ends(sizes_E, M)
    starts_G = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_G[:-1]])
    first_G = starts_G // rows
    counts_G = jnp.where(ends_G > starts_G, -(-ends_G // rows) - first_G, 0)
    last_G = jnp.cumsum(counts_G)
    # Each of the len(sizes_E) boundaries may add a pair.
    number_P = jnp.arange(-(-M // rows) + len(sizes_E), dtype=jnp.int32)
    group_P = jnp.sum(number_P[:, None] >= last_G[None], axis=1, dtype=jnp.int32)
    group_P = jnp.minimum(group_P, len(sizes_E))
    tile_P = (number_P - (last_G - counts_G - first_G)[group_P]) * rows
    pairs_P4 = jnp.stack([tile_P, group_P, starts_G[group_P], ends_G[group_P]], axis=1)
    row_M = jnp.arange(M, dtype=jnp.int32)
    group_M = jnp.sum(row_M[:, None] >= ends_G[None], axis=1)
    position_M = row_M + rows * (last_G - counts_G - first_G)[group_M]
    return RowTiles(pairs_P4.astype(jnp.int32), last_G[-2:].astype(jnp.int32)), position_M


def largest_first(
    sizes_E: Int[Array, "E"], M: int, parts: int = 1, step: int = 1
) -> Int[Array, "P 3"]:
    """(number, first row, end) of each part of each group: the largest first, so that short work is
    last. Part p of group e has number e x parts + p, and begins at a multiple of `step` rows or
    where the group does."""
    ends_E = _ends(sizes_E, M)[:-1]
    starts_E = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_E[:-1]])
    each_p = jnp.arange(1, parts, dtype=jnp.int32)
    within_Ep = starts_E[:, None] + (ends_E - starts_E)[:, None] // parts * each_p[None]
    within_Ep = jnp.maximum(within_Ep // step * step, starts_E[:, None])
    starts_P = jnp.concatenate([starts_E[:, None], within_Ep], axis=1).reshape(-1)
    ends_P = jnp.concatenate([within_Ep, ends_E[:, None]], axis=1).reshape(-1)
    order_P = jnp.argsort(starts_P - ends_P, stable=True).astype(jnp.int32)
    return jnp.stack([order_P, starts_P[order_P], ends_P[order_P]], axis=1)


def _ends(sizes_E: Array, M: int) -> Array:
    """Ends of all groups and of the rows after them."""
    ends_E = jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), M)
    return jnp.concatenate([ends_E, jnp.full(1, M, jnp.int32)])


class TilePair(NamedTuple):
    """One pair: the tile's first row, the group, and the rows of that group."""

    row: jax.Array
    group: jax.Array
    start: jax.Array
    end: jax.Array


def tile_pair(tiles: RowTiles, pair: jax.Array) -> TilePair:
    return TilePair(*(tiles.pairs_P4[pair, n] for n in range(4)))
