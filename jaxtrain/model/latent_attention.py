"""Multi-head latent attention (MLA; DeepSeek-V2, DeepSeek-AI 2024, arXiv:2405.04434).

    x -> latent c (RMS norm) -> keys and values of each head     no positions here
    x -> one rotated key r for all heads                         decoupled RoPE

A head's query and key have [nope, rope] channels, its value has `head_dim`. The cache holds only
(c, r). Decoding multiplies queries by the keys' up-projection, attends to the latents, and
up-projects the result to values. Training up-projects first and uses the kernels of `Attend`. Their
heads have one size, so the narrower of keys and values is zero-padded.
"""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtrain.model.attention import AttentionOptions, KeyValueProjection, LayerInputs, padded
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.init import SCHEMES, constant, fan_in
from jaxtrain.model.kv_cache import KeysValues, LayerCache
from jaxtrain.model.layers import branch_output, rms_norm, rotate
from jaxtrain.model.plan import LayerSpec
from jaxtrain.parallel import constrain
from jaxtrain.weights.contract import PendingProduct, dense, dequantize
from jaxtrain.weights.params import declare


class LatentAttention(nnx.Module):
    """Attention whose keys and values come from a latent of `model.mla.kv_rank` channels."""

    def __init__(self, c: ResolvedModel, layers: int):
        assert c.mla is not None
        scheme, m = SCHEMES[c.init](c), c.mla
        L, D, N, R, Q = layers, c.width, c.heads, m.kv_rank, m.q_rank
        nope = c.qk_dim - m.rope_dim
        wide = lambda size: declare((L, D, size), ("layers", "embed", None), scheme.qk, "matrix")
        # Latents are normed, so the up-projections are initialized with variance 1 / rank.
        up = lambda rank, size: declare(
            (L, rank, N * size), ("layers", None, "heads"), fan_in(), "matrix"
        )
        gain = lambda rank: declare((L, rank), ("layers", None), constant(1.0), "gain")
        if Q is None:
            self.q = declare(
                (L, D, N * c.qk_dim), ("layers", "embed", "heads"), scheme.qk, "matrix"
            )
        else:
            self.q_down, self.q_gain, self.q_up = wide(Q), gain(Q), up(Q, c.qk_dim)
        self.kv_down, self.kv_gain = wide(R + m.rope_dim), gain(R)
        self.k_up, self.v_up = up(R, nope), up(R, c.head_dim)
        self.out = declare(
            (L, N * c.head_dim, D), ("layers", "heads", "embed"), scheme.attention_out, "matrix"
        )
        self.config = c

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        spec: LayerSpec,
        inputs: LayerInputs,
        value_BTC: Float[Array, "B T C"] | None,
        cache: LayerCache | None,
        source: KeyValueProjection | KeysValues | None = None,
        residual_BTD: Float[Array, "B T D"] | PendingProduct | None = None,
    ) -> tuple[Float[Array, "B T D"] | PendingProduct, KeysValues]:
        """Return the output, and the latents joined with the rotated keys, [B, T, 1, R + r], of
        these tokens; when decoding, the updated cache instead. residual: added to the output."""
        c = self.config
        assert value_BTC is None and source is None and c.mla is not None
        B, T, _ = x_BTD.shape
        rope = inputs.short_rope if spec.short_rope else inputs.rope
        turned = lambda x_BTNr: x_BTNr if rope is None else rotate(x_BTNr, rope, None)
        nope, R = c.qk_dim - c.mla.rope_dim, c.mla.kv_rank
        q_BTNH = self.queries(x_BTD).reshape(B, T, c.heads, c.qk_dim)
        q_BTNn, q_BTNr = q_BTNH[..., :nope], turned(q_BTNH[..., nope:])
        down_BTC = dense(x_BTD, self.kv_down)
        latent_BTR = rms_norm(down_BTC[..., :R], self.kv_gain[...], eps=c.norm_eps)
        k_BT1r = turned(down_BTC[:, :, None, R:])
        joint_BT1C = jnp.concatenate([latent_BTR[:, :, None], k_BT1r], axis=-1)
        options = AttentionOptions(
            spec.window, inputs.segments_BT, c.attention_softcap,
            c.attention_scale or 1 / math.sqrt(c.qk_dim), c.attention, c.deterministic_attention,
            c.causal,
        )  # fmt: skip
        if cache is None:
            k_BTNn = dense(latent_BTR, self.k_up).reshape(B, T, c.heads, nope)
            v_BTNH = dense(latent_BTR, self.v_up).reshape(B, T, c.heads, c.head_dim)
            k_BTNr = jnp.broadcast_to(k_BT1r, (B, T, c.heads, c.mla.rope_dim))
            q_BTNH = jnp.concatenate([q_BTNn, q_BTNr], axis=-1)
            k_BTNH = jnp.concatenate([k_BTNn, k_BTNr], axis=-1)
            q_BTNH = constrain(q_BTNH, "batch", "tokens", "heads", None)
            wide = lambda x: padded(x, max(c.qk_dim, c.head_dim))
            y_BTNH = inputs.attend(wide(q_BTNH), wide(k_BTNH), wide(v_BTNH), options)
            y_BTNH, kv = y_BTNH[..., : c.head_dim], (joint_BT1C,)
        else:
            up = lambda param: dequantize(param.get_value()).reshape(R, c.heads, -1)
            q_BTNR = jnp.einsum("btnh,rnh->btnr", q_BTNn, up(self.k_up))
            q_BTNC = jnp.concatenate([q_BTNR, q_BTNr], axis=-1)
            kv = cache.append((joint_BT1C,))
            window, both = spec.window or c.context_length - 1, (*kv, *kv)
            y_BTNR = cache.attend(q_BTNC, both, window, c.attention_softcap, options.scale)[..., :R]
            y_BTNH = jnp.einsum("btnr,rnh->btnh", y_BTNR, up(self.v_up))
        return branch_output(y_BTNH.reshape(B, T, -1), self.out, None, residual_BTD), kv

    def queries(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T C"]:
        """Queries of all heads, projected directly or through their own latent."""
        if self.config.mla is None or self.config.mla.q_rank is None:
            return dense(x_BTD, self.q)
        latent_BTQ = dense(x_BTD, self.q_down)
        return dense(rms_norm(latent_BTQ, self.q_gain[...], eps=self.config.norm_eps), self.q_up)
