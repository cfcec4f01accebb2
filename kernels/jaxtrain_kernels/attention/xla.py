"""Flash attention in plain XLA: O(T) memory, work only for visible blocks, any device.

Forward and backward follow FlashAttention-2 (arXiv:2307.08691): the forward saves the output and
the log-sum-exp (LSE) of each query, and the backward recomputes the probabilities of each block.
Up to `most_unrolled` query blocks are a Python loop with static key ranges: each block has one
softmax over its whole range. More blocks are XLA loops over (query block, key block) with an online
softmax. Statistics are float32 for any input dtype; matmul operands keep the input dtype.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.attention.call import Call, kept
from jaxtrain_kernels.dispatch import Target, target
from jaxtrain_kernels.shapes import AttentionShape

# Number of float32 scores that stay in a CPU core's cache between the passes over them (512 KiB).
CACHED_SCORES = 2**17
# Lower bound of the maxima: a query without keys has p = exp(-inf - FLOOR) = 0 instead of NaN.
FLOOR = -1e30


class Blocking(NamedTuple):
    """Query block sizes. Smaller blocks skip more of a causal mask, but compile longer and fill a
    device less."""

    query_blocks: int
    smallest: int
    largest: int
    most_unrolled: int


CPU_BLOCKING = Blocking(query_blocks=4, smallest=64, largest=256, most_unrolled=4)
ACCELERATOR_BLOCKING = Blocking(query_blocks=4, smallest=128, largest=1024, most_unrolled=8)


class ChunkPlan(NamedTuple):
    """Static parameters of one call; `rows` batch rows are processed at a time."""

    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    length: int
    block: int
    rows: int
    unroll: bool


def supports(target: Target, q_BTNH, call: Call) -> str | None:
    if not jnp.issubdtype(q_BTNH.dtype, jnp.floating):
        return f"needs a floating-point dtype, got {q_BTNH.dtype}"
    return None


def candidates(shape: AttentionShape) -> list[dict[str, Any]]:
    """Tilings worth measuring."""
    return [{"block": block} for block in (256, 512, 1024, 2048) if block <= shape.T]


def attention(q_BTNH, k_BSKH, v_BSKH, call: Call):
    """Backend of the public function; returns (out_BTNH, lse_BNT).

    deterministic: always so, because every sum has a fixed order.
    tiling: {"block": query and key block length}.
    """
    B, T, N, _ = q_BTNH.shape
    plan, ids = _plan(q_BTNH, call), _pair(call)
    q_BKGTH, k_BKSH, v_BKSH = _by_heads(q_BTNH, k_BSKH, v_BSKH)
    out_BKGTH, lse_BKGT = _flash(plan, q_BKGTH, k_BKSH, v_BKSH, ids)
    return _by_tokens(out_BKGTH), lse_BKGT.reshape(B, N, T)


def gradients(q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, dout_BTNH, call: Call):
    """Backend of the public `attention_gradients`."""
    plan, ids = _plan(q_BTNH, call), _pair(call)
    q, k, v = _by_heads(q_BTNH, k_BSKH, v_BSKH)
    out, dout = (_by_heads(x, k_BSKH, v_BSKH)[0] for x in (out_BTNH, dout_BTNH))
    lse = lse_BNT.reshape(q.shape[:-1])
    dq, dk, dv, _ = _flash_bwd(plan, (q, k, v, ids, out, lse), (dout, jnp.zeros_like(lse)))
    return _by_tokens(dq), dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)


def _plan(q_BTNH, call: Call) -> ChunkPlan:
    B, T, N, _ = q_BTNH.shape
    on_cpu = target().platform == "cpu"
    blocking = CPU_BLOCKING if on_cpu else ACCELERATOR_BLOCKING
    block = min(T, call.tiling["block"] if call.tiling else _default_block(T, blocking))
    rows = _rows_in_cache(B, N * block * T) if on_cpu else B
    unroll = T <= blocking.most_unrolled * block
    return ChunkPlan(call.causal, call.window, call.softcap, call.scale, T, block, rows, unroll)


def _pair(call: Call) -> Any:
    """(query segment ids, key segment ids), or None."""
    if (ids_BT := call.segment_ids_BT) is None:
        return None
    return ids_BT, ids_BT if call.key_segment_ids_BS is None else call.key_segment_ids_BS


def _by_heads(q_BTNH, k_BSKH, v_BSKH):
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    return q_BKGTH, k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)


def _by_tokens(x_BKGTH):
    B, K, G, T, H = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


def _default_block(T: int, blocking: Blocking) -> int:
    block = -(-T // blocking.query_blocks // blocking.smallest) * blocking.smallest
    return min(block, blocking.largest)


def _rows_in_cache(B: int, scores_per_row: int) -> int:
    """Largest divisor of B for which the scores of one query block stay in a CPU's cache."""
    most = max(1, CACHED_SCORES // scores_per_row)
    return max(rows for rows in range(1, min(most, B) + 1) if B % rows == 0)


def _flash_primal(plan, q_BKGTH, k_BKSH, v_BKSH, ids) -> tuple[jax.Array, jax.Array]:
    return _over_batch(plan, _forward_row, q_BKGTH, k_BKSH, v_BKSH, ids)


_flash = jax.custom_vjp(_flash_primal, nondiff_argnums=(0,))


def _flash_fwd(plan, q, k, v, ids):
    out, lse = kept(*_flash_primal(plan, q, k, v, ids))
    return (out, lse), (q, k, v, ids, out, lse)


def _flash_bwd(plan, residuals, cotangents):
    q, k, v, ids, out, lse = residuals
    dout, dlse = cotangents
    delta = jnp.sum(out.astype(lse.dtype) * dout.astype(lse.dtype), -1) - dlse
    # For a query without keys, any finite value: its scores are all -inf.
    lse = jnp.where(lse == -jnp.inf, 0, lse)
    dq, dk, dv = _over_batch(plan, _backward_row, q, k, v, ids, dout, lse, delta)
    return dq, dk, dv, None


_flash.defvjp(_flash_fwd, _flash_bwd)


def _over_batch(plan, row_function, *arrays) -> Any:
    """Map `row_function` over the batch; its arrays have no B dim."""
    function = functools.partial(row_function, plan)
    if plan.rows == len(arrays[0]):
        return jax.vmap(function)(*arrays)
    return lax.map(lambda row: function(*row), arrays, batch_size=plan.rows)


def _forward_row(plan, q_KGTH, k_KSH, v_KSH, ids):
    """Return (out_KGTH, lse_KGT) of one batch row."""
    if not plan.unroll:
        return _forward_loops(plan, q_KGTH, k_KSH, v_KSH, ids)
    pieces = []
    for t, t_end, s, s_end in _unrolled_blocks(plan):
        q = q_KGTH[:, :, t:t_end]
        state = _softmax_start(q)
        state = _softmax_add(plan, state, q, k_KSH[:, s:s_end], v_KSH[:, s:s_end], ids, t, s)
        pieces.append(_softmax_end(state, q.dtype))
    outs, lses = zip(*pieces)
    return jnp.concatenate(outs, 2), jnp.concatenate(lses, 2)


def _backward_row(plan, q_KGTH, k_KSH, v_KSH, ids, dout_KGTH, lse_KGT, delta_KGT):
    """Return (dq, dk, dv) of one batch row."""
    rows = (q_KGTH, dout_KGTH, lse_KGT, delta_KGT)
    if not plan.unroll:
        return _backward_loops(plan, rows, k_KSH, v_KSH, ids)
    dqs = []
    dk, dv = _wide_zeros(k_KSH), _wide_zeros(v_KSH)
    for t, t_end, s, s_end in _unrolled_blocks(plan):
        block = [x[:, :, t:t_end] for x in rows]
        dq, dk_s, dv_s = _block_gradients(
            plan, block, k_KSH[:, s:s_end], v_KSH[:, s:s_end], ids, t, s
        )
        dqs.append(dq.astype(q_KGTH.dtype))
        dk, dv = _add_at(dk, dk_s, s), _add_at(dv, dv_s, s)
    return jnp.concatenate(dqs, 2), dk.astype(k_KSH.dtype), dv.astype(v_KSH.dtype)


def _unrolled_blocks(plan) -> list[tuple[int, int, int, int]]:
    """(first query, end, first key, end) of each query block."""
    blocks = []
    for t in range(0, plan.length, plan.block):
        t_end = min(t + plan.block, plan.length)
        # Rounded down so that a GPU's matmuls stay aligned.
        s = 0 if plan.window is None else max(0, t - plan.window) // 64 * 64
        blocks.append((t, t_end, s, t_end if plan.causal else plan.length))
    return blocks


def _scores(plan, q_KGTH, k_KSH, ids, t, s):
    """Return the scores of the queries from t on with the keys from s on, -inf where masked.

    Also returns the softcap's derivative at each score (None without a softcap).
    """
    wide = jnp.promote_types(q_KGTH.dtype, jnp.float32)
    s_KGTS = jnp.einsum("KGTH,KSH->KGTS", q_KGTH, k_KSH, preferred_element_type=wide) * plan.scale
    slope = None
    if plan.softcap is not None:
        tanh = jnp.tanh(s_KGTS / plan.softcap)
        s_KGTS, slope = plan.softcap * tanh, 1 - tanh * tanh
    n_queries, n_keys = s_KGTS.shape[2:]
    t_T1 = t + jnp.arange(n_queries)[:, None]
    s_1S = s + jnp.arange(n_keys)[None]
    visible_TS = jnp.ones((n_queries, n_keys), bool)
    if plan.causal:
        visible_TS &= s_1S <= t_T1
    elif plan.length % plan.block:
        visible_TS &= s_1S < plan.length
    if plan.window is not None:
        visible_TS &= s_1S >= t_T1 - plan.window
    if ids is not None:
        ids_t = lax.dynamic_slice_in_dim(ids[0], t, n_queries)[:, None]
        ids_s = lax.dynamic_slice_in_dim(ids[1], s, n_keys)[None]
        visible_TS &= (ids_t == ids_s) & (ids_s > 0)
    return jnp.where(visible_TS[None, None], s_KGTS, -jnp.inf), slope


def _softmax_start(q_KGTH):
    """(row maximum, sum of exponentials, weighted sum of values) before any key."""
    out = _wide_zeros(q_KGTH)
    return jnp.full_like(out[..., 0], FLOOR), out[..., 0], out


def _softmax_add(plan, state, q_KGTH, k_KSH, v_KSH, ids, t, s):
    """Update the online softmax's state with the keys from s on."""
    peak, total, out = state
    s_KGTS, _ = _scores(plan, q_KGTH, k_KSH, ids, t, s)
    new_peak = jnp.maximum(peak, s_KGTS.max(-1))
    p_KGTS = jnp.exp(s_KGTS - new_peak[..., None])
    shrink = jnp.exp(peak - new_peak)
    pv = jnp.einsum(
        "KGTS,KSH->KGTH", p_KGTS.astype(v_KSH.dtype), v_KSH, preferred_element_type=out.dtype
    )
    return new_peak, total * shrink + p_KGTS.sum(-1), out * shrink[..., None] + pv


def _softmax_end(state, dtype):
    peak, total, out = state
    some = total > 0
    lse = jnp.where(some, peak + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    return (out / jnp.where(some, total, 1)[..., None]).astype(dtype), lse


def _block_gradients(plan, rows, k_KSH, v_KSH, ids, t, s):
    """(dq, dk, dv) in float32 of the queries from t on and the keys from s on."""
    q_KGTH, dout_KGTH, lse_KGT, delta_KGT = rows
    dot = functools.partial(jnp.einsum, preferred_element_type=lse_KGT.dtype)
    s_KGTS, slope = _scores(plan, q_KGTH, k_KSH, ids, t, s)
    p_KGTS = jnp.exp(s_KGTS - lse_KGT[..., None])
    ds_KGTS = p_KGTS * (dot("KGTH,KSH->KGTS", dout_KGTH, v_KSH) - delta_KGT[..., None])
    if slope is not None:
        ds_KGTS *= slope
    p_KGTS, ds_KGTS = p_KGTS.astype(q_KGTH.dtype), ds_KGTS.astype(q_KGTH.dtype)
    dv = dot("KGTS,KGTH->KSH", p_KGTS, dout_KGTH)
    dk = dot("KGTS,KGTH->KSH", ds_KGTS, q_KGTH) * plan.scale
    dq = dot("KGTS,KSH->KGTH", ds_KGTS, k_KSH) * plan.scale
    return dq, dk, dv


def _forward_loops(plan, q_KGTH, k_KSH, v_KSH, ids):
    b, n_blocks = plan.block, -(-plan.length // plan.block)
    q_KGTH, ids = _fill(plan, q_KGTH, 2), _fill(plan, ids, 0)
    k_KSH, v_KSH = _fill(plan, k_KSH, 1), _fill(plan, v_KSH, 1)

    def query_block(i):
        q = lax.dynamic_slice_in_dim(q_KGTH, i * b, b, 2)

        def key_block(j, state):
            k, v = (lax.dynamic_slice_in_dim(x, j * b, b, 1) for x in (k_KSH, v_KSH))
            return _softmax_add(plan, state, q, k, v, ids, i * b, j * b)

        state = lax.fori_loop(*_key_blocks(plan, i), key_block, _softmax_start(q))
        return _softmax_end(state, q.dtype)

    outs, lses = lax.map(query_block, jnp.arange(n_blocks))
    out_KGTH, lse_KGT = (_join_blocks(x, plan.length) for x in (outs, lses))
    return out_KGTH, lse_KGT


def _backward_loops(plan, rows, k_KSH, v_KSH, ids):
    b, n_blocks = plan.block, -(-plan.length // plan.block)
    rows, ids = [_fill(plan, x, 2) for x in rows], _fill(plan, ids, 0)
    k_KSH, v_KSH = _fill(plan, k_KSH, 1), _fill(plan, v_KSH, 1)

    def query_block(dkv, i):
        block = [lax.dynamic_slice_in_dim(x, i * b, b, 2) for x in rows]

        def key_block(j, gradients):
            dq, dk, dv = gradients
            k, v = (lax.dynamic_slice_in_dim(x, j * b, b, 1) for x in (k_KSH, v_KSH))
            dq_j, dk_j, dv_j = _block_gradients(plan, block, k, v, ids, i * b, j * b)
            return dq + dq_j, _add_at(dk, dk_j, j * b), _add_at(dv, dv_j, j * b)

        start = (_wide_zeros(block[0]), *dkv)
        dq, *dkv = lax.fori_loop(*_key_blocks(plan, i), key_block, start)
        return tuple(dkv), dq.astype(block[0].dtype)

    start = (_wide_zeros(k_KSH), _wide_zeros(v_KSH))
    (dk, dv), dqs = lax.scan(query_block, start, jnp.arange(n_blocks))
    dk, dv = (x[:, : plan.length].astype(k_KSH.dtype) for x in (dk, dv))
    return _join_blocks(dqs, plan.length), dk, dv


def _key_blocks(plan, i):
    """The range of key blocks that query block i (traced) sees."""
    first = 0 if plan.window is None else jnp.maximum(0, i * plan.block - plan.window) // plan.block
    return first, i + 1 if plan.causal else -(-plan.length // plan.block)


def _fill(plan, x, axis) -> Any:
    """Zero-pad x (an array, a pair or None) along `axis`, its T or S dim, to whole blocks."""
    missing = -plan.length % plan.block
    fill = lambda x: jnp.pad(x, [(0, missing if d == axis else 0) for d in range(x.ndim)])
    return jax.tree.map(fill, x)


def _join_blocks(x, length):
    """[blocks, K, G, block, ...] -> [K, G, length, ...]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :length]


def _add_at(total_KSH, part_KSH, s):
    """Add the part to the total's keys from s on."""
    old = lax.dynamic_slice_in_dim(total_KSH, s, part_KSH.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(total_KSH, old + part_KSH, s, 1)


def _wide_zeros(x):
    return jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32))
