"""Attention's specification in plain jnp: any dtype, all scores in memory."""

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
    """x, whose gradient is rounded to `dtype`: it is the operand of two more matmuls."""
    return x


@_gradient_in.defjvp
def _(dtype, primals, tangents):
    # Linear, so that its transpose rounds the cotangent; and unlike two casts, kept by XLA.
    bits: Any = jnp.finfo(dtype)
    return primals[0], jax.lax.reduce_precision(tangents[0], bits.nexp, bits.nmant)


def attention(q_BTNH, k_BSKH, v_BSKH, call: Call):
    """As the public function; returns (out_BTNH, lse_BNT). Every result is repeatable."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=wide)
    s_BKGTS *= call.scale
    s_BKGTS: Any = _gradient_in(q_BTNH.dtype, s_BKGTS)
    if call.softcap is not None:
        s_BKGTS = call.softcap * jnp.tanh(s_BKGTS / call.softcap)
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
    visible = visible_BTS[:, None, None]
    # A query without keys: the double where keeps its gradient at 0 instead of NaN.
    some = visible.any(-1, keepdims=True)
    s_BKGTS = jnp.where(visible, s_BKGTS, jnp.where(some, -jnp.inf, 0.0))
    peak = s_BKGTS.max(-1, keepdims=True)
    p_BKGTS = jnp.exp(s_BKGTS - peak)
    sum_BKGT1 = p_BKGTS.sum(-1, keepdims=True)
    p_BKGTS = jnp.where(some, p_BKGTS / sum_BKGT1, 0.0).astype(v_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH, preferred_element_type=wide)
    lse_BKGT1 = jnp.where(some, peak + jnp.log(sum_BKGT1), -jnp.inf)
    return out_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype), lse_BKGT1.reshape(B, N, T)
