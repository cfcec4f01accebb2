"""XLA backend for any device: XLA's RoPE and norm, then XLA's attention."""

import jax.numpy as jnp

from jaxtrain_kernels.attention import xla as attention
from jaxtrain_kernels.attention.call import Call
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.rows import xla as rows


def supports(target: Target, qkv_BTCH, call: Call) -> None:
    return None


def rope_attention(qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, heads, eps, call: Call):
    """Backend of the public function."""
    K = (qkv_BTCH.shape[2] - heads) // 2
    q_BTNH, k_BTKH, v_BTKH = jnp.split(qkv_BTCH, [heads, heads + K], axis=2)
    q_BTNH, k_BTKH = rows.rope_norm(q_BTNH, k_BTKH, cos_BTH, sin_BTH, eps=eps)
    v_BTKH = v_BTKH if value_BTKH is None else v_BTKH + value_BTKH
    return attention.attention(q_BTNH, k_BTKH, v_BTKH, call)[0]
