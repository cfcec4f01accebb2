"""The Transformer: embed, layers as the plan says, norm. One for all families.

Parameters of equal layers are stored stacked, `[L, in, out]`, whether the layers are unrolled or
scanned; the modules only declare them and compute. `hidden` returns the normed last states; the
head is applied by the loss (never the whole logits) or, for a few positions, by `logits`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain import parallel
from jaxtrain.model import prefix, remat
from jaxtrain.model.attention import (
    Attend,
    Cache,
    CacheArray,
    LayerCache,
    LayerInputs,
    ValueEmbedding,
    attend_rows,
    init_kv_cache,
)
from jaxtrain.model.block import Block, declare_norm, normed
from jaxtrain.model.branches import Branches, branched_attention, take_before
from jaxtrain.model.config import ResolvedModel, round_up
from jaxtrain.model.fused_ops import PLAIN, FusedOps, Stream, fastest, prenorm, residual_out
from jaxtrain.model.init import SCHEMES, constant, uniform
from jaxtrain.model.layers import FeedForward, lookup, rms_norm, rotary
from jaxtrain.model.moe import MixtureOfExperts
from jaxtrain.model.plan import LayerSpec, Plan, make_plan, scan_groups
from jaxtrain.model.stack import in_form, layer_weights, part_sizes, take
from jaxtrain.model.stochastic_depth import keep_probabilities, skippable
from jaxtrain.parallel import constrain
from jaxtrain.weights.params import declare

SMEAR_CHANNELS = 24
CACHE_MULTIPLE = 128  # of the tokens that a cache has room for, so that it can be split


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
        dense, mixed = (sum(s.ffn == kind for s in self.plan) for kind in ("dense", "experts"))
        self.dense = FeedForward(c, dense) if dense else None
        self.experts = MixtureOfExperts(c, mixed) if mixed else None
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
                (c.context_length, D),
                (None, "embed"),
                scheme.embed,
                "embedding",
                dtype=c.embedding_dtype,
            )
            if c.position_embedding == "learned"
            else None
        )
        self.prompt = (
            declare((c.prompt, D), (None, "embed"), scheme.embed, "embedding", group="prompt")
            if c.prompt
            else None
        )
        self.prefix = prefix.Prefix(c) if c.prefix else None
        self.head = (
            None if c.tied_head else declare((D, vocab), ("embed", "vocab"), scheme.head, "head")
        )

    def head_DV(self) -> Float[Array, "D V"]:
        """The head's matrix; columns from `vocab_size` on are padding."""
        return self.embed[...].T if self.head is None else self.head[...]

    def logits(self, x_BD: Float[Array, "*B D"]) -> Float[Array, "*B v"]:
        """Float32 logits of a few states (generation); v is the vocabulary without padding."""
        logits_BV = (x_BD @ self.head_DV())[..., : self.vocab_size].astype(jnp.float32)
        cap = self.config.logit_softcap
        return logits_BV if cap is None else cap * jnp.tanh(logits_BV / cap)

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Normed last states; what the loss multiplies with the head."""
        segments_BT = segments_BT if self.config.document_mask else None
        return self.hidden_with_segments(tokens_BT, positions_BT, segments_BT)

    def hidden_sharded(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "b T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B"] | None]:
        """The same of a text sharded over the mesh: the states are in the order of `zigzag_shard`.

        And each row's sum of the experts' balance losses (None without experts).
        """
        if positions_BT is None:
            positions_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        segments_BT = segments_BT if self.config.document_mask else None
        inputs = parallel.zigzag_shard((tokens_BT, positions_BT, segments_BT))
        x_BTD, _ = self.embed_tokens(inputs[0], None, inputs[2], zigzag=True)
        attend = functools.partial(attend_rows, zigzag=True)
        x_BTD, _, balance_B = self.run_layers(x_BTD, *inputs, attend=attend, key=key)
        return x_BTD, balance_B

    def hidden_with_segments(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "b T"] | None,
        segments_BT: Int[Array, "B T"] | None,
        branches: Branches | None = None,
    ) -> Float[Array, "B T D"]:
        """The same, with the segments kept apart whatever `document_mask` says."""
        attend: Attend = attend_rows
        if branches is not None:
            attend = functools.partial(branched_attention, branches=branches)
        x_BTD, _ = self.embed_tokens(tokens_BT, None, segments_BT, branches)
        return self.run_layers(x_BTD, tokens_BT, positions_BT, segments_BT, attend=attend)[0]

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
        x_BTD, kv, _ = self.run_layers(x_BTD, tokens_BT, keep_kv=True)
        capacity += round_up(self.config.virtual, CACHE_MULTIPLE)
        keep = lambda x: init_kv_cache(x, capacity, cache_dtype)
        layers = tuple((keep(k), keep(v)) for k, v in kv)
        lengths_B = lengths_B + self.config.virtual
        return x_BTD[rows, ends], Cache(layers, lengths_B, plain_BTD[rows, ends])

    def decode(self, tokens_B: Int[Array, "B"], cache: Cache) -> tuple[Float[Array, "B D"], Cache]:
        """Append one token to each row; its last state, and the cache one token longer."""
        tokens_B1, lengths_B = tokens_B[:, None], cache.lengths_B + 1
        x_B1D, plain_B1D = self.embed_tokens(tokens_B1, cache.last_BD)
        longer = cache._replace(lengths_B=lengths_B)
        x_B1D, kv, _ = self.run_layers(x_B1D, tokens_B1, (lengths_B - 1)[:, None], cache=longer)
        return x_B1D[:, 0], Cache(tuple(kv), lengths_B, plain_B1D[:, 0])

    def embed_tokens(
        self,
        tokens_BT: Int[Array, "B T"],
        previous_BD: Float[Array, "B D"] | None,
        segments_BT: Int[Array, "B T"] | None = None,
        branches: Branches | None = None,
        zigzag: bool = False,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Embeddings with and without the smear; `previous_BD` stands before the first token.

        With segments, the first token of a document takes nothing from the document before.
        """
        c = self.config
        plain_BTD = constrain(lookup(self.embed[...], tokens_BT), "batch", "tokens", None)
        plain_BTD = self.embedded(plain_BTD)
        if not c.smear:
            return plain_BTD, plain_BTD
        if previous_BD is None:
            before_BTD = parallel.previous_token(plain_BTD, zigzag)
            if segments_BT is not None:
                before_BTD *= (segments_BT == parallel.previous_token(segments_BT, zigzag))[
                    ..., None
                ]
            if branches is not None:
                before_BTD = take_before(before_BTD, plain_BTD, branches)
        else:
            before_BTD = previous_BD[:, None]
        gate_c = self.smear_gate[...].astype(plain_BTD.dtype)
        gate_BT1 = jax.nn.sigmoid(plain_BTD[..., : gate_c.shape[0]] @ gate_c)[..., None]
        scale = self.smear_scale[...].astype(plain_BTD.dtype)
        return plain_BTD + scale * gate_BT1 * before_BTD, plain_BTD

    def embedded(self, rows_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Rows of the embedding as they enter the stream."""
        if self.config.embed_scale != 1.0:
            rows_BTD = rows_BTD * self.config.embed_scale
        return rms_norm(rows_BTD, eps=self.config.norm_eps) if self.config.embed_norm else rows_BTD

    def virtual_tokens(self) -> prefix.KeysValues | None:
        """k_LPKH and v_LPKH of the virtual tokens, if there are any (`model/prefix.py`)."""
        if self.prefix is not None:
            return self.prefix.heads(self.config.head_dim)
        if self.prompt is None:
            return None
        x_1PD = self.with_positions(self.embedded(self.prompt[...][None]), None)
        inputs = self.layer_inputs(x_1PD, None, None, None, prefix.self_attention_only, PLAIN)
        runs = [(self.plan, 1)]
        return prefix.stacked(self.run_some((x_1PD, x_1PD), runs, *self.stacks(), inputs)[1])

    def run_layers(
        self,
        x_BTD: Float[Array, "B T D"],
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "b T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        keep_kv: bool = False,
        attend: Attend = attend_rows,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T D"], list[Any], Float[Array, "B"] | None]:
        """All layers and the last norm; each layer's keys and values when unrolled; and each row's
        sum of the experts' balance losses.

        Runs of equal periods are scanned if the configuration says so and no cache is wanted.
        """
        kept = cache is not None or keep_kv
        c = self.config
        fused = PLAIN if kept else fastest(c.kernels, c, x_BTD)  # prompts are of any length
        layers, parts = self.stacks()
        begin = self.virtual_tokens() if cache is None else None
        if begin is not None:
            layers["virtual"] = begin
            positions_BT = prefix.offset_positions(positions_BT, x_BTD.shape[1], c.virtual)
        x_BTD = self.with_positions(x_BTD, positions_BT)
        inputs = self.layer_inputs(x_BTD, tokens_BT, positions_BT, segments_BT, attend, fused)
        inputs = inputs._replace(key=key)
        runs = scan_groups(self.plan) if c.scan_layers and not kept else [(self.plan, 1)]
        start = x_BTD, x_BTD
        both, kv, balance_B = self.run_some(start, runs, layers, parts, inputs, cache)
        if begin is not None and keep_kv:
            kv = prefix.prepend_kv(begin, kv)
        return self.last_states(*both), kv, balance_B

    def with_positions(self, x_BTD: Array, positions_BT: Array | None) -> Array:
        """The embedding, with that of the positions where they are learned."""
        if self.position_embed is None:
            return x_BTD
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None]
        return x_BTD + lookup(self.position_embed[...], positions_BT)

    def layer_inputs(
        self,
        x0_BTD: Array,
        tokens_BT: Array | None,
        positions_BT: Array | None,
        segments_BT: Array | None,
        attend: Attend,
        fused: FusedOps,
    ) -> LayerInputs:
        c = self.config
        if positions_BT is None:
            positions_BT = jnp.arange(x0_BTD.shape[1], dtype=jnp.int32)[None]
        rope = short_rope = None
        if self.position_embed is None:
            rope = rotary(positions_BT, c.head_dim, c.rope_base, c.rope_scaling)
        if c.rope_base_short is not None:
            short_rope = rotary(positions_BT, c.head_dim, c.rope_base_short)
        places = positions_BT, rope, short_rope, segments_BT
        return LayerInputs(x0_BTD, tokens_BT, *places, attend, fused)

    def run_some(
        self,
        start: tuple[Array, Array],
        runs: Sequence[tuple[Plan, int]],
        layers: dict[str, Any],
        parts: dict[str, Any],
        inputs: LayerInputs,
        cache: Cache | None = None,
    ) -> tuple[tuple[Array, Array], list[Any], Array | None]:
        """(stream, middle layer's output) after these layers, keys and values of the unrolled, and
        the balance losses.

        runs: the layers' plan in periods, one that repeats is scanned.
        """
        c, middle = self.config, self.config.depth // 2
        balance_B = jnp.zeros(len(start[0]), jnp.float32) if c.moe else None
        stream = Stream(start[0], balance_B=balance_B)
        carry, kv, at, part_at = (stream, start[1]), [], 0, dict.fromkeys(parts, 0)
        for period, repeats in runs:
            size, sizes = len(period), part_sizes(period, parts)
            some = {n: take(parts[n], part_at[n], repeats, sizes[n]) for n in parts}
            stack = take(layers, at, repeats, size), some

            def run_period(carry, stack, period=period, scanned=repeats > 1):
                x, middle_BTD = carry
                kept = []
                for i, (spec, source) in enumerate(
                    zip(period, layer_weights(period, stack, scanned))
                ):
                    layer_cache = cache and LayerCache(*cache.kv[len(kept)], cache.lengths_B)
                    x, pair = self.run_layer(x, spec, *source, inputs, layer_cache, scanned)
                    if c.backout:
                        here = stack[0]["index"][i] == middle
                        middle_BTD = jnp.where(here, x.total(), middle_BTD)
                    kept.append(pair)
                return (x, middle_BTD), kept

            if repeats == 1:
                carry, kept = run_period(carry, jax.tree.map(lambda s: s[0], stack))
                kv += kept
            else:
                carry, _ = jax.lax.scan(lambda a, s: (run_period(a, s)[0], None), carry, stack)
            at += size * repeats
            part_at = {name: begin + sizes[name] * repeats for name, begin in part_at.items()}
        return (carry[0].total(), carry[1]), kv, carry[0].balance_B

    def last_states(self, x_BTD: Array, middle_BTD: Array) -> Array:
        """What the head reads, of the last layer's output and the middle one's."""
        if self.config.backout:
            x_BTD = (x_BTD - self.backout_scale[...] * middle_BTD).astype(x_BTD.dtype)
        return normed(self.config, x_BTD, self.final_gain, self.final_shift)

    def hidden_pipelined(
        self,
        tokens_MBT: Int[Array, "M B T"],
        positions_MBT: Int[Array, "M B T"] | None = None,
        segments_MBT: Int[Array, "M B T"] | None = None,
        repeats: int = 1,
        key: Array | None = None,
    ) -> tuple[Float[Array, "M B T D"], Float[Array, "M B"] | None]:
        """`hidden_sharded` of microbatches, the layers in stages over the mesh's pipeline.

        repeats: chunks of layers of a stage.
        """
        c = self.config
        attend = functools.partial(attend_rows, zigzag=True)
        segments_MBT = segments_MBT if self.config.document_mask else None
        if positions_MBT is None:
            places = jnp.arange(tokens_MBT.shape[2], dtype=jnp.int32)
            positions_MBT = jnp.broadcast_to(places, (len(tokens_MBT), 1, len(places)))
        texts = tokens_MBT, positions_MBT, segments_MBT

        def embed(texts):
            tokens_BT, positions_BT, segments_BT = texts
            x_BTD, _ = self.embed_tokens(tokens_BT, None, segments_BT, zigzag=True)
            return self.with_positions(x_BTD, positions_BT)

        def stage(plan, stacks, states, one):
            x0_BTD, tokens_BT, positions_BT, segments_BT = one
            fused = fastest(c.kernels, c, x0_BTD)
            inputs = self.layer_inputs(x0_BTD, tokens_BT, positions_BT, segments_BT, attend, fused)
            runs = scan_groups(plan) if c.scan_layers else [(plan, 1)]
            layers, parts = stacks
            both, _, more_B = self.run_some(states[:2], runs, layers, parts, inputs)
            return (*both, *(balance_B + more_B for balance_B in states[2:]))

        texts = jax.vmap(parallel.zigzag_shard)(texts)
        micro = (jax.vmap(embed)(texts), *texts)
        plans = parallel.split_layers(self.plan, parallel.pipeline_size() * repeats)
        layers, parts = self.stacks()
        count = lambda name: [part_sizes(plan, [name])[name] for plan in plans]
        layers = parallel.pad_chunks(layers, [len(plan) for plan in plans])
        stacks = layers, {name: parallel.pad_chunks(parts[name], count(name)) for name in parts}
        zeros = lambda x_BTD: [jnp.zeros(len(x_BTD), jnp.float32)] if c.moe else []
        first = lambda one: (one[0], one[0], *zeros(one[0]))
        x_MBTD, middle_MBTD, *balance = parallel.run_pipeline(
            stage, plans, first, stacks, micro, repeats, loads=c.moe is not None
        )
        return self.last_states(x_MBTD, middle_MBTD), balance[0] if balance else None

    def stacks(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What each layer takes, stacked over layers; and the parts that only some layers have."""
        layers: dict[str, Any] = {"index": np.arange(self.config.depth)}
        layers["block"] = nnx.split(self.blocks)[1]
        if self.config.stochastic_depth:
            layers["keep"] = keep_probabilities(self.config)
        if self.config.residual_scales:
            layers["residual_scale"] = self.residual_scale[...]
            layers["x0_scale"] = self.x0_scale[...]
        names = sorted({name for spec in self.plan for name in spec.parts})
        return layers, {name: nnx.split(getattr(self, name))[1] for name in names}

    def run_layer(
        self,
        stream: Stream,
        spec: LayerSpec,
        source: Any,
        pick: Callable[[Any], tuple[dict[str, Any], dict[str, Any]]],
        inputs: LayerInputs,
        cache: LayerCache | None,
        scanned: bool,
    ) -> tuple[Stream, tuple[CacheArray, CacheArray] | None]:
        """One layer: scale the stream, add the embedding back in, run the block.

        pick: of source, what the layer takes and the parts that only some layers have.
        """
        c, fused = self.config, inputs.fused
        # A layer that is scanned or recomputed keeps one array, not the stream and a branch.
        whole = fused.norm == "xla" or c.scan_layers or spec.remat in remat.POLICIES
        key = inputs.key if c.stochastic_depth else None

        def run(stream, source):
            layer, parts = pick(source)
            scales = (layer["residual_scale"], layer["x0_scale"]) if c.residual_scales else None
            x_BTD, h_BTD, x0_BTD = prenorm(stream, inputs.x0_BTD, scales, c.norm_eps, fused.norm)
            block = nnx.merge(nnx.graphdef(self.blocks), in_form(layer["block"], c.weight_form))
            forms = {name: None if name == "value_embed" else c.weight_form for name in parts}
            own = {
                name: nnx.merge(nnx.graphdef(getattr(self, name)), in_form(part, forms[name]))
                for name, part in parts.items()
            }
            attend = prefix.with_prefix_kv(layer.get("virtual"), inputs.attend, inputs.positions_BT)
            out = block(
                x_BTD, spec, inputs._replace(attend=attend), own.get("value_embed"), cache, h_BTD,
                own.get(spec.ffn),
            )  # fmt: skip
            balance_B = stream.balance_B
            balance_B = balance_B if out.balance_B is None else balance_B + out.balance_B
            x0_BTD = None if whole or key is not None else x0_BTD
            return residual_out(out.x_BTD, out.branch_BTD, x0_BTD, balance_B), out.kv

        if cache is None:
            run = remat.layer(run, spec.remat, scanned)
        if key is not None:
            return skippable(run, key, lambda source: pick(source)[0])(stream, source)
        return run(stream, source)
