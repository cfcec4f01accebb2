"""Reference implementation of attention in plain jnp: any dtype, all scores in memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain_kernels.attention.call import Call
from jaxtrain_kernels.dispatch import Target


def supports(target: Target, q_BTNH, call: Call) -> str | None:
    if not jnp.issubdtype(q_BTNH.dtype, jnp.floating):
        return f"needs a floating-point dtype, got {q_BTNH.dtype}"
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradient_in(dtype, x):
    """Identity whose gradient is rounded to `dtype`: the gradient is an operand of two matmuls."""
    return x


@_gradient_in.defjvp
def _(dtype, primals, tangents):
    # Linear, so that its transpose rounds the cotangent. XLA keeps it, unlike a pair of casts.
    bits: Any = jnp.finfo(dtype)
    return primals[0], jax.lax.reduce_precision(tangents[0], bits.nexp, bits.nmant)


def attention(q_BTNH, k_BSKH, v_BSKH, call: Call):
    """Backend of the public function; returns (out_BTNH, lse_BNT), always deterministic."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=wide)
    s_BKGTS *= call.scale
    s_BKGTS: Any = _gradient_in(q_BTNH.dtype, s_BKGTS)
    if call.softcap is not None:
        s_BKGTS = call.softcap * jnp.tanh(s_BKGTS / call.softcap)
    visible = _visible(B, T, call)
    # For a query without keys, the double `where` makes its gradient 0 instead of NaN.
    some = visible.any(-1, keepdims=True)
    s_BKGTS = jnp.where(visible, s_BKGTS, jnp.where(some, -jnp.inf, 0.0))
    peak = s_BKGTS.max(-1, keepdims=True)
    p_BKGTS = jnp.exp(s_BKGTS - peak)
    sum_BKGT1 = p_BKGTS.sum(-1, keepdims=True)
    p_BKGTS = jnp.where(some, p_BKGTS / sum_BKGT1, 0.0).astype(v_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH, preferred_element_type=wide)
    lse_BKGT1 = jnp.where(some, peak + jnp.log(sum_BKGT1), -jnp.inf)
    return out_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype), lse_BKGT1.reshape(B, N, T)


def gradients(q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, dout_BTNH, call: Call):
    """Backend of the public `attention_gradients`: the softmax's derivative, written out."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    by_group = lambda x: x.astype(wide).reshape(B, T, K, N // K, H)
    q_BTKGH, out_BTKGH, dout_BTKGH = map(by_group, (q_BTNH, out_BTNH, dout_BTNH))
    k_BSKH, v_BSKH = k_BSKH.astype(wide), v_BSKH.astype(wide)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH) * call.scale
    slope_BKGTS = 1.0
    if call.softcap is not None:
        tanh_BKGTS = jnp.tanh(s_BKGTS / call.softcap)
        s_BKGTS, slope_BKGTS = call.softcap * tanh_BKGTS, 1 - tanh_BKGTS**2
    lse_BKGT1 = lse_BNT.reshape(B, K, N // K, T, 1)
    visible = _visible(B, T, call) & jnp.isfinite(lse_BKGT1)
    p_BKGTS = jnp.where(visible, jnp.exp(s_BKGTS - jnp.where(visible, lse_BKGT1, s_BKGTS)), 0.0)
    dp_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", dout_BTKGH, v_BSKH)
    delta_BKGT1 = jnp.einsum("BTKGH,BTKGH->BKGT", dout_BTKGH, out_BTKGH)[..., None]
    ds_BKGTS = p_BKGTS * (dp_BKGTS - delta_BKGT1) * slope_BKGTS * call.scale
    dq_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", ds_BKGTS, k_BSKH)
    dk_BSKH = jnp.einsum("BKGTS,BTKGH->BSKH", ds_BKGTS, q_BTKGH)
    dv_BSKH = jnp.einsum("BKGTS,BTKGH->BSKH", p_BKGTS, dout_BTKGH)
    dtype = q_BTNH.dtype
    return (
        dq_BTKGH.reshape(q_BTNH.shape).astype(dtype),
        dk_BSKH.astype(dtype),
        dv_BSKH.astype(dtype),
    )


def decode_attention(q_BNH, k_BSKH, v_BSKH, lengths_B, *, window, softcap, scale):
    """Backend of the public `decode_attention`, for unquantized keys and values."""
    B, N, H = q_BNH.shape
    S, K = k_BSKH.shape[1:3]
    wide = jnp.promote_types(q_BNH.dtype, jnp.float32)
    q_BKGH = q_BNH.astype(wide).reshape(B, K, N // K, H)
    s_BKGS = jnp.einsum("BKGH,BSKH->BKGS", q_BKGH, k_BSKH.astype(wide)) * scale
    if softcap is not None:
        s_BKGS = softcap * jnp.tanh(s_BKGS / softcap)
    visible_BS = jnp.arange(S)[None] < lengths_B[:, None]
    if window is not None:
        visible_BS &= jnp.arange(S)[None] >= lengths_B[:, None] - 1 - window
    visible = visible_BS[:, None, None]
    p_BKGS = jax.nn.softmax(s_BKGS, axis=-1, where=visible)
    out_BKGH = jnp.einsum("BKGS,BSKH->BKGH", p_BKGS, v_BSKH.astype(wide))
    return out_BKGH.reshape(B, N, H).astype(q_BNH.dtype)


def paged_attention(
    q_BTNH, k_PpKH, v_PpKH, table_BW, starts_B, counts_B, *, window, softcap, scale
):
    """Backend of the public `paged_attention`."""
    B, T, N, H = q_BTNH.shape
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)

    def rows(pages):
        if isinstance(pages, tuple):  # 8-bit values and scales
            pages = pages[0].astype(wide) * pages[1][..., None]
        return pages[table_BW].reshape(B, -1, *pages.shape[2:]).astype(wide)

    k_BSKH, v_BSKH = rows(k_PpKH), rows(v_PpKH)
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.astype(wide).reshape(B, T, K, N // K, H)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH) * scale
    if softcap is not None:
        s_BKGTS = softcap * jnp.tanh(s_BKGTS / softcap)
    position_BS = jnp.broadcast_to(jnp.arange(S)[None], (B, S))
    visible = visible_pages(position_BS, T, starts_B, counts_B, window)
    p_BKGTS = jax.nn.softmax(s_BKGTS, axis=-1, where=visible)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH)
    return out_BTKGH.reshape(B, T, N, -1).astype(q_BTNH.dtype)


def visible_pages(position_BS, T: int, starts_B, counts_B, window: int | None):
    """Mask [B, 1, 1, T, S] of the keys, given by their positions, that each new token sees."""
    place_BT1 = (starts_B[:, None] + jnp.arange(T)[None])[..., None]
    visible_BTS = position_BS[:, None] <= place_BT1
    if window is not None:
        visible_BTS &= position_BS[:, None] >= place_BT1 - window
    visible_BTS &= (jnp.arange(T)[None] < counts_B[:, None])[..., None]
    return visible_BTS[:, None, None]


def _visible(B: int, T: int, call: Call):
    """Mask [B, 1, 1, T, S] of the keys that each query sees."""
    t_T1, s_1S = jnp.arange(T)[:, None], jnp.arange(T)[None]
    visible_BTS = jnp.ones((B, T, T), bool)
    if call.causal:
        visible_BTS &= (s_1S <= t_T1)[None]
    if call.window is not None:
        visible_BTS &= (s_1S >= t_T1 - call.window)[None]
    if (ids_BT := call.segment_ids_BT) is not None:
        keys_BS = ids_BT if call.key_segment_ids_BS is None else call.key_segment_ids_BS
        visible_BTS &= ids_BT[:, :, None] == keys_BS[:, None, :]
        visible_BTS &= keys_BS[:, None, :] > 0
    return visible_BTS[:, None, None]
