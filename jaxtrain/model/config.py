"""The model's configuration, and the sizes derived from its depth."""

from typing import Literal

from jaxtrain_kernels.attention import BACKENDS
from pydantic import Field, ValidationError, model_validator

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
    """Fields of ModelConfig, where a Size may be None, and of ResolvedModel, where none is."""

    depth: int = Field(
        12,
        ge=1,
        le=10_000,
        description="layers; width, heads, batch and rates follow from it",
    )
    width: Size = derived_field(
        "model width D; default 64 x depth, rounded up to a multiple of head_dim", ge=1
    )
    head_dim: int = Field(128, ge=2, description="channels of one attention head")
    qk_head_dim: int | None = Field(
        None,
        ge=2,
        description="channels of a head's query and key, where its value's (head_dim) are more or "
        "fewer; default head_dim",
    )
    heads: Size = derived_field("query heads N; default width / head_dim", ge=1)
    kv_heads: Size = derived_field("key/value heads K; default heads (no sharing)", ge=1)
    ffn: Literal["relu2", "gelu", "swiglu", "geglu"] = Field(
        "relu2", description="feed-forward kind; the last two are gated"
    )
    hidden: Size = derived_field("feed-forward width F; default 4 x width", ge=1)
    moe: Experts | None = Field(None, description="a mixture of experts; default none")
    vocab_multiple: int = Field(
        64, ge=1, description="embedding and head rows are padded up to a multiple of this"
    )
    position_embedding: Literal["rotary", "learned"] = Field(
        "rotary", description="turns of queries and keys, or a table of `context` embeddings"
    )
    rope_base: float = Field(100_000.0, gt=0, description="base of the rotary frequencies")
    rope_base_short: float | None = Field(
        None, gt=0, description="the same in S layers, never stretched; default rope_base"
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="how the rotary frequencies are stretched over a longer context"
    )
    qk_norm: bool = Field(True, description="RMS-normalise queries and keys after the rotation")
    qk_scale: float = Field(1.2, gt=0, description="factor on queries and on keys after qk_norm")
    qk_norm_gain: bool = Field(
        False, description="learned gains in qk_norm, which then comes before the rotation"
    )
    attention_scale: float | None = Field(
        None, gt=0, description="factor on the scores; default qk_scale^2 / sqrt(head_dim)"
    )
    qkv_bias: bool = Field(False, description="learned shifts of queries, keys and values")
    out_bias: bool = Field(False, description="learned shift of what attention puts out")
    ffn_bias: bool = Field(False, description="learned shifts in the feed-forward network")
    window_pattern: str = Field(
        "SSSL",
        pattern="^[SL]+$",
        description="S short window, L full context, tiled over the layers; the last is full",
    )
    last_layer_full: bool = Field(
        True, description="the last layer has full context, whatever window_pattern says"
    )
    short_window: Size = derived_field(
        "keys left of the query in S layers; default T/4 up to a 128 multiple", ge=1
    )
    context_length: Size = derived_field(
        "tokens that decoding looks back over; default the training length", ge=2
    )
    norm: Literal["rms", "layer"] = Field(
        "rms", description="of the blocks and the last states; layer also subtracts the mean"
    )
    norm_gain: bool = Field(
        False, description="learned gains in the norms, and shifts in layer norms"
    )
    norm_eps: float = Field(1e-6, gt=0, description="epsilon inside the norms")
    post_norm: bool = Field(False, description="normalise also what each branch puts out")
    embed_scale: float = Field(1.0, gt=0, description="factor on the token embedding")
    embed_norm: bool = Field(True, description="RMS-normalise the token embedding")
    tied_head: bool = Field(False, description="the head is the embedding, transposed")
    logit_softcap: float | None = Field(
        15.0, gt=0, description="logits are cap x tanh(logits / cap)"
    )
    attention_softcap: float | None = Field(None, gt=0, description="the same, attention scores")
    value_embeddings: bool = Field(
        True, description="gated token embeddings added to the values on alternating layers"
    )
    residual_scales: bool = Field(
        True, description="learned scale of the stream and of the embedding x0 before each layer"
    )
    bigram_rows: int | None = Field(
        None,
        ge=2,
        description="rows of a hashed embedding of pairs of tokens, added to the token embedding; "
        "five times the vocabulary serves well; default none",
    )
    smear: bool = Field(True, description="mix a gated copy of the previous token's embedding in")
    backout: bool = Field(True, description="subtract a learned share of the middle layer's output")
    document_mask: bool = Field(False, description="tokens attend inside their own document only")
    causal: bool = Field(
        True,
        description="a token attends to what stands before it; false: to both sides (an encoder, "
        "for objective.name=masked_lm)",
    )
    # fmt: off
    init: Literal[
        "speedrun", "gpt2", "depth_scaled", "orthogonal", "mup", "fixup", "tfixup", "rezero",
        "skipinit",
    ] = Field("speedrun", description="initial values; the last four need no block_norm")
    # fmt: on
    base_width: int = Field(
        256, ge=1, description="width whose learning rates `init: mup` transfers to this one"
    )
    adapter: int | None = Field(
        None,
        ge=1,
        description="channels of adapters behind attention and feed-forward; "
        "finetune.name=adapter sets it",
    )
    prompt: int | None = Field(
        None,
        ge=1,
        description="virtual tokens with learned embeddings in front of every text; "
        "finetune.name=prompt sets it",
    )
    prefix: int | None = Field(
        None,
        ge=1,
        description="virtual tokens with learned keys and values in every layer; "
        "finetune.name=prefix sets it",
    )
    mtp: int | None = Field(
        None,
        ge=1,
        le=16,
        description="modules of multi-token prediction behind the layers (DeepSeek-V3); "
        "objective.name=mtp sets it",
    )
    block_norm: bool = Field(True, description="RMS-normalise what each branch reads")
    embedding_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="storage of the token and value embeddings"
    )
    attention: str | None = Field(
        None,
        description="attention backend (cudnn, xla, mosaic, triton); "
        "default the fastest that serves",
    )
    deterministic_attention: bool = Field(
        False,
        description="attention's gradients are the same bits on every run; cuDNN cannot, mosaic "
        "takes 7 products a block instead of 5, xla and triton always are",
    )
    kernels: FusedOps = Field(
        FusedOps.model_validate({}), description="backends of the fused passes over activations"
    )
    scan_layers: bool = Field(
        False, description="scan over repeated layers: compiles faster, runs a little slower"
    )
    fp8: Literal["blocks", "all"] | None = Field(
        None,
        description="training's matmuls in float8: of the blocks' matrices, or of the head as well",
    )
    weight_form: WeightForm | None = Field(
        None,
        description="how matrices of the blocks are rounded or made sparse where they multiply; a "
        "name alone is enough; default not at all",
    )
    fp8_hidden: bool = Field(
        False,
        description="the backward pass of float8 training has squared-ReLU hidden layers in float8 "
        "alone: 2 bytes less for each hidden value, and an error of the gradient of at most 3%",
    )
    fp8_epilogue: bool = Field(
        False,
        description="squared-ReLU hidden layers and their gradients are cast to float8 by the "
        "products that make them (an own kernel for Hopper): they are read once less",
    )
    fp8_history: int | None = Field(
        None,
        ge=1,
        description="delayed scaling in the blocks: activations and gradients are scaled by the "
        "largest magnitudes of so many steps before, and not by their own; default none",
    )
    remat: Remat = Field(
        "none",
        description="what the backward pass computes again to save memory: attention, ffn (that "
        "half of each layer), dots (all but the results of matmuls and attention), block (all but "
        "layers' inputs), int8, int4, int2 (as block, with layers' inputs in so many bits: "
        "gradients of a point nearby), actnn8, actnn4, actnn2 (nothing; activations are kept in so "
        "many bits), offload (as block, and the inputs wait in the host's memory; a GPU with "
        "scan_layers)",
    )
    remat_short: Remat | None = Field(None, description="the same in S layers; default remat")
    stochastic_depth: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability that a training step skips the last layer; of layer i of L, i/L "
        "of it. What a layer adds is divided by the probability that it is kept",
    )
    frozen_layers: int = Field(
        0,
        ge=0,
        description="layers from the bottom up that do not train, nor does the embedding below: "
        "no backward pass, no optimizer step; train.phases freezes more and more of them",
    )
    share_layers: ShareLayers | None = Field(
        None,
        description="layers that use one set of weights: all, or adjacent (two in a row); a name "
        "alone is enough; default each its own",
    )
    mla: LatentKV | None = Field(
        None, description="multi-head latent attention (MLA): the cache holds latents; default none"
    )
    share_kv: ShareKV | None = Field(
        None,
        description="layers that read the keys and values of a layer before them: adjacent, or "
        "global; a name alone is enough; default none",
    )
    token_dropping: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of a row's tokens that skip each layer but the first and the last in a "
        "training step, drawn for each layer (Random-LTD)",
    )
    ffn_tiles: int = Field(
        1,
        ge=1,
        description="the feed-forward network, experts too, takes a row in so many parts, each "
        "computed again in the backward pass: for rows whose hidden layer would not fit",
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


def resolve_model(c: ModelConfig, sequence_length: int) -> ResolvedModel:
    """Fill in the sizes derived from depth and sequence length; fields that are set stay."""
    length = sequence_length + (c.prompt or c.prefix or 0)
    if c.position_embedding == "learned" and (c.context_length or length) < length:
        behind = f" behind {length - sequence_length} virtual tokens"
        raise UserError(
            f"model.context_length: positions are learned up to {c.context_length}, but "
            f"train.sequence_length is {sequence_length}"
            f"{behind if length > sequence_length else ''}"
        )
    width = c.width or round_up(64 * c.depth, c.head_dim)
    heads = c.heads or width // c.head_dim
    hidden, moe = c.hidden or 4 * width, c.moe
    if moe is not None:
        moe = moe.model_copy(update={"hidden": moe.hidden or max(1, hidden // moe.top_k)})
    derived = {
        "width": width,
        "heads": heads,
        "kv_heads": c.kv_heads or heads,
        "hidden": hidden,
        "moe": moe,
        "short_window": c.short_window or round_up(-(-sequence_length // 4), 128),
        "context_length": c.context_length
        or (length if c.position_embedding == "learned" else sequence_length),
    }
    try:
        return ResolvedModel.model_validate({**c.model_dump(), **derived})
    except ValidationError as error:  # from a derived value: given values were validated before
        raise UserError(
            f"model: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None
