"""The Transformer: embed, layers as the plan says, norm. One for all families.

Parameters of equal layers are stored stacked, `[L, in, out]`, whether the layers are unrolled or
scanned; the modules only declare them and compute. `hidden` returns the normed last states; the
head is applied by the loss (never the whole logits) or, for a few positions, by `logits`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain.model.attention import Attention, Kept, LayerCache, ValueEmbedding, kept_from
from jaxtrain.model.branches import Branches, take_before
from jaxtrain.model.config import ResolvedModel, round_up
from jaxtrain.model.init import SCHEMES, constant, uniform
from jaxtrain.model.layers import FeedForward, Rotary, layer_norm, lookup, rms_norm, rotary
from jaxtrain.model.params import declare
from jaxtrain.model.plan import LayerSpec, make_plan, segments
from jaxtrain.model.rows import PLAIN, Rows, Stream, enter, join, leave
from jaxtrain.parallel import constrain

SMEAR_CHANNELS = 24


class Cache(NamedTuple):
    """What decoding keeps: keys and values per layer, and the last embedding (for the smear)."""

    kv: tuple[tuple[Kept, Kept], ...]  # k_BSKH, v_BSKH of each layer
    lengths_B: Array
    last_BD: Array


class LayerInputs(NamedTuple):
    """What every layer reads besides the stream."""

    x0_BTD: Array
    tokens_BT: Array
    rope: Rotary | None
    short_rope: Rotary | None
    segments_BT: Array | None
    branches: Branches | None
    rows: Rows


class Block(nnx.Module):
    """Attention and feed-forward, each on the normed stream and added to it."""

    def __init__(self, c: ResolvedModel, layers: int):
        self.attention = Attention(c, layers)
        self.ffn = FeedForward(c, layers)
        self.config = c
        start = SCHEMES[c.init](c).branch_scale
        if start is None:
            self.attention_scale = self.ffn_scale = None
        else:
            scale = lambda: declare(
                (layers,), ("layers",), constant(start), "scalar", group="residual_scale"
            )
            self.attention_scale, self.ffn_scale = scale(), scale()
        self.attention_gain, self.attention_shift = declare_norm(c, (layers,))
        self.ffn_gain, self.ffn_shift = declare_norm(c, (layers,))
        post = lambda: declare_norm(c, (layers,)) if c.post_norm else (None, None)
        self.attention_post_gain, self.attention_post_shift = post()
        self.ffn_post_gain, self.ffn_post_shift = post()

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        spec: LayerSpec,
        rope: Rotary | None,
        value: tuple[ValueEmbedding, Array] | None,
        segments_BT: Int[Array, "B T"] | None,
        cache: LayerCache | None = None,
        branches: Branches | None = None,
        rows: Rows = PLAIN,
        h_BTD: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], tuple[Kept, Kept]]:
        """The stream after attention, what the feed-forward adds to it, and keys and values.

        h_BTD: the normed stream, where it is known.
        """
        if h_BTD is None:
            h_BTD = self.read(x_BTD, self.attention_gain, self.attention_shift)
        value_BTC = None if value is None else value[0](h_BTD, value[1])
        y_BTD, kept = self.attention(
            h_BTD, spec, rope, value_BTC, segments_BT, cache, branches, rows.rope
        )
        y_BTD = self.put(y_BTD, self.attention_post_gain, self.attention_post_shift)
        y_BTD = scaled(y_BTD, self.attention_scale)
        if rows.norm is None:
            x_BTD = x_BTD + y_BTD
            h_BTD = self.read(x_BTD, self.ffn_gain, self.ffn_shift)
        else:
            x_BTD, h_BTD = join(x_BTD, y_BTD, self.config.norm_eps, rows.norm)
        y_BTD = self.ffn(h_BTD, rows.relu2, rows.ffn)
        y_BTD = self.put(y_BTD, self.ffn_post_gain, self.ffn_post_shift)
        return x_BTD, scaled(y_BTD, self.ffn_scale), kept

    def read(self, x_BTD: Float[Array, "B T D"], gain: Any, shift: Any) -> Float[Array, "B T D"]:
        """What a branch sees of the stream."""
        return normed(self.config, x_BTD, gain, shift) if self.config.block_norm else x_BTD

    def put(self, y_BTD: Float[Array, "B T D"], gain: Any, shift: Any) -> Float[Array, "B T D"]:
        """What a branch adds to the stream."""
        return normed(self.config, y_BTD, gain, shift) if self.config.post_norm else y_BTD


def declare_norm(c: ResolvedModel, stack: tuple[int, ...]) -> tuple[Any, Any]:
    """The gain and the shift of a norm, [*stack, D], or None where there is none."""
    axes = (*("layers" for _ in stack), None)
    vector = lambda start, group: declare(
        (*stack, c.width), axes, constant(start), "gain", group=group
    )
    gain = vector(1.0, "gain") if c.norm_gain else None
    return gain, vector(0.0, "bias") if c.norm_gain and c.norm == "layer" else None


def normed(
    c: ResolvedModel, x: Float[Array, "*B D"], gain: Any, shift: Any
) -> Float[Array, "*B D"]:
    """The norm that the configuration names."""
    gain_D = None if gain is None else gain[...]
    if c.norm == "rms":
        return rms_norm(x, gain_D, eps=c.norm_eps)
    return layer_norm(x, gain_D, None if shift is None else shift[...], eps=c.norm_eps)


def scaled(y_BTD: Array, scale: Any) -> Array:
    """A branch times its learned scale if there is one."""
    return y_BTD if scale is None else (scale[...] * y_BTD).astype(y_BTD.dtype)


class Transformer(nnx.Module):
    """tokens -> states -> logits, with every architectural switch of ModelConfig."""

    def __init__(self, c: ResolvedModel, vocab_size: int):
        L, D = c.depth, c.width
        scheme = SCHEMES[c.init](c)
        vocab = round_up(vocab_size, c.vocab_multiple)
        self.config, self.vocab_size, self.plan = c, vocab_size, make_plan(c)
        self.embed = declare(
            (vocab, D), ("vocab", "embed"), scheme.embed, "embedding", dtype=c.embedding_dtype
        )
        self.blocks = Block(c, L)
        valued = sum(spec.value_embed for spec in self.plan)
        self.value_embed = ValueEmbedding(c, vocab, valued) if valued else None
        if c.residual_scales:
            ramp = np.arange(L) / max(L - 1, 1)
            stack = lambda start, fall, group: declare(
                (L,), ("layers",), constant(start - fall * ramp), "scalar", group=group
            )
            self.residual_scale = stack(1.15, 0.10, "residual_scale")
            self.x0_scale = stack(0.20, 0.15, "x0_scale")
        if c.smear:
            channels = min(SMEAR_CHANNELS, D)
            self.smear_gate = declare(
                (channels,), (None,), uniform(0.0, 0.02), "scalar", group="mix"
            )
            self.smear_scale = declare((), (), constant(0.0), "scalar", group="mix")
        if c.backout:
            self.backout_scale = declare((), (), constant(0.2), "scalar", group="mix")
        self.final_gain, self.final_shift = declare_norm(c, ())
        self.position_embed = (
            declare(
                (c.context, D), (None, "embed"), scheme.embed, "embedding", dtype=c.embedding_dtype
            )
            if c.positions == "learned"
            else None
        )
        self.head = (
            None if c.tied_head else declare((D, vocab), ("embed", "vocab"), scheme.head, "head")
        )

    def head_DV(self) -> Float[Array, "D V"]:
        """The head's matrix; columns from `vocab_size` on are padding."""
        return self.embed[...].T if self.head is None else self.head[...]

    def logits(self, x_BD: Float[Array, "B D"]) -> Float[Array, "B v"]:
        """Float32 logits of a few states (generation); v is the vocabulary without padding."""
        logits_BV = (x_BD @ self.head_DV())[:, : self.vocab_size].astype(jnp.float32)
        cap = self.config.softcap
        return logits_BV if cap is None else cap * jnp.tanh(logits_BV / cap)

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Normed last states; what the loss multiplies with the head."""
        segments_BT = segments_BT if self.config.document_mask else None
        return self.hidden_apart(tokens_BT, positions_BT, segments_BT)

    def hidden_apart(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"] | None,
        segments_BT: Int[Array, "B T"] | None,
        branches: Branches | None = None,
    ) -> Float[Array, "B T D"]:
        """The same, with the segments kept apart whatever `document_mask` says."""
        x_BTD, _ = self.embed_tokens(tokens_BT, None, segments_BT, branches)
        x_BTD, _ = self.run_layers(x_BTD, tokens_BT, positions_BT, segments_BT, branches=branches)
        return x_BTD

    def prefill(
        self,
        tokens_BT: Int[Array, "B T"],
        lengths_B: Int[Array, "B"],
        capacity: int,
        cache_dtype: str | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Read prompts padded on the right; the state at each one's end, and the filled cache.

        cache_dtype: int8, or None to keep keys and values as they are computed.
        """
        rows, ends = jnp.arange(tokens_BT.shape[0]), lengths_B - 1
        x_BTD, plain_BTD = self.embed_tokens(tokens_BT, None)
        x_BTD, kv = self.run_layers(x_BTD, tokens_BT, keep_kv=True)
        keep = lambda x: kept_from(x, capacity, cache_dtype)
        layers = tuple((keep(k), keep(v)) for k, v in kv)
        return x_BTD[rows, ends], Cache(layers, lengths_B, plain_BTD[rows, ends])

    def decode(self, tokens_B: Int[Array, "B"], cache: Cache) -> tuple[Float[Array, "B D"], Cache]:
        """Append one token to each row; its last state, and the cache one token longer."""
        tokens_B1, lengths_B = tokens_B[:, None], cache.lengths_B + 1
        x_B1D, plain_B1D = self.embed_tokens(tokens_B1, cache.last_BD)
        longer = cache._replace(lengths_B=lengths_B)
        x_B1D, kv = self.run_layers(x_B1D, tokens_B1, (lengths_B - 1)[:, None], cache=longer)
        return x_B1D[:, 0], Cache(tuple(kv), lengths_B, plain_B1D[:, 0])

    def embed_tokens(
        self,
        tokens_BT: Int[Array, "B T"],
        previous_BD: Float[Array, "B D"] | None,
        segments_BT: Int[Array, "B T"] | None = None,
        branches: Branches | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Embeddings with and without the smear; `previous_BD` stands before the first token.

        With segments, the first token of a document takes nothing from the document before.
        """
        c = self.config
        plain_BTD = constrain(lookup(self.embed[...], tokens_BT), "batch", None, None)
        if c.embed_scale != 1.0:
            plain_BTD = plain_BTD * c.embed_scale
        if c.embed_norm:
            plain_BTD = rms_norm(plain_BTD, eps=c.norm_eps)
        if not c.smear:
            return plain_BTD, plain_BTD
        if previous_BD is None:
            before_BTD = jnp.pad(plain_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
            if segments_BT is not None:
                before_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)))
                before_BTD *= (segments_BT == before_BT)[..., None]
            if branches is not None:
                before_BTD = take_before(before_BTD, plain_BTD, branches)
        else:
            before_BTD = previous_BD[:, None]
        gate_c = self.smear_gate[...].astype(plain_BTD.dtype)
        gate_BT1 = jax.nn.sigmoid(plain_BTD[..., : gate_c.shape[0]] @ gate_c)[..., None]
        scale = self.smear_scale[...].astype(plain_BTD.dtype)
        return plain_BTD + scale * gate_BT1 * before_BTD, plain_BTD

    def run_layers(
        self,
        x_BTD: Float[Array, "B T D"],
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        keep_kv: bool = False,
        branches: Branches | None = None,
    ) -> tuple[Float[Array, "B T D"], list[tuple[Kept, Kept]]]:
        """All layers and the last norm; also each layer's keys and values when unrolled.

        Runs of equal periods are scanned if the configuration says so and no cache is wanted.
        """
        c, middle = self.config, self.config.depth // 2
        if positions_BT is None:
            positions_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        rope = short_rope = None
        if self.position_embed is not None:
            x_BTD = x_BTD + lookup(self.position_embed[...], positions_BT)
        else:
            rope = rotary(positions_BT, c.head_dim, c.rope_base, c.rope_scaling)
        if c.rope_base_short is not None:
            short_rope = rotary(positions_BT, c.head_dim, c.rope_base_short)
        rows = PLAIN if cache is not None or keep_kv else c.rows  # prompts are of any length
        inputs = LayerInputs(x_BTD, tokens_BT, rope, short_rope, segments_BT, branches, rows)
        layers, values = self.stacks()
        scanned = c.scan_layers and cache is None and not keep_kv
        carry, kv, at, value_at = (Stream(x_BTD), x_BTD), [], 0, 0
        for period, repeats in segments(self.plan) if scanned else [(self.plan, 1)]:
            size, valued = len(period), sum(spec.value_embed for spec in period)
            stack = take(layers, at, repeats, size), take(values, value_at, repeats, valued)

            def run_period(carry, stack, period=period):
                x, middle_BTD = carry
                layer_list = unstack(stack[0], len(period))
                value_list = iter(unstack(stack[1], sum(spec.value_embed for spec in period)))
                kept = []
                for spec, layer in zip(period, layer_list):
                    value = next(value_list) if spec.value_embed else None
                    layer_cache = cache and LayerCache(*cache.kv[len(kept)], cache.lengths_B)
                    x, pair = self.run_layer(x, spec, layer, value, inputs, layer_cache)
                    if c.backout:
                        middle_BTD = jnp.where(layer["index"] == middle, x.total(), middle_BTD)
                    kept.append(pair)
                return (x, middle_BTD), kept

            if repeats == 1:
                carry, kept = run_period(carry, jax.tree.map(lambda s: s[0], stack))
                kv += kept
            else:
                carry, _ = jax.lax.scan(lambda a, s: (run_period(a, s)[0], None), carry, stack)
            at, value_at = at + size * repeats, value_at + valued * repeats
        x_BTD, middle_BTD = carry[0].total(), carry[1]
        if c.backout:
            x_BTD = (x_BTD - self.backout_scale[...] * middle_BTD).astype(x_BTD.dtype)
        return normed(c, x_BTD, self.final_gain, self.final_shift), kv

    def stacks(self) -> tuple[dict[str, Any], Any]:
        """What each layer takes, stacked over layers; and over the layers with value embeddings."""
        layers: dict[str, Any] = {"index": np.arange(self.config.depth)}
        layers["block"] = nnx.split(self.blocks)[1]
        if self.config.residual_scales:
            layers["residual_scale"] = self.residual_scale[...]
            layers["x0_scale"] = self.x0_scale[...]
        values = {} if self.value_embed is None else nnx.split(self.value_embed)[1]
        return layers, values

    def run_layer(
        self,
        stream: Stream,
        spec: LayerSpec,
        layer: dict[str, Any],
        value: Any,
        inputs: LayerInputs,
        cache: LayerCache | None,
    ) -> tuple[Stream, tuple[Kept, Kept]]:
        """One layer: scale the stream, add the embedding back in, run the block."""
        c, rows = self.config, inputs.rows
        # A layer that is scanned or recomputed keeps one array, not the stream and a branch.
        whole = rows.norm is None or c.scan_layers or c.remat == "block"

        def run(stream, layer, value):
            scales = (layer["residual_scale"], layer["x0_scale"]) if c.residual_scales else None
            x_BTD, h_BTD, x0_BTD = enter(stream, inputs.x0_BTD, scales, c.norm_eps, rows.norm)
            block = nnx.merge(nnx.graphdef(self.blocks), layer["block"])
            if value is not None:
                value = nnx.merge(nnx.graphdef(self.value_embed), value), inputs.tokens_BT
            rope = inputs.short_rope if spec.short_rope else inputs.rope
            x_BTD, y_BTD, kept = block(
                x_BTD, spec, rope, value, inputs.segments_BT, cache, inputs.branches, rows, h_BTD
            )
            return leave(x_BTD, y_BTD, None if whole else x0_BTD), kept

        if c.remat == "block":
            run = jax.checkpoint(run)
        return run(stream, layer, value)


def take(stack: Any, start: int, repeats: int, size: int) -> Any:
    """Layers start .. start + repeats*size of a stack, as [repeats, size, ...]."""
    part = lambda s: s[start : start + repeats * size].reshape(repeats, size, *s.shape[1:])
    return jax.tree.map(part, stack)


def unstack(stack: Any, layers: int) -> list[Any]:
    """A stack as a list of layers. `lax.split`, because its gradient is one concatenation."""
    leaves, treedef = jax.tree.flatten(stack)

    def parts(leaf: Any) -> list[Any]:
        if isinstance(leaf, np.ndarray):
            return list(leaf)
        return [part.squeeze(0) for part in jax.lax.split(leaf, (1,) * layers)]

    if layers == 0:
        return []
    return [treedef.unflatten(layer) for layer in zip(*map(parts, leaves), strict=True)]
