"""The plain Transformer's layers in a few lines, to compare sharing and latent attention with."""

import jax
import jax.numpy as jnp

from jaxtrain.model.layers import rms_norm

# No feature but attention and the gated network: what the lines below have.
PLAIN = {
    "depth": 4, "width": 32, "head_dim": 8, "heads": 4, "hidden": 48, "ffn": "swiglu",
    "window_pattern": "L", "qk_norm": False, "embed_norm": False, "tied_head": True,
    "logit_softcap": None, "value_embeddings": False, "residual_scales": False, "smear": False,
    "backout": False,
}  # fmt: skip


def states_by_hand(c, params, rows, attend):
    """attend(i, h_BTD) -> what layer i's heads put out, [B, T, N x H]."""
    x, blocks = params["embed"][rows], params["blocks"]
    for i in range(c.depth):
        layer = jax.tree.map(lambda w, i=i: w[i], blocks)
        x = x + attend(i, rms_norm(x, eps=c.norm_eps)) @ layer["attention"]["out"]
        h, ffn = rms_norm(x, eps=c.norm_eps), layer["ffn"]
        x = x + (jax.nn.silu(h @ ffn["gate"]) * (h @ ffn["up"])) @ ffn["down"]
    return rms_norm(x, eps=c.norm_eps)


def causal_attention(q, k, v, scale):
    """softmax(scale q k) v of heads [B, T, N, H], each token over those up to it; [B, T, N x H]."""
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", shares, v).reshape(*q.shape[:2], -1)
