"""Attention: project, rotate, normalise, attend, project back; with a cache when decoding."""

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain import parallel
from jaxtrain.model.config import FusedOps, ResolvedModel
from jaxtrain.model.fused_ops import rope_norm
from jaxtrain.model.init import SCHEMES, constant, uniform
from jaxtrain.model.layers import Rotary, add_bias, declare_bias, lookup, rms_norm, rotate
from jaxtrain.model.plan import LayerSpec
from jaxtrain.parallel import constrain
from jaxtrain.weights.contract import dense, dequantize
from jaxtrain.weights.params import declare

GATE_CHANNELS = 12


CacheArray = Array | kernels.Quantized


class AttentionOptions(NamedTuple):
    """How scores are masked and computed: what every backend of attention takes.

    window: keys left of the query that stay visible; None is all. softcap: scores become
    softcap x tanh(score / softcap). scale: factor on q k. implementation: a backend's name.
    causal: keys right of the query are hidden.
    """

    window: int | None
    segments_BT: Array | None
    softcap: float | None
    scale: float
    implementation: str | None
    deterministic: bool
    causal: bool = True


@runtime_checkable
class Attend(Protocol):
    """Attention of q [B, T, N, H] over k, v [B, T, K, H]; with return_lse also [B, N, T]."""

    def __call__(
        self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, options: AttentionOptions,
        *, return_lse: bool = False,
    ) -> Any: ...  # fmt: skip


def attend_rows(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    options: AttentionOptions,
    *,
    return_lse: bool = False,
    zigzag: bool = False,
) -> Any:
    """`parallel.attention`; zigzag: the text is split over the mesh's axis `context`."""
    more = dict(options._asdict(), zigzag=zigzag, return_lse=return_lse)
    return parallel.attention(q_BTNH, k_BTKH, v_BTKH, **more)


class LayerInputs(NamedTuple):
    """What every layer reads besides the residual stream."""

    x0_BTD: Array
    tokens_BT: Array | None  # of virtual tokens, none
    positions_BT: Array
    rope: Rotary | None
    short_rope: Rotary | None
    segments_BT: Array | None
    attend: Attend
    fused: FusedOps
    key: Array | None = None  # of the step; None in evaluation


class LayerCache(NamedTuple):
    """Keys and values of one layer; row b is valid below lengths_B[b], this token included."""

    k_BSKH: CacheArray
    v_BSKH: CacheArray
    lengths_B: Array


class Cache(NamedTuple):
    """What decoding keeps: keys and values per layer, and of each row's last token the embedding
    (for the smear) and the id (for `model.bigram_rows`)."""

    kv: tuple[tuple[CacheArray, CacheArray], ...]  # k_BSKH, v_BSKH of each layer
    lengths_B: Array
    last_BD: Array
    last_B: Array


def init_kv_cache(x_BTKH: Float[Array, "B T K H"], capacity: int, dtype: str | None) -> CacheArray:
    """The start of a cache with room for `capacity` tokens; dtype: int8, or None as it is."""
    x_BSKH = jnp.pad(x_BTKH, ((0, 0), (0, capacity - x_BTKH.shape[1]), (0, 0), (0, 0)))
    return x_BSKH if dtype is None else kernels.quantize(x_BSKH)


def append(
    cache: CacheArray, x_B1KH: Float[Array, "B 1 K H"], lengths_B: Int[Array, "B"]
) -> CacheArray:
    """The cache with one more token a row, its last."""
    new = kernels.quantize(x_B1KH) if isinstance(cache, kernels.Quantized) else x_B1KH
    rows = jnp.arange(x_B1KH.shape[0])
    put = lambda old, x: old.at[rows, lengths_B - 1].set(x[:, 0])
    return jax.tree.map(put, cache, new)


class ValueEmbedding(nnx.Module):
    """Token embeddings that join the values of some layers through a gate (nanochat).

    The gate reads the first channels of the layer's input: v += 3 sigmoid(x[:12] g) e[token].
    """

    def __init__(self, c: ResolvedModel, vocab: int, layers: int):
        L, K, KH = layers, c.kv_heads, c.kv_heads * c.head_dim
        channels = min(GATE_CHANNELS, c.width)
        self.table = declare(
            (L, vocab, KH), ("layers", "vocab", "embed"), SCHEMES[c.init](c).value_embed,
            "embedding", group="value_embedding", dtype=c.embedding_dtype,
        )  # fmt: skip
        self.gate = declare(
            (L, channels, K), ("layers", None, "kv_heads"), uniform(0.0, 0.02), "matrix",
            group="value_gate",
        )  # fmt: skip

    def __call__(
        self, x_BTD: Float[Array, "B T D"], tokens_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T KH"]:
        gate_cK = dequantize(self.gate.get_value())
        gate_BTK = 3 * jax.nn.sigmoid(x_BTD[..., : gate_cK.shape[0]] @ gate_cK)
        rows = lookup(self.table[...], tokens_BT)
        split = rows.reshape(*rows.shape[:2], gate_cK.shape[1], -1)
        return (gate_BTK[..., None] * split).reshape(rows.shape)


class Attention(nnx.Module):
    """Multi-head, grouped-query or multi-query attention, as heads and kv_heads say."""

    def __init__(self, c: ResolvedModel, layers: int):
        scheme = SCHEMES[c.init](c)
        L, D, NH, KH = layers, c.width, c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q = declare((L, D, NH), ("layers", "embed", "heads"), scheme.qk, "matrix")
        self.k = declare((L, D, KH), ("layers", "embed", "kv_heads"), scheme.qk, "matrix")
        self.v = declare((L, D, KH), ("layers", "embed", "kv_heads"), scheme.v, "matrix")
        self.out = declare((L, NH, D), ("layers", "heads", "embed"), scheme.attention_out, "matrix")
        self.q_bias = declare_bias(L, NH, "heads") if c.qkv_bias else None
        self.k_bias = declare_bias(L, KH, "kv_heads") if c.qkv_bias else None
        self.v_bias = declare_bias(L, KH, "kv_heads") if c.qkv_bias else None
        self.out_bias = declare_bias(L, D, None) if c.out_bias else None
        gain = lambda: declare((L, c.head_dim), ("layers", None), constant(1.0), "gain")
        self.q_gain = gain() if c.qk_norm_gain else None
        self.k_gain = gain() if c.qk_norm_gain else None
        self.config = c

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        spec: LayerSpec,
        inputs: LayerInputs,
        value_BTC: Float[Array, "B T C"] | None,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "B T D"], tuple[CacheArray, CacheArray]]:
        """Returns the output and the keys and values: of these tokens, or the updated cache."""
        c = self.config
        B, T, _ = x_BTD.shape
        q_BTNH = add_bias(dense(x_BTD, self.q), self.q_bias).reshape(B, T, c.heads, c.head_dim)
        k_BTKH = add_bias(dense(x_BTD, self.k), self.k_bias).reshape(B, T, c.kv_heads, c.head_dim)
        v_BTC = add_bias(dense(x_BTD, self.v), self.v_bias)
        if value_BTC is not None:
            v_BTC = v_BTC + value_BTC
        v_BTKH = v_BTC.reshape(B, T, c.kv_heads, c.head_dim)
        rope = inputs.short_rope if spec.short_rope else inputs.rope
        if inputs.fused.rope == "xla":
            q_BTNH = self.norm_and_rope(q_BTNH, rope, self.q_gain)
            k_BTKH = self.norm_and_rope(k_BTKH, rope, self.k_gain)
        else:
            q_BTNH, k_BTKH = rope_norm(q_BTNH, k_BTKH, rope, c.norm_eps, inputs.fused.rope)
        # The factor on queries and on keys is one factor on their product.
        scale = (c.qk_scale**2 if c.qk_norm else 1.0) / math.sqrt(c.head_dim)
        scale = c.attention_scale or scale
        options = AttentionOptions(
            spec.window, inputs.segments_BT, c.attention_softcap, scale, c.attention,
            c.deterministic_attention, c.causal,
        )  # fmt: skip
        if cache is None:
            q_BTNH = constrain(q_BTNH, "batch", "tokens", "heads", None)
            y_BTNH, kv = inputs.attend(q_BTNH, k_BTKH, v_BTKH, options), (k_BTKH, v_BTKH)
        else:
            # No layer looks back further than the trained context: text of any length stays stable.
            window = spec.window or c.context_length + c.virtual - 1
            y_BTNH, kv = decode(q_BTNH, k_BTKH, v_BTKH, cache, options._replace(window=window))
        return add_bias(dense(y_BTNH.reshape(B, T, -1), self.out), self.out_bias), kv

    def norm_and_rope(
        self, x_BTNH: Float[Array, "B T N H"], rope: Rotary | None, gain: nnx.Param | None
    ) -> Float[Array, "B T N H"]:
        """Queries or keys normed and rotated. A gain is per channel: it comes before the turn."""
        eps = self.config.norm_eps if self.config.qk_norm else None
        if eps is not None and (gain is not None or rope is None):
            x_BTNH = rms_norm(x_BTNH, None if gain is None else gain[...], eps=eps)
            eps = None
        return x_BTNH if rope is None else rotate(x_BTNH, rope, eps)


def decode(
    q_B1NH: Float[Array, "B 1 N H"],
    k_B1KH: Float[Array, "B 1 K H"],
    v_B1KH: Float[Array, "B 1 K H"],
    cache: LayerCache,
    options: AttentionOptions,
) -> tuple[Float[Array, "B 1 N H"], tuple[CacheArray, CacheArray]]:
    """Append one token a row to the cache; attend to the last `window` tokens and itself."""
    k_BSKH = append(cache.k_BSKH, k_B1KH, cache.lengths_B)
    v_BSKH = append(cache.v_BSKH, v_B1KH, cache.lengths_B)
    assert options.window is not None
    y_BNH = kernels.decode_attention(
        q_B1NH[:, 0], k_BSKH, v_BSKH, cache.lengths_B, window=options.window,
        softcap=options.softcap, scale=options.scale,
    )  # fmt: skip
    return y_BNH[:, None], (k_BSKH, v_BSKH)
