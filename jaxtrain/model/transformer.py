"""The Transformer, one class for all model families: embedding, planned layers, final norm.

    tokens -> embedding, smear -> layers (`run_layers`) -> backout, final norm -> states -> logits

Parameters of equal layers are stored stacked, `[L, in, out]`, whether the layers are unrolled or
scanned; the modules only declare them and compute. A call returns the states. The loss applies the
head (and never materializes all logits); `logits` applies it to a few positions.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jaxtrain import parallel
from jaxtrain.model import prefix
from jaxtrain.model.attention import (
    Attend,
    KeyValueProjection,
    LayerInputs,
    ValueEmbedding,
    attend_rows,
)
from jaxtrain.model.bigram import BigramEmbedding, tokens_ahead, tokens_before
from jaxtrain.model.block import Block, declare_norm, normed
from jaxtrain.model.branches import Branches, branched_attention, take_before
from jaxtrain.model.config import ResolvedModel, round_up
from jaxtrain.model.fused_ops import PLAIN, fastest, of_decoding
from jaxtrain.model.init import SCHEMES, constant, uniform
from jaxtrain.model.kv_cache import (
    Cache,
    KeysValues,
    LayerCache,
    PagedCache,
    StackedPages,
)
from jaxtrain.model.layers import FeedForward, lookup, rms_norm, rotary
from jaxtrain.model.modes import FORWARD, Decode, Forward, Mode, Output, Paged, Pipelined, Prefill
from jaxtrain.model.moe import MixtureOfExperts
from jaxtrain.model.mtp import MultiTokenPrediction
from jaxtrain.model.packed import run_stacked
from jaxtrain.model.pipelined import PipelineParts, Texts, run_pipelined, run_pipelined_loss
from jaxtrain.model.plan import make_plan, make_runs
from jaxtrain.model.prompts import run_first_chunks, run_prompts
from jaxtrain.model.rope import Divisors
from jaxtrain.model.run_layers import LayerModules, LayersOutput, run_layers
from jaxtrain.model.sections import FusedOps
from jaxtrain.model.sharing import SharedByAdjacent, SharedByAll
from jaxtrain.model.stack import Stack
from jaxtrain.model.stochastic_depth import keep_probabilities
from jaxtrain.parallel import constrain
from jaxtrain.weights.contract import dequantize, is_weight, matmul
from jaxtrain.weights.params import declare
from jaxtrain.weights.transposed import TransposedWeight

SMEAR_CHANNELS = 24
BEHIND_LAYERS = ("backout_scale", "final_gain", "final_shift", "head")  # params after the layers


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
        self.bigram = BigramEmbedding(c) if c.bigram_rows else None
        self.blocks = Block(c, L // c.layers_per_set)
        valued = sum(spec.value_embed for spec in self.plan)
        sources = sum(spec.kv_from == 0 for spec in self.plan)
        self.kv = KeyValueProjection(c, sources) if sources else None
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
        self.mtp = MultiTokenPrediction(c) if c.mtp else None

    def __call__(
        self,
        tokens_BT: Int[Array, "*M B T"],
        positions_BT: Int[Array, "*M b T"] | None = None,
        segments_BT: Int[Array, "*M B T"] | None = None,
        mode: Mode = FORWARD,
    ) -> Output:
        """Compute the states after the final norm; `model/modes.py` documents each mode's output.

        positions_BT: position of each token in its document; default 0, 1, ... segments_BT: each
        token's document id. Prefill, Decode and Paged take neither: their rows are one sequence.
        """
        match mode:
            case Forward():
                return self._forward(tokens_BT, positions_BT, segments_BT, mode)
            case Pipelined():
                return self._pipelined(tokens_BT, positions_BT, segments_BT, mode)
            case Prefill():
                return run_prompts(self, tokens_BT, mode)
            case Decode():
                return self._decode(tokens_BT, mode)
            case Paged():
                if isinstance(mode.cache.kv, StackedPages):
                    return run_stacked(self, tokens_BT, mode)[0]
                run = run_first_chunks if mode.first_chunk else Transformer._paged
                return run(self, tokens_BT, mode.cache)

    def _forward(
        self, tokens_BT: Array, positions_BT: Array | None, segments_BT: Array | None, mode: Forward
    ) -> Output:
        masked = self.config.document_mask if mode.document_mask is None else mode.document_mask
        segments_BT = segments_BT if masked else None
        attend: Attend = attend_rows
        if mode.zigzag:
            attend = functools.partial(attend_rows, zigzag=True)
            if positions_BT is None:
                positions_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
            texts = tokens_BT, positions_BT, segments_BT
            tokens_BT, positions_BT, segments_BT = parallel.zigzag_shard(texts)
        elif mode.branches is not None:
            attend = functools.partial(branched_attention, branches=mode.branches)
        x_BTD, _ = self.embed_tokens(tokens_BT, None, segments_BT, mode.branches, mode.zigzag)
        places = positions_BT, segments_BT, attend, mode.key
        out = self.all_layers(x_BTD, tokens_BT, *places, rope=mode.rope)
        return Output(self.final_norm(out.x_BTD, out.middle_BTD), out.balance_B)

    def _decode(self, tokens_B1: Array, mode: Decode) -> Output:
        lengths_B = mode.cache.lengths_B + 1
        x_B1D, plain_B1D = self.embed_tokens(tokens_B1, mode.cache)
        longer = mode.cache._replace(lengths_B=lengths_B)
        out = self.all_layers(x_B1D, tokens_B1, (lengths_B - 1)[:, None], cache=longer)
        states_B1D = self.final_norm(out.x_BTD, out.middle_BTD)
        cache = Cache(tuple(out.kv), lengths_B, plain_B1D[:, 0], tokens_B1[:, 0])
        return Output(states_B1D[:, 0], cache=cache)

    def _paged(self, tokens_BT: Array, cache: PagedCache) -> Output:
        behind = cache._replace(starts_B=cache.starts_B + self.config.virtual)
        positions_BT = behind.starts_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
        x_BTD, _ = self.embed_tokens(tokens_BT, cache)
        out = self.all_layers(x_BTD, tokens_BT, positions_BT, cache=behind)
        states_BTD = self.final_norm(out.x_BTD, out.middle_BTD)
        return Output(states_BTD, cache=cache._replace(kv=tuple(out.kv)))

    def _pipelined(
        self,
        tokens_MBT: Array,
        positions_MBT: Array | None,
        segments_MBT: Array | None,
        mode: Pipelined,
    ) -> Output:
        parts = self.pipeline_parts(tokens_MBT, positions_MBT, segments_MBT, mode.repeats)
        out = run_pipelined(parts)
        return Output(self.final_norm(out.x_BTD, out.middle_BTD), out.balance_B)

    def pipelined_loss(
        self,
        tokens_MBT: Int[Array, "M B T"],
        positions_MBT: Int[Array, "M b T"] | None,
        segments_MBT: Int[Array, "M B T"] | None,
        labels: PyTree,
        loss: Callable[["Transformer", Float[Array, "b T D"], PyTree], Float[Array, ""]],
    ) -> Float[Array, ""]:
        """Sum of the losses of all microbatches, with the 1F1B schedule.

        labels: arrays [M, B, T]. loss: (a model, of which only the head may be read; the states of
        some rows of a microbatch; their labels) -> the sum of their losses.
        """
        graphdef, params = nnx.split(self)
        head = {name: params[name] for name in BEHIND_LAYERS if name in params}
        if self.head is None:
            head["embed"] = params["embed"]

        def finish(head: Any, states: tuple[Array, ...], labels: PyTree) -> Array:
            model = nnx.merge(graphdef, nnx.State({**params, **head}))
            return loss(model, model.final_norm(*states), labels)

        parts = self.pipeline_parts(tokens_MBT, positions_MBT, segments_MBT, 1)
        return run_pipelined_loss(parts, finish, labels, head)

    def pipeline_parts(
        self,
        tokens_MBT: Array,
        positions_MBT: Array | None,
        segments_MBT: Array | None,
        repeats: int,
    ) -> PipelineParts:
        """Arguments of `run_pipelined` for microbatches [M, B, T]."""
        attend, c = functools.partial(attend_rows, zigzag=True), self.config
        segments_MBT = segments_MBT if c.document_mask else None
        if positions_MBT is None:
            places = jnp.arange(tokens_MBT.shape[2], dtype=jnp.int32)
            positions_MBT = jnp.broadcast_to(places, (len(tokens_MBT), 1, len(places)))

        def embed(texts: Texts) -> Array:
            tokens_BT, positions_BT, segments_BT = texts
            x_BTD, _ = self.embed_tokens(tokens_BT, None, segments_BT, zigzag=True)
            return self.add_positions(x_BTD, positions_BT)

        def inputs_of(x_BTD: Array, texts: Texts) -> LayerInputs:
            return self.layer_inputs(x_BTD, *texts, attend, fastest(c.kernels, c, x_BTD))

        texts = tokens_MBT, positions_MBT, segments_MBT
        parts = self.modules(), self.stack(), self.plan
        return PipelineParts(*parts, texts, embed, inputs_of, repeats)

    def embed_tokens(
        self,
        tokens_BT: Int[Array, "B T"],
        cache: Cache | PagedCache | None,
        segments_BT: Int[Array, "B T"] | None = None,
        branches: Branches | None = None,
        zigzag: bool = False,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """The initial residual stream, and the plain token embeddings.

        cache: holds the token before the first one. With segments, nothing of a document is mixed
        into the first token of the next.
        """
        c = self.config
        plain_BTD = constrain(lookup(self.embed[...], tokens_BT), "batch", "tokens", None)
        x_BTD = plain_BTD = self.scale_embedding(plain_BTD)
        if c.smear:
            before_BTD = (
                self.embedding_before(plain_BTD, segments_BT, branches, zigzag)
                if cache is None
                else self.embedding_ahead(plain_BTD, cache)
            )
            gate_c = self.smear_gate[...].astype(plain_BTD.dtype)
            gate_BT1 = jax.nn.sigmoid(plain_BTD[..., : gate_c.shape[0]] @ gate_c)[..., None]
            x_BTD = (
                plain_BTD + self.smear_scale[...].astype(plain_BTD.dtype) * gate_BT1 * before_BTD
            )
        if self.bigram is not None:
            before_BT = (
                tokens_before(tokens_BT, segments_BT, branches, zigzag)
                if cache is None
                else tokens_ahead(tokens_BT, cache)
            )
            x_BTD += self.bigram(tokens_BT, before_BT).astype(x_BTD.dtype)
        return x_BTD, plain_BTD

    @staticmethod
    def embedding_before(
        plain_BTD: Array, segments_BT: Array | None, branches: Branches | None, zigzag: bool
    ) -> Array:
        """Embedding of each token's previous token; zeros where there is none."""
        before_BTD = parallel.previous_token(plain_BTD, zigzag)
        if segments_BT is not None:
            before_BTD *= (segments_BT == parallel.previous_token(segments_BT, zigzag))[..., None]
        return before_BTD if branches is None else take_before(before_BTD, plain_BTD, branches)

    def embedding_ahead(self, plain_BTD: Array, cache: Cache | PagedCache) -> Array:
        """Embedding of the previous token of each new token of cached sequences."""
        if isinstance(cache, Cache):
            return cache.last_BD[:, None]
        first_B1D = self.scale_embedding(lookup(self.embed[...], cache.before_B[:, None]))
        first_B1D *= (cache.starts_B > 0)[:, None, None]
        return jnp.concatenate([first_B1D, plain_BTD[:, :-1]], axis=1)

    def scale_embedding(self, rows_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Scale and norm rows of the embedding, as configured."""
        if self.config.embed_scale != 1.0:
            rows_BTD = rows_BTD * self.config.embed_scale
        return rms_norm(rows_BTD, eps=self.config.norm_eps) if self.config.embed_norm else rows_BTD

    def add_positions(self, x_BTD: Array, positions_BT: Array | None) -> Array:
        """Add the position embedding, if positions are learned."""
        if self.position_embed is None:
            return x_BTD
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None]
        return x_BTD + lookup(self.position_embed[...], positions_BT)

    def virtual_tokens(self) -> prefix.KeysValues | None:
        """k_LPKH and v_LPKH of the virtual tokens, if there are any (`model/prefix.py`)."""
        if self.prefix is not None:
            return self.prefix.heads(self.config.head_dim)
        if self.prompt is None:
            return None
        x_1PD = self.add_positions(self.scale_embedding(self.prompt[...][None]), None)
        inputs = self.layer_inputs(x_1PD, None, None, None, prefix.self_attention_only, PLAIN)
        runs = make_runs(self.plan, scan=False)
        out = run_layers(self.modules(), self.stack(), runs, (x_1PD, x_1PD), inputs)
        return prefix.stacked(out.kv)

    def all_layers(
        self,
        x_BTD: Float[Array, "B T D"],
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "b T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
        attend: Attend = attend_rows,
        key: Array | None = None,
        cache: Cache | PagedCache | None = None,
        keep_kv: bool = False,
        rope: Divisors | None = None,
    ) -> LayersOutput:
        """Run all layers after the embedding; with a cache or keep_kv, also return their KV."""
        c, stack, virtual = self.config, self.stack(), None
        if cache is None and (virtual := self.virtual_tokens()) is not None:
            stack.layers["virtual"] = virtual
            positions_BT = prefix.offset_positions(positions_BT, x_BTD.shape[1], c.virtual)
        x_BTD = self.add_positions(x_BTD, positions_BT)
        x_BTD = jax.lax.stop_gradient(x_BTD) if c.frozen_layers else x_BTD
        unrolled = keep_kv or cache is not None
        fused = PLAIN if unrolled else fastest(c.kernels, c, x_BTD)  # prompts are of any length
        fused = fused if cache is None else of_decoding(c, x_BTD)
        places = positions_BT, segments_BT, attend
        inputs = self.layer_inputs(x_BTD, tokens_BT, *places, fused, key, rope)
        runs = make_runs(self.plan, c.scan_layers and not unrolled)
        out = run_layers(self.modules(), stack, runs, (x_BTD, x_BTD), inputs, cache)
        if virtual is not None and keep_kv:
            out = out._replace(kv=prefix.prepend_kv(virtual, out.kv))
        return out

    def layer_inputs(
        self,
        x0_BTD: Array,
        tokens_BT: Array | None,
        positions_BT: Array | None,
        segments_BT: Array | None,
        attend: Attend,
        fused: FusedOps,
        key: Array | None = None,
        divisors: Divisors | None = None,
    ) -> LayerInputs:
        c = self.config
        if positions_BT is None:
            positions_BT = jnp.arange(x0_BTD.shape[1], dtype=jnp.int32)[None]
        rope = short_rope = None
        if self.position_embed is None:
            rope = rotary(positions_BT, c.rope_dim, c.rope_base, divisors or c.rope_scaling)
        if c.rope_base_short is not None:
            short_rope = rotary(positions_BT, c.rope_dim, c.rope_base_short)
        places = positions_BT, rope, short_rope, segments_BT
        return LayerInputs(x0_BTD, tokens_BT, *places, attend, fused, key)

    def final_norm(self, x_BTD: Array, middle_BTD: Array) -> Array:
        """Input of the head, from the last layer's and the middle layer's output."""
        if self.config.backout:
            x_BTD = (x_BTD - self.backout_scale[...] * middle_BTD).astype(x_BTD.dtype)
        return normed(self.config, x_BTD, self.final_gain, self.final_shift)

    def predict_ahead(
        self,
        module: int,
        states_BTD: Float[Array, "B T D"],
        texts: Texts,
        attend: Attend = attend_rows,
        key: Array | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], KeysValues | None]:
        """States of a module of `model/mtp.py`, for the head, and its keys and values.

        states_BTD: of the previous module. texts: with the tokens `module` + 1 positions later.
        """
        assert self.mtp is not None
        x_BTD = self.scale_embedding(lookup(self.embed[...], texts[0]))
        choose = of_decoding if cache else functools.partial(fastest, self.config.kernels)
        inputs = self.layer_inputs(x_BTD, *texts, attend, choose(self.config, x_BTD), key)
        x_BTD, kv = self.mtp(module, states_BTD, x_BTD, inputs, cache)
        return normed(self.config, x_BTD, self.final_gain, self.final_shift), kv

    def modules(self) -> LayerModules:
        """The layers' modules without their weights."""
        modules = {"block": self.blocks} | {name: getattr(self, name) for name in self.parts()}
        return LayerModules(self.config, {n: nnx.graphdef(m) for n, m in modules.items()})

    def stack(self) -> Stack:
        """The weights of all layers."""
        layers: dict[str, Any] = {"index": np.arange(self.config.depth)}
        parts = {name: nnx.split(getattr(self, name))[1] for name in self.parts()}
        block, shared = nnx.split(self.blocks)[1], {}
        match self.config.share_layers:
            case None:
                layers["block"] = block
            case SharedByAdjacent():
                parts["block"] = block
            case SharedByAll():
                shared["block"] = jax.tree.map(lambda w: w[0], block)
        if self.config.stochastic_depth:
            layers["keep"] = keep_probabilities(self.config)
        if self.config.residual_scales:
            layers["residual_scale"] = self.residual_scale.get_value()
            layers["x0_scale"] = self.x0_scale.get_value()
        return Stack(layers, parts, shared)

    def parts(self) -> list[str]:
        """Names of the modules that only some layers have, without shared blocks."""
        return sorted({name for spec in self.plan for name in spec.parts} - {"block"})

    def head_DV(self) -> Float[Array, "D V"]:
        """The head's matrix; columns from `vocab_size` on are padding."""
        if self.head is None:
            return self.embed[...].T
        head = self.head.get_value()
        return dequantize(head) if is_weight(head) else self.head[...]

    def logits(self, x_BD: Float[Array, "*B D"]) -> Float[Array, "*B v"]:
        """Float32 logits of a few states (generation); v is the vocabulary without padding."""
        stored = TransposedWeight(self.embed[...]) if self.head is None else self.head.get_value()
        fits = not is_weight(stored) or stored.transposed() is not None
        logits_BV = matmul(x_BD, stored if fits else self.head_DV())
        logits_BV = logits_BV[..., : self.vocab_size].astype(jnp.float32)
        cap = self.config.logit_softcap
        return logits_BV if cap is None else cap * jnp.tanh(logits_BV / cap)
