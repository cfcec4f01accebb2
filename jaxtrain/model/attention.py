"""Attention: project, rotate, normalise, attend, project back; with a KV cache when decoding."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import Fp8Input, Rotation
from jaxtyping import Array, Float, Int

from jaxtrain import parallel
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.fused_ops import rope_norm
from jaxtrain.model.init import SCHEMES, constant, uniform
from jaxtrain.model.kv_cache import KeysValues, LayerCache, PagesOfLayer
from jaxtrain.model.layers import (
    Rotary,
    branch_output,
    declare_bias,
    lookup,
    rms_norm,
    rotate,
)
from jaxtrain.model.plan import LayerSpec
from jaxtrain.model.sections import FusedOps
from jaxtrain.parallel import constrain
from jaxtrain.weights.contract import (
    DeferredNorm,
    PendingProduct,
    cast_input,
    dense_of,
    dequantize,
    input_amax,
    matmul_joined,
    reading,
)
from jaxtrain.weights.params import declare

GATE_CHANNELS = 12


class AttentionOptions(NamedTuple):
    """Masking and scaling of the scores; every attention backend takes these options.

    window: keys left of the query that stay visible; None: all. softcap: scores become
    softcap x tanh(score / softcap). scale: factor on q k. implementation: a backend's name.
    causal: keys right of the query are masked.
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
    """`parallel.attention`; zigzag: the sequence is sharded over the mesh's axis `context`."""
    more = dict(options._asdict(), zigzag=zigzag, return_lse=return_lse)
    return parallel.attention(q_BTNH, k_BTKH, v_BTKH, **more)


def takes_whole_rows(attend: Attend) -> bool:
    """Whether `attend` is `attend_rows` and no mesh axis shards the sequence."""
    return getattr(attend, "func", attend) is attend_rows and parallel.context_size() == 1


class LayerInputs(NamedTuple):
    """Inputs of every layer besides the residual stream. cast: the layer's normed input in float8,
    if its norm has cast it."""

    x0_BTD: Array
    tokens_BT: Array | None  # None for virtual tokens
    positions_BT: Array
    rope: Rotary | None
    short_rope: Rotary | None
    segments_BT: Array | None
    attend: Attend
    fused: FusedOps
    key: Array | None = None  # PRNG key of the step; None in evaluation
    cast: Fp8Input | None = None


def leading_channels(
    x_BTD: Float[Array, "B T D"], count: int
) -> tuple[Float[Array, "B T D"], Float[Array, "B T c"]]:
    """x itself and its first channels, whose gradient is added to x's in place.

    As a slice's gradient, XLA would add zeros to all other channels, a pass over the whole array.
    """
    both: Any = _leading_channels(x_BTD, count)
    return both


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _leading_channels(x_BTD: Array, count: int) -> tuple[Array, Array]:
    # Whole on each device: XLA would divide the channels, and exchange them by a
    # collective-permute, which a stage of a pipeline must not have.
    return x_BTD, constrain(x_BTD, "batch", "tokens", None)[..., :count]


def _leading_channels_backward(count: int, _: None, grads: tuple[Array, Array]) -> tuple[Array]:
    dx_BTD, first_BTc = grads
    return (dx_BTD.at[..., :count].set(dx_BTD[..., :count] + first_BTc),)


_leading_channels.defvjp(
    lambda x_BTD, count: (_leading_channels(x_BTD, count), None), _leading_channels_backward
)


class ValueEmbedding(nnx.Module):
    """Token embeddings added to the values of some layers through a gate (nanochat).

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
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T KH"]]:
        """Return x itself, which other readers take (see `leading_channels`), and what is added to
        the values."""
        gate_cK = dequantize(self.gate.get_value())
        x_BTD, x_BTc = leading_channels(x_BTD, gate_cK.shape[0])
        gate_BTK = 3 * jax.nn.sigmoid(x_BTc @ gate_cK)
        rows = lookup(self.table[...], tokens_BT)
        split = rows.reshape(*rows.shape[:2], gate_cK.shape[1], -1)
        return x_BTD, (gate_BTK[..., None] * split).reshape(rows.shape)


class KeyValueProjection(nnx.Module):
    """A layer's projections to keys and values; with `model.share_kv` only some layers have one."""

    def __init__(self, c: ResolvedModel, layers: int):
        scheme = SCHEMES[c.init](c)
        L, D, KH, Kh = layers, c.width, c.kv_heads * c.head_dim, c.kv_heads * c.qk_dim
        self.k = declare(
            (L, D, Kh), ("layers", "embed", "kv_heads"), scheme.qk, "matrix", head_dim=c.qk_dim
        )
        self.v = declare((L, D, KH), ("layers", "embed", "kv_heads"), scheme.v, "matrix")
        self.k_bias = declare_bias(L, Kh, "kv_heads") if c.qkv_bias else None
        self.v_bias = declare_bias(L, KH, "kv_heads") if c.qkv_bias else None
        self.k_gain = declare_head_gain(c, L) if c.qk_norm_gain else None

    def keys_values(
        self,
        product: Callable[[nnx.Param], Array],
        value_BTC: Float[Array, "B T C"] | None,
        heads: int,
    ) -> tuple[Float[Array, "B T K h"], Float[Array, "B T K H"]]:
        """Keys before norm and rope, and values, split into `heads` heads.

        product: multiplies the input by a matrix, and adds its bias."""
        k_BTC = product(self.k)
        B, T, _ = k_BTC.shape
        k_BTKH = k_BTC.reshape(B, T, heads, -1)
        v_BTC = product(self.v)
        if value_BTC is not None:
            v_BTC = v_BTC + value_BTC
        return k_BTKH, v_BTC.reshape(B, T, heads, -1)


def declare_head_gain(c: ResolvedModel, layers: int) -> nnx.Param:
    """Declare a learned scale per channel of a head, [L, H]."""
    return declare((layers, c.qk_dim), ("layers", None), constant(1.0), "gain")


class Attention(KeyValueProjection):
    """Multi-head, grouped-query or multi-query attention, depending on heads and kv_heads."""

    def __init__(self, c: ResolvedModel, layers: int):
        if c.share_kv is None:
            super().__init__(c, layers)
        scheme = SCHEMES[c.init](c)
        L, D, NH, Nh = layers, c.width, c.heads * c.head_dim, c.heads * c.qk_dim
        self.q = declare(
            (L, D, Nh), ("layers", "embed", "heads"), scheme.qk, "matrix", head_dim=c.qk_dim
        )
        self.out = declare((L, NH, D), ("layers", "heads", "embed"), scheme.attention_out, "matrix")
        self.q_bias = declare_bias(L, Nh, "heads") if c.qkv_bias else None
        self.out_bias = declare_bias(L, D, None) if c.out_bias else None
        self.q_gain = declare_head_gain(c, L) if c.qk_norm_gain else None
        self.config = c

    def input_amax(self) -> Array | None:
        """See `weights.contract.input_amax`; None if keys and values are another layer's."""
        return None if self.config.share_kv else input_amax(self.q, self.k, self.v)

    def readers(self, source: KeyValueProjection | KeysValues | None) -> tuple[nnx.Param, ...]:
        """Matrices of the input. source: as in `__call__`."""
        if isinstance(source, tuple):
            return (self.q,)
        project = source or self
        return self.q, project.k, project.v

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"] | DeferredNorm,
        spec: LayerSpec,
        inputs: LayerInputs,
        value_BTC: Float[Array, "B T C"] | None,
        cache: LayerCache | None,
        source: KeyValueProjection | KeysValues | None = None,
        residual_BTD: Float[Array, "B T D"] | PendingProduct | None = None,
    ) -> tuple[Float[Array, "B T D"] | PendingProduct, KeysValues | None]:
        """Return the output, and the keys and values of these tokens or, decoding, the new cache.

        source: with `model.share_kv`, the projection to keys and values, or another layer's k_BTKH
        and v_BTKH. When decoding, `cache` is that layer's and already contains these tokens.
        residual: added to the output by its matmul's kernel.
        """
        (B, T, _), kv = x_BTD.shape, None
        y_BTNH = None
        joined = inputs.fused.qkv not in (None, "xla") and takes_whole_rows(inputs.attend)
        if joined and cache is None and not source and not isinstance(x_BTD, DeferredNorm):
            y_BTNH = self.in_one_array(x_BTD, spec, inputs, value_BTC)
        if y_BTNH is None:
            y_BTNH, kv = self.in_three_arrays(x_BTD, spec, inputs, value_BTC, cache, source)
        y_BTC = y_BTNH.reshape(B, T, -1)
        return branch_output(y_BTC, self.out, self.out_bias, residual_BTD), kv

    def in_three_arrays(
        self,
        x_BTD: Float[Array, "B T D"] | DeferredNorm,
        spec: LayerSpec,
        inputs: LayerInputs,
        value_BTC: Float[Array, "B T C"] | None,
        cache: LayerCache | None,
        source: KeyValueProjection | KeysValues | None,
    ) -> tuple[Float[Array, "B T N H"], KeysValues | None]:
        """Heads before the output projection; keys and values as `__call__` returns them."""
        c = self.config
        B, T, _ = x_BTD.shape
        project = self if source is None or isinstance(source, tuple) else source
        # The amax of another layer's projections is not this layer's.
        cast = inputs.cast
        if cast is None and project is self and isinstance(x_BTD, Array):
            cast = cast_input(x_BTD, self.q)
        own = () if isinstance(source, tuple) else (project.k_bias, project.v_bias)
        biases = self.q_bias, *own
        product = dense_of(x_BTD, *self.readers(source), biases=biases, cast=cast)
        q_BTNH = product(self.q).reshape(B, T, c.heads, c.qk_dim)
        rope = inputs.short_rope if spec.short_rope else inputs.rope
        wide = max(c.qk_dim, c.head_dim)  # kernels take heads of one size
        if isinstance(source, tuple):  # already padded; not arrays if the cache is int8
            q_BTNH, kv = self.norm_and_rope(q_BTNH, rope, self.q_gain), source
        else:
            k_BTKH, v_BTKH = project.keys_values(product, value_BTC, c.kv_heads)
            new = k_BTKH, v_BTKH
            if rope is not None and isinstance(cache, PagesOfLayer) and cache.rotates(q_BTNH, new):
                q_BTNH, kv = cache.rope_append(q_BTNH, new, self.rotation(rope, project))
            else:
                if inputs.fused.rope == "xla":
                    q_BTNH = self.norm_and_rope(q_BTNH, rope, self.q_gain)
                    k_BTKH = self.norm_and_rope(k_BTKH, rope, project.k_gain)
                else:
                    q_BTNH, k_BTKH = rope_norm(q_BTNH, k_BTKH, rope, c.norm_eps, inputs.fused.rope)
                new = padded(k_BTKH, wide), padded(v_BTKH, wide)
                kv = new if cache is None else cache.append(new)
        q_BTNH = padded(q_BTNH, wide)
        # qk_scale multiplies queries and keys, so its square multiplies their product.
        scale = (c.qk_scale**2 if c.qk_norm else 1.0) / math.sqrt(c.qk_dim)
        scale = c.attention_scale or scale
        options = AttentionOptions(
            spec.window, inputs.segments_BT, c.attention_softcap, scale, c.attention,
            c.deterministic_attention, c.causal,
        )  # fmt: skip
        if cache is None:
            q_BTNH = constrain(q_BTNH, "batch", "tokens", "heads", None)
            k_BTKH, v_BTKH = kv
            assert isinstance(k_BTKH, Array) and isinstance(v_BTKH, Array)
            y_BTNH = inputs.attend(q_BTNH, k_BTKH, v_BTKH, options)
        else:
            # No layer attends beyond the trained context, so sequences of any length stay stable.
            window = spec.window or c.context_length + c.virtual - 1
            y_BTNH = cache.attend(q_BTNH, kv, window, c.attention_softcap, scale)
        return y_BTNH[..., : c.head_dim] if wide > c.head_dim else y_BTNH, kv

    def in_one_array(
        self,
        x_BTD: Float[Array, "B T D"],
        spec: LayerSpec,
        inputs: LayerInputs,
        value_BTC: Float[Array, "B T C"] | None,
    ) -> Float[Array, "B T N H"] | None:
        """Heads before the output projection, with q, k and v projected by one matmul. None if the
        weights' forms have their own matmuls (LoRA).
        """
        c, (B, T, _) = self.config, x_BTD.shape
        rope = inputs.short_rope if spec.short_rope else inputs.rope
        matrices = (reading(matrix, inputs.cast) for matrix in (self.q, self.k, self.v))
        product = matmul_joined(x_BTD, *matrices)
        if product is None or rope is None:
            return None
        qkv_BTCH = product.y.reshape(B, T, -1, c.head_dim)
        value_BTKH = None if value_BTC is None else value_BTC.reshape(B, T, c.kv_heads, -1)
        scale = c.attention_scale or c.qk_scale**2 / math.sqrt(c.qk_dim)
        cos_BTH, sin_BTH = (jax.lax.squeeze(x, [2]) for x in rope)
        return parallel.rope_attention(
            qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, inputs.segments_BT, heads=c.heads,
            eps=c.norm_eps, scale=scale, causal=c.causal, window=spec.window,
            softcap=c.attention_softcap, gradient=product.gradient,
            implementation=inputs.fused.qkv,
        )  # fmt: skip

    def rotation(self, rope: Rotary, project: KeyValueProjection) -> Rotation:
        """RoPE and norm of queries, and of the keys of `project`, for the kernel of pages."""
        cos_BTH, sin_BTH = (jax.lax.squeeze(x, [2]) for x in rope)
        eps = self.config.norm_eps if self.config.qk_norm else None
        gains = None
        if self.q_gain is not None and project.k_gain is not None:
            gains = self.q_gain[...], project.k_gain[...]
        return Rotation(cos_BTH, sin_BTH, eps, gains)

    def norm_and_rope(
        self, x_BTNH: Float[Array, "B T N H"], rope: Rotary | None, gain: nnx.Param | None
    ) -> Float[Array, "B T N H"]:
        """Norm and rotate queries or keys. A gain is per channel, so it precedes the rotation."""
        eps = self.config.norm_eps if self.config.qk_norm else None
        if eps is not None and (gain is not None or rope is None):
            x_BTNH = rms_norm(x_BTNH, None if gain is None else gain[...], eps=eps)
            eps = None
        return x_BTNH if rope is None else rotate(x_BTNH, rope, eps)


def padded(x_BTNH: Float[Array, "B T N H"], size: int) -> Float[Array, "B T N h"]:
    """Zero-pad each head's channels to `size`; products and sums do not change."""
    missing = size - x_BTNH.shape[-1]
    return jnp.pad(x_BTNH, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x_BTNH
