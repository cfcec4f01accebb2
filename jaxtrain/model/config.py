"""The model's configuration; `resolve.py` derives the sizes that are not set."""

from typing import Literal

from jaxtrain_kernels.attention import BACKENDS
from pydantic import Field, model_validator

from jaxtrain.model.rope import RopeScaling
from jaxtrain.model.saved_activations import COMPRESSIONS
from jaxtrain.model.sections import Experts, FusedOps, Remat, WeightForm
from jaxtrain.model.sharing import LatentKV, ShareKV, ShareLayers, layers_of_set
from jaxtrain.settings import Settings, UserError, derived_field


def check_heads(width: int | None, heads: int | None, kv_heads: int | None, head_dim: int) -> None:
    """Raise ValueError for sizes that do not divide."""
    if width and heads is None and width % head_dim:
        raise ValueError(
            f"width {width} is not a multiple of head_dim {head_dim}; set model.head_dim"
        )
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(f"heads {heads} is not a multiple of kv_heads {kv_heads}")


class ModelFields[Size: int | None](Settings):
    """Fields of ModelConfig, where a Size may be None, and of ResolvedModel, where all are set."""

    depth: int = Field(
        12,
        ge=1,
        le=10_000,
        description="number of layers; sets the defaults of width, heads, batch size and learning "
        "rates",
    )
    width: Size = derived_field(
        "model dimension D; default 64 x depth, rounded up to a multiple of head_dim", ge=1
    )
    head_dim: int = Field(128, ge=2, description="channels per attention head")
    qk_head_dim: int | None = Field(
        None,
        ge=2,
        description="channels per head of queries and keys, where they differ from those of "
        "values; default head_dim",
    )
    heads: Size = derived_field("number of query heads N; default width / head_dim", ge=1)
    kv_heads: Size = derived_field(
        "number of key/value heads K (grouped-query attention); default heads", ge=1
    )
    ffn: Literal["relu2", "gelu", "swiglu", "geglu"] = Field(
        "relu2", description="activation of the feed-forward network; swiglu and geglu are gated"
    )
    hidden: Size = derived_field(
        "hidden dimension F of the feed-forward network; default 4 x width", ge=1
    )
    moe: Experts | None = Field(None, description="mixture of experts; default none")
    vocab_multiple: int = Field(
        64,
        ge=1,
        description="vocabulary size of embedding and head is padded to a multiple of this",
    )
    position_embedding: Literal["rotary", "learned"] = Field(
        "rotary",
        description="rotary: RoPE; learned: learned absolute positions up to context_length",
    )
    rope_base: float = Field(100_000.0, gt=0, description="RoPE base (theta)")
    rope_base_short: float | None = Field(
        None,
        gt=0,
        description="RoPE base of short-window (S) layers, which rope_scaling does not change; "
        "default rope_base",
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="scaling of the RoPE frequencies for a longer context; default none"
    )
    qk_norm: bool = Field(True, description="RMSNorm on queries and keys (QK norm), after RoPE")
    qk_scale: float = Field(1.2, gt=0, description="factor on queries and on keys after qk_norm")
    qk_norm_gain: bool = Field(
        False, description="learned scale in qk_norm, which is then applied before RoPE"
    )
    attention_scale: float | None = Field(
        None,
        gt=0,
        description="factor on the attention scores; default qk_scale^2 / sqrt(head_dim)",
    )
    qkv_bias: bool = Field(False, description="bias of the Q, K and V projections")
    out_bias: bool = Field(False, description="bias of the attention output projection")
    ffn_bias: bool = Field(False, description="biases in the feed-forward network")
    window_pattern: str = Field(
        "SSSL",
        pattern="^[SL]+$",
        description="attention windows of the layers, repeated over the depth: S short_window, L "
        "full context. The last layer is full",
    )
    last_layer_full: bool = Field(
        True, description="full context in the last layer, regardless of window_pattern"
    )
    short_window: Size = derived_field(
        "window of S layers: number of tokens before the query that it attends to; default "
        "sequence length / 4, rounded up to a multiple of 128",
        ge=1,
    )
    context_length: Size = derived_field(
        "maximum context in tokens; default train.sequence_length", ge=2
    )
    norm: Literal["rms", "layer"] = Field(
        "rms", description="norm of the layers and of the final hidden states: RMSNorm or LayerNorm"
    )
    norm_gain: bool = Field(False, description="learned scale in the norms, and bias in LayerNorm")
    norm_eps: float = Field(1e-6, gt=0, description="epsilon of the norms")
    post_norm: bool = Field(
        False, description="also normalize the outputs of attention and feed-forward network"
    )
    embed_scale: float = Field(1.0, gt=0, description="factor on the token embedding")
    embed_norm: bool = Field(True, description="RMSNorm on the token embedding")
    tied_head: bool = Field(False, description="tie the head's weights to the token embedding")
    logit_softcap: float | None = Field(
        15.0, gt=0, description="soft cap of the logits, cap x tanh(logits / cap); null: none"
    )
    attention_softcap: float | None = Field(
        None,
        gt=0,
        description="soft cap of the attention scores, cap x tanh(scores / cap); default none",
    )
    value_embeddings: bool = Field(
        True, description="gated token embeddings added to the values in every other layer"
    )
    residual_scales: bool = Field(
        True,
        description="learned scales of the residual stream and of the embedding x0 before each "
        "layer",
    )
    bigram_rows: int | None = Field(
        None,
        ge=2,
        description="size of a hashed bigram embedding, added to the token embedding; five times "
        "the vocabulary works well. Default none",
    )
    smear: bool = Field(True, description="add a gated copy of the previous token's embedding")
    backout: bool = Field(
        True,
        description="subtract a learned fraction of the middle layer's output from the final "
        "hidden states",
    )
    document_mask: bool = Field(False, description="tokens attend only within their own document")
    causal: bool = Field(
        True,
        description="causal attention; false: bidirectional (an encoder, for "
        "objective.name=masked_lm)",
    )
    # fmt: off
    init: Literal[
        "speedrun", "gpt2", "depth_scaled", "orthogonal", "mup", "fixup", "tfixup", "rezero",
        "skipinit",
    ] = Field("speedrun", description="initialization scheme; the last four do not need block_norm")
    # fmt: on
    base_width: int = Field(
        256,
        ge=1,
        description="muP base width: `init: mup` transfers learning rates tuned at this width",
    )
    adapter: int | None = Field(
        None,
        ge=1,
        description="bottleneck channels of adapters after attention and feed-forward network; "
        "set by finetune.name=adapter",
    )
    prompt: int | None = Field(
        None,
        ge=1,
        description="number of virtual tokens with learned embeddings before every sequence; set "
        "by finetune.name=prompt",
    )
    prefix: int | None = Field(
        None,
        ge=1,
        description="number of virtual tokens with learned keys and values in every layer; set by "
        "finetune.name=prefix",
    )
    mtp: int | None = Field(
        None,
        ge=1,
        le=16,
        description="number of multi-token prediction modules after the layers (DeepSeek-V3); set "
        "by objective.name=mtp",
    )
    block_norm: bool = Field(
        True, description="RMSNorm on the inputs of attention and feed-forward network (pre-norm)"
    )
    embedding_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="storage dtype of the token and value embeddings"
    )
    attention: str | None = Field(
        None,
        description="attention backend (cudnn, xla, mosaic, triton, fa4); default the fastest one "
        "that is supported",
    )
    deterministic_attention: bool = Field(
        False,
        description="bitwise reproducible attention gradients. Not available with cudnn and fa4; "
        "mosaic then takes 7 matmuls per block instead of 5; xla and triton always are",
    )
    kernels: FusedOps = Field(
        FusedOps.model_validate({}), description="backends of the fused operations"
    )
    scan_layers: bool = Field(
        False,
        description="run repeated layers in jax.lax.scan: compiles faster, runs slightly slower",
    )
    fp8: Literal["blocks", "all"] | None = Field(
        None,
        description="float8 matmuls in training: of the blocks' matrices, or also of the head",
    )
    weight_form: WeightForm | None = Field(
        None,
        description="rounding or sparsity of the blocks' matrices in their matmuls; a name alone "
        "is enough. Default none",
    )
    fp8_hidden: bool = Field(
        False,
        description="keep squared-ReLU hidden activations only in float8 for the backward pass: 2 "
        "bytes less per hidden value, gradient error at most 3%",
    )
    fp8_epilogue: bool = Field(
        False,
        description="cast squared-ReLU hidden activations and their gradients to float8 in the "
        "epilogue of the matmul that computes them (own Hopper kernel)",
    )
    fp8_norms: bool = Field(False, description="norms cast the input of float8 matmuls themselves")
    fp8_gradients: bool = Field(
        False,
        description="the backward pass of RoPE casts the gradients of queries, keys and values to "
        "float8 itself (needs fp8_history and kernels.qkv)",
    )
    fp8_fast_accum: bool = Field(
        False,
        description="sum gradients of float8 matmuls' inputs with the tensor cores' 14 bits, as "
        "the forward pass does (torch: use_fast_accum); those of weights are summed in float32",
    )
    fp8_history: int | None = Field(
        None,
        ge=1,
        description="delayed scaling in the blocks: activations and gradients are scaled by the "
        "largest magnitude (amax) of so many previous steps. Default none: by their own",
    )
    remat: Remat = Field(
        "none",
        description="activations that the backward pass recomputes to save memory: attention or "
        "ffn (that half of each layer), dots (all but results of matmuls and attention), dots_fp8 "
        "(as dots, but the float8 inputs of matmuls are saved as well), block (all but layer "
        "inputs), int8, int4, int2 (as block, with layer inputs stored in so many "
        "bits: approximate gradients), actnn8, actnn4, actnn2 (ActNN: nothing, but activations "
        "are stored in so many bits), offload (as block, with layer inputs in host memory; needs "
        "a GPU and scan_layers)",
    )
    remat_short: Remat | None = Field(None, description="remat of S layers; default that of remat")
    stochastic_depth: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability that a training step skips the last layer; for layer i of L it "
        "is i/L of this. The output of a kept layer is divided by its keep probability",
    )
    frozen_layers: int = Field(
        0,
        ge=0,
        description="number of frozen layers from the bottom, with the embedding: no backward "
        "pass and no optimizer step. train.phases can freeze more of them over time",
    )
    share_layers: ShareLayers | None = Field(
        None,
        description="weight sharing between layers: all, or adjacent (pairs); a name alone is "
        "enough. Default none",
    )
    mla: LatentKV | None = Field(
        None,
        description="multi-head latent attention (MLA), whose KV cache holds latents; default none",
    )
    share_kv: ShareKV | None = Field(
        None,
        description="cross-layer KV sharing: layers that reuse the keys and values of an earlier "
        "layer, adjacent or global; a name alone is enough. Default none",
    )
    token_dropping: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of a sequence's tokens that skip a layer in a training step, drawn "
        "for each layer except the first and the last (Random-LTD)",
    )
    ffn_tiles: int = Field(
        1,
        ge=1,
        description="number of tiles of a sequence in which the feed-forward network (experts "
        "too) runs, each recomputed in the backward pass; for sequences whose hidden activations "
        "do not fit",
    )

    @property
    def layers_per_set(self) -> int:
        """Number of layers that share one set of weights."""
        return layers_of_set(self.share_layers, self.depth)

    @property
    def fits_norm_kernel(self) -> bool:
        """Whether the norm kernels compute this model's norm."""
        return self.norm == "rms" and not self.norm_gain and self.block_norm

    @property
    def fits_rope_kernel(self) -> bool:
        """Whether the kernels that fuse RoPE and QK norm compute this model's."""
        return self.qk_norm and not self.qk_norm_gain and self.position_embedding == "rotary"

    @property
    def fits_joined_heads(self) -> bool:
        """Whether queries, keys and values can stay in one array from their matmul on."""
        plain = not (self.qkv_bias or self.share_kv or self.mla or self.rope_scaling)
        return self.fits_rope_kernel and plain and self.qk_head_dim in (None, self.head_dim)

    @model_validator(mode="after")
    def _check(self) -> "ModelFields":
        check_heads(self.width, self.heads, self.kv_heads, self.head_dim)
        named = lambda backend: backend not in (None, "xla")
        if named(self.kernels.norm) and not self.fits_norm_kernel:
            raise ValueError("kernels.norm needs norm: rms, norm_gain: false and block_norm: true")
        if named(self.kernels.rope) and not self.fits_rope_kernel:
            raise ValueError(
                "kernels.rope needs position_embedding: rotary and qk_norm without qk_norm_gain"
            )
        if named(self.kernels.qkv) and not self.fits_joined_heads:
            raise ValueError(
                "kernels.qkv needs position_embedding: rotary and qk_norm, without qk_norm_gain, "
                "qkv_bias, share_kv, mla, qk_head_dim and rope_scaling"
            )
        if named(self.kernels.qkv) and self.deterministic_attention:
            raise ValueError("kernels.qkv has no deterministic_attention")
        if self.kernels.relu2 and self.ffn != "relu2":
            raise ValueError(f"kernels.relu2 needs ffn: relu2, not {self.ffn}")
        if named(self.kernels.ffn) and (self.ffn != "relu2" or self.ffn_bias or self.kernels.relu2):
            raise ValueError("kernels.ffn needs ffn: relu2, ffn_bias: false and no kernels.relu2")
        if self.moe and self.moe.every > self.depth:
            raise ValueError(f"moe.every {self.moe.every} is more than the {self.depth} layers")
        if self.frozen_layers >= self.depth:
            raise ValueError(
                f"frozen_layers {self.frozen_layers} leaves none of {self.depth} layers to train"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even (rotary pairs)")
        if self.qk_head_dim and self.qk_head_dim % 2:
            raise ValueError(f"qk_head_dim {self.qk_head_dim} must be even (rotary pairs)")
        if self.rope_scaling and self.rope_scaling.name == "longrope":
            rotated = self.mla.rope_dim if self.mla else self.qk_head_dim or self.head_dim
            self.rope_scaling.check_size(rotated)
        if self.attention not in (None, *BACKENDS):
            raise ValueError(
                f"attention has no backend {self.attention}; it has {', '.join(BACKENDS)}"
            )
        return self

    @model_validator(mode="after")
    def _check_sharing(self) -> "ModelFields":
        if self.share_kv and self.share_kv.name == "adjacent" and self.rope_base_short:
            raise ValueError(
                "share_kv: adjacent layers with different RoPE bases cannot share keys; set "
                "share_kv: global, or leave out rope_base_short"
            )
        if self.depth % self.layers_per_set:
            raise ValueError(
                f"depth {self.depth} is not a multiple of share_layers.layers {self.layers_per_set}"
            )
        if self.mla and self.mla.nope_dim is None and self.mla.rope_dim >= self.head_dim:
            raise ValueError(
                f"mla.rope_dim {self.mla.rope_dim} leaves no channels of head_dim {self.head_dim}; "
                "set mla.nope_dim, or a smaller mla.rope_dim"
            )
        if self.mla and self.heads and self.kv_heads not in (None, self.heads):
            raise ValueError("mla makes keys and values for every head; leave out kv_heads")
        return self


class ModelConfig(ModelFields[int | None]):
    """One Transformer for all families; every feature is a switch.

    Fields that are None are derived from `depth` (`resolve_model`), as in nanochat.
    """


class ResolvedModel(ModelFields[int]):
    """A ModelConfig with all sizes set; the modules are built from it."""

    @property
    def draws(self) -> bool:
        """Whether a training step needs a PRNG key."""
        saved = {self.remat, self.remat_short, self.moe.remat if self.moe else None}
        rounds = self.weight_form is not None and self.weight_form.for_training
        skips = self.stochastic_depth + self.token_dropping > 0
        return skips or rounds or not saved.isdisjoint(COMPRESSIONS)

    @property
    def qk_dim(self) -> int:
        """Number of channels of a head's query and key."""
        if self.mla is None:
            return self.qk_head_dim or self.head_dim
        return self.rope_dim + (self.mla.nope_dim or self.head_dim - self.rope_dim)

    @property
    def rope_dim(self) -> int:
        """Number of channels of a head's query and key that are rotated."""
        return self.qk_dim if self.mla is None else self.mla.rope_dim

    @property
    def virtual(self) -> int:
        """Number of virtual tokens before every sequence."""
        return self.prompt or self.prefix or 0


def check_decoder(c: ResolvedModel) -> None:
    """Raise UserError for a model that cannot generate text (an encoder)."""
    if not c.causal:
        raise UserError(
            "this model is an encoder (model.causal=false): it predicts masked tokens and cannot "
            "continue a text; `jaxtrain evaluate RUN` gives its masked loss"
        )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
