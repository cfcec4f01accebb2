"""Probabilities and score gradients of the Hopper backward kernels, in one warpgroup's registers.

Scores are transposed, [keys, queries], in the key-block kernel, but not in the query-block kernel.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels.attention.hopper import backward_inline as inline
from jaxtrain_kernels.attention.hopper.backward_plan import BackwardPlan
from jaxtrain_kernels.attention.hopper.common import LOG2E
from jaxtrain_kernels.hopper import MATRIX, Ref


def accumulator(rows: int, columns: int) -> plgpu.WGMMAAccumulatorRef:
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def finished(product: Ref, pending: int) -> jax.Array:
    """Return a matmul's result, once at most the `pending` most recent matmuls still run."""
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(product, wait_n=pending))


def narrow(plan: BackwardPlan, x: jax.Array) -> jax.Array:
    """Cast to 16 bits. The barrier makes all uses share the packed registers."""
    return lax.optimization_barrier(x.astype(plan.dtype))


def broadcast_rows(x: jax.Array, like: jax.Array, transposed: bool) -> jax.Array:
    """Broadcast one value per query over the matrix of scores."""
    return lax.broadcast_in_dim(x, like.shape, [1 if transposed else 0])


def probabilities(
    plan: BackwardPlan,
    s: jax.Array,
    lse: jax.Array,
    masked: jax.Array,
    visible_keys: Callable[[], jax.Array],
    transposed: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return (p, p times the softcap's derivative) of the scores; p in 16 bits.

    lse: log-sum-exp of each query in base 2. masked: whether the mask visible_keys() is needed.
    """
    factor = plan.scale * LOG2E
    if plan.softcap is not None:
        s = jnp.tanh(s * (plan.scale / plan.softcap))
        factor = plan.softcap * LOG2E
    capped = s
    if plan.mask.causal or plan.segments or plan.T % plan.tiling.block_kv:
        s = lax.cond(masked, lambda s: jnp.where(visible_keys(), s, -jnp.inf), lambda s: s, s)
    p = jnp.exp2(s * factor - broadcast_rows(lse, s, transposed))
    if plan.softcap is None:
        return narrow(plan, p), p
    slope = p * (1 - capped * capped)
    return narrow(plan, p), narrow(plan, slope)


def score_gradient(
    plan: BackwardPlan, slope: jax.Array, dp: jax.Array, delta: jax.Array, transposed: bool
) -> jax.Array:
    """Return ds in 16 bits, not yet scaled."""
    return (slope.astype(jnp.float32) * (dp - broadcast_rows(delta, dp, transposed))).astype(
        plan.dtype
    )


def visible_keys(
    plan: BackwardPlan,
    t0: jax.Array,
    s0: jax.Array,
    width: int,
    ids: tuple[jax.Array, jax.Array] | None,
    transposed: bool,
) -> jax.Array:
    """Mask bool [64, width] of which queries from t0 on see which keys from s0 on.

    ids: segment ids (of the rows, of the columns), if there are segments.
    """
    # Padding queries, and queries without keys, have p = 0 because of their lse.
    shape, conditions = (64, width), []
    if plan.mask.causal:
        ahead = _column_less_row(plan, shape, t0 - s0 if transposed else s0 - t0)
        conditions.append(ahead >= 0 if transposed else ahead <= 0)
        if (window := plan.mask.window) is not None:
            conditions.append(ahead <= window if transposed else ahead >= -window)
    elif plan.T % plan.tiling.block_kv:
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0 if transposed else 1, layout=MATRIX)
        conditions.append(key < plan.T - s0)
    if ids is not None:
        rows, columns = (lax.broadcast_in_dim(x, shape, [d]) for d, x in enumerate(ids))
        conditions.append(rows == columns)
    return functools.reduce(jnp.logical_and, conditions)


def _column_less_row(plan: BackwardPlan, shape: tuple[int, int], start: jax.Array) -> jax.Array:
    if not plan.interpret:
        return inline.column_less_row(shape, start)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, d) for d in range(2))
    return start + column - row
