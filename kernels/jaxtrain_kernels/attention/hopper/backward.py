"""Flash attention's backward pass for Hopper, in Pallas Mosaic GPU.

There are two variants. One kernel with five matmuls per pair of blocks (backward_keys.py)
accumulates dQ in device memory, in any order. Or that kernel omits dQ, and a second kernel computes
it (backward_queries.py): seven matmuls, but no float32 workspace, and bitwise repeatable.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.hopper import backward_keys as keys
from jaxtrain_kernels.attention.hopper import backward_queries as queries
from jaxtrain_kernels.attention.hopper import common
from jaxtrain_kernels.attention.hopper.backward_plan import (
    BackwardPlan,
    BackwardTiling,
    KeyPlan,
    QueryPlan,
    QueryTiling,
)
from jaxtrain_kernels.attention.hopper.backward_stats import row_stats
from jaxtrain_kernels.attention.hopper.common import Heads, Mask


def default_tiling(head_dim: int) -> BackwardTiling:
    if head_dim <= 64:
        return BackwardTiling(block_q=128, l2_bytes=50 << 20)
    if head_dim <= 128:
        return BackwardTiling()
    # With dQ in the same kernel there are too few registers.
    return BackwardTiling(block_kv=64, split="dims", dq_by="apart")


def default_query_tiling(head_dim: int, segments: bool = False) -> QueryTiling:
    if head_dim <= 128:
        return QueryTiling()
    # Segment ids need shared memory too.
    return QueryTiling(block_kv=64, k_stages=1 if segments else 2, v_stages=1)


@hopper.jit_kernel(
    "causal", "window", "softcap", "scale", "deterministic", "tiling", "query_tiling", "interpret"
)
def backward(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B T K H"],
    v_BSKH: Float[Array, "B T K H"],
    ids_BT: Int[Array, "B T"] | None,
    out_BTNH: Float[Array, "B T N H"],
    lse_BNT: Float[Array, "B N T"],
    dout_BTNH: Float[Array, "B T N H"],
    dlse_BNT: Float[Array, "B N T"] | None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    deterministic: bool = False,
    tiling: BackwardTiling | None = None,
    query_tiling: QueryTiling | None = None,
    interpret: hopper.Interpret = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Return (dq, dk, dv) in the inputs' dtypes, from the forward's out, lse and their gradients.

    bfloat16 or float16; N a multiple of K; H up to 256; any T; lse is -inf for a row without keys.
    deterministic: bitwise repeatable; overrides the tiling's dq_by.
    interpret: plgpu.InterpretGPUParams, to run on a CPU.
    """
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    tiling = tiling or default_tiling(H)
    if deterministic:
        tiling = tiling._replace(dq_by="apart")
    mask = Mask(causal, window)
    plan = make_backward_plan(
        KeyPlan, q_BTNH, k_BSKH, ids_BT, mask, softcap, scale, tiling, interpret
    )
    # TMA needs multiples of 8 tokens. Outside the arrays it reads zeros and drops writes.
    pad = lambda x: _pad(_pad(x, 1, 8), 3, 64 if H <= 64 else 128)
    inputs = [pad(x) for x in (q_BTNH, k_BSKH, v_BSKH, dout_BTNH)]
    ids = [] if ids_BT is None else [_pad(ids_BT, 1, 8)]
    of_rows = out_BTNH, lse_BNT, dout_BTNH, dlse_BNT
    if plan.with_dq:
        stats, zeros = row_stats(*of_rows, tiling.block_q, True, interpret)
        arrays = [*inputs, stats, query_ranges(plan, ids_BT), *ids]
        dq, dk, dv = keys.call(plan, arrays, zeros, interpret)
        dq = (dq * scale).astype(q_BTNH.dtype)
    else:
        of_dq = query_tiling or default_query_tiling(H, ids_BT is not None)
        if softcap is not None:
            of_dq = of_dq._replace(together=False)
        of_dq = make_backward_plan(
            QueryPlan, q_BTNH, k_BSKH, ids_BT, mask, softcap, scale, of_dq, interpret
        )
        rows = math.lcm(tiling.block_q, of_dq.rows)
        (stats,) = row_stats(*of_rows, rows, interpret=interpret)
        arrays = [*inputs, stats, query_ranges(plan, ids_BT), *ids]
        _, dk, dv = keys.call(plan, arrays, None, interpret)
        if plan.interpret:
            # A fake dependency runs the kernels one after the other: the interpreter has too few
            # threads for both.
            inputs[0] = jnp.where(jnp.isnan(dk[0, 0, 0, 0]), jnp.nan, inputs[0])
        dq = queries.call(of_dq, [*inputs, stats, key_ranges(of_dq, ids_BT), *ids], interpret)
    return dq[:, :T, :, :H], dk[:, :T, :, :H], dv[:, :T, :, :H]


@hopper.jit_kernel("heads", "causal", "window", "softcap", "scale", "tiling", "interpret")
def backward_sums(
    q_BTNH: Float[Array, "B T C H"],
    k_BSKH: Float[Array, "B T D H"],
    v_BSKH: Float[Array, "B T E H"],
    ids_BT: Int[Array, "B T"] | None,
    out_BTNH: Float[Array, "B T N H"],
    lse_BNT: Float[Array, "B N T"],
    dout_BTNH: Float[Array, "B T N H"],
    dlse_BNT: Float[Array, "B N T"] | None,
    *,
    heads: Heads,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    tiling: BackwardTiling | None = None,
    interpret: hopper.Interpret = False,
) -> tuple[jax.Array, ...]:
    """Return dq in float32, not yet scaled; then an array like k with dk, and one like v with dv.

    If dv begins after the heads of k, dk and dv share one array like q, whose query heads are not
    written. T must be a multiple of the query block, and the head dim 64 or 128.
    """
    tiling = tiling or default_tiling(q_BTNH.shape[3])
    arguments = q_BTNH, k_BSKH, ids_BT, Mask(causal, window), softcap, scale, tiling, interpret
    plan = make_backward_plan(KeyPlan, *arguments, heads)
    stats, zeros = row_stats(
        out_BTNH, lse_BNT, dout_BTNH, dlse_BNT, tiling.block_q, True, interpret
    )
    arrays = [q_BTNH, k_BSKH, v_BSKH, dout_BTNH, stats, query_ranges(plan, ids_BT)]
    arrays += [] if ids_BT is None else [ids_BT]
    shapes = [q_BTNH.shape] if heads.dv else [k_BSKH.shape, v_BSKH.shape]
    into = tuple(jax.new_ref(jax.lax.empty(shape, plan.dtype)) for shape in shapes)
    (dq,) = keys.call(plan, arrays, zeros, interpret, into)
    return dq, *(jax.freeze(ref) for ref in into)


def make_backward_plan[P: BackwardPlan](
    kind: type[P], q_BTNH, k_BSKH, ids_BT, mask, softcap, scale, tiling, interpret, heads=None
) -> P:
    B, T, _, H = q_BTNH.shape
    heads = heads or common.of_separate(q_BTNH, k_BSKH)
    plan = kind(
        B=B,
        T=T,
        N=heads.N,
        K=heads.K,
        H=H + -H % (64 if H <= 64 else 128),
        dtype=q_BTNH.dtype,
        mask=mask,
        softcap=softcap,
        scale=scale,
        segments=ids_BT is not None,
        tiling=tiling,
        interpret=bool(interpret),
        at=heads,
    )
    return plan.handed_out()


def _pad(x: Any, axis: int, multiple: int, value: float = 0) -> Any:
    pads = [(0, -x.shape[d] % multiple if d == axis else 0) for d in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=value) if any(p[1] for p in pads) else x


def query_ranges(plan: KeyPlan, ids_BT: jax.Array | None) -> jax.Array:
    """Query blocks of each key block: int32 [B or 1, key blocks, (lo, full_lo, full_hi, hi)].

    A key block visits [lo, hi), of which [full_lo, full_hi) need no mask. With time reversed, keys
    see queries as queries see keys, so `block_ranges` serves here too.
    """
    rows, columns = plan.tiling.block_kv, plan.tiling.block_q
    length = plan.T + -plan.T % max(rows, columns)
    if ids_BT is not None:
        ids_BT = jnp.pad(ids_BT, ((0, 0), (0, length - plan.T)))[:, ::-1]
    mirrored = common.block_ranges(plan.mask, length, rows, columns, ids_BT)
    lo, full_lo, full_hi, hi = (length // columns - x[:, ::-1] for x in reversed(mirrored))
    # Skip blocks of padding only, but every key block visits at least one block.
    hi = jnp.maximum(jnp.minimum(hi, plan.q_blocks), lo + 1)
    full_hi = jnp.minimum(full_hi, hi)
    if not plan.mask.causal and plan.T % rows:
        # The last key block has keys that every query must mask.
        last = jnp.arange(hi.shape[1])[None] == plan.T // rows
        full_hi = jnp.where(last, full_lo, full_hi)
    ranges = jnp.stack(jnp.broadcast_arrays(lo, full_lo, full_hi, hi), -1)
    return ranges[:, : plan.tile_blocks].astype(jnp.int32)


def key_ranges(plan: QueryPlan, ids_BT: jax.Array | None) -> jax.Array:
    """Key blocks of each query block: int32 [B or 1, query blocks, 4], as in `query_ranges`."""
    ranges = common.block_ranges(plan.mask, plan.T, plan.rows, plan.tiling.block_kv, ids_BT)
    return jnp.stack(jnp.broadcast_arrays(*ranges), -1).astype(jnp.int32)
