"""Attention of one new token a row against a key/value cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def decode_attention(
    q_BNH: Float[Array, "B N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    lengths_B: Int[Array, "B"],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "B N H"]:
    """One query a row, at position lengths_B - 1, over the cache's keys [0, lengths_B).

    window, softcap and scale as in `attention`. A row of length 0 (an idle slot) gives 0.
    """
    (B, N, H), (S, K) = q_BNH.shape, k_BSKH.shape[1:3]
    wide = jnp.promote_types(q_BNH.dtype, jnp.float32)
    q_BKGH = q_BNH.reshape(B, K, N // K, H)
    s_BKGS = jnp.einsum("BKGH,BSKH->BKGS", q_BKGH, k_BSKH, preferred_element_type=wide)
    s_BKGS *= H**-0.5 if scale is None else scale
    if softcap is not None:
        s_BKGS = softcap * jnp.tanh(s_BKGS / softcap)
    position_1S, length_B1 = jnp.arange(S)[None], lengths_B[:, None]
    visible_BS = position_1S < length_B1
    if window is not None:
        visible_BS &= position_1S >= length_B1 - 1 - window
    s_BKGS = jnp.where(visible_BS[:, None, None], s_BKGS, -jnp.inf)
    # A finite floor under the maximum gives an idle row p = exp(-inf) = 0 instead of NaN.
    p_BKGS = jnp.exp(s_BKGS - jnp.maximum(s_BKGS.max(-1, keepdims=True), -1e30))
    total_BKG1 = p_BKGS.sum(-1, keepdims=True)
    p_BKGS = (p_BKGS / jnp.where(total_BKG1 == 0, 1, total_BKG1)).astype(v_BSKH.dtype)
    out_BKGH = jnp.einsum("BKGS,BSKH->BKGH", p_BKGS, v_BSKH, preferred_element_type=wide)
    return out_BKGH.reshape(B, N, H).astype(q_BNH.dtype)
