"""The model's configuration, and what follows from its depth."""

from typing import Literal

from jaxtrain_kernels.attention import BACKENDS
from pydantic import Field, model_validator

from jaxtrain.settings import Settings


class ModelConfig(Settings):
    """One Transformer for all families; every feature is a switch.

    Fields that are None follow from `depth` (`resolve_model`), as in nanochat.
    """

    depth: int = Field(12, ge=1, description="layers; width, heads, batch and rates follow from it")
    width: int | None = Field(
        None,
        ge=1,
        description="model width D; default 64 x depth, rounded up to a multiple of head_dim",
    )
    head_dim: int = Field(128, ge=2, description="channels of one attention head")
    heads: int | None = Field(None, ge=1, description="query heads N; default width / head_dim")
    kv_heads: int | None = Field(
        None, ge=1, description="key/value heads K; default heads (no sharing)"
    )
    ffn: Literal["relu2", "gelu", "swiglu", "geglu"] = Field(
        "relu2", description="feed-forward kind; the last two are gated"
    )
    hidden: int | None = Field(None, ge=1, description="feed-forward width F; default 4 x width")
    vocab_multiple: int = Field(
        64, ge=1, description="embedding and head rows are padded up to a multiple of this"
    )
    rope_base: float = Field(100_000.0, gt=0, description="base of the rotary frequencies")
    qk_norm: bool = Field(True, description="RMS-normalise queries and keys after the rotation")
    qk_scale: float = Field(1.2, gt=0, description="factor on queries and on keys after qk_norm")
    window_pattern: str = Field(
        "SSSL",
        pattern="^[SL]+$",
        description="S short window, L full context, tiled over the layers; the last is full",
    )
    short_window: int | None = Field(
        None,
        ge=1,
        description="keys left of the query in S layers; default T/4 up to a 128 multiple",
    )
    context: int | None = Field(
        None, ge=2, description="tokens that decoding looks back over; default the training length"
    )
    norm_gain: bool = Field(False, description="learned gains in the norms")
    norm_eps: float = Field(1e-6, gt=0, description="epsilon inside the RMS norms")
    embed_norm: bool = Field(True, description="RMS-normalise the token embedding")
    tied_head: bool = Field(False, description="the head is the embedding, transposed")
    softcap: float | None = Field(15.0, gt=0, description="logits are cap x tanh(logits / cap)")
    attention_softcap: float | None = Field(None, gt=0, description="the same, attention scores")
    value_embeddings: bool = Field(
        True, description="gated token embeddings added to the values on alternating layers"
    )
    residual_scales: bool = Field(
        True, description="learned scale of the stream and of the embedding x0 before each layer"
    )
    smear: bool = Field(True, description="mix a gated copy of the previous token's embedding in")
    backout: bool = Field(True, description="subtract a learned share of the middle layer's output")
    document_mask: bool = Field(False, description="tokens attend inside their own document only")
    # fmt: off
    init: Literal[
        "speedrun", "gpt2", "depth_scaled", "orthogonal", "mup", "fixup", "tfixup", "rezero",
        "skipinit",
    ] = Field("speedrun", description="initial values; the last four need no block_norm")
    # fmt: on
    base_width: int = Field(
        256, ge=1, description="width whose learning rates `init: mup` transfers to this one"
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
    scan_layers: bool = Field(
        False, description="scan over repeated layers: compiles faster, runs a little slower"
    )
    remat: Literal["none", "block"] = Field(
        "none", description="recompute each block in the backward pass to save memory"
    )

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.width and self.heads is None and self.width % self.head_dim:
            raise ValueError(f"width {self.width} is not a multiple of head_dim {self.head_dim}")
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.init == "mup" and self.tied_head:
            raise ValueError("init mup scales the head unlike the embedding: set tied_head: false")
        if self.norm_gain and not self.block_norm:
            raise ValueError("norm_gain needs block_norm: there are no norms for the gains")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even (rotary pairs)")
        if self.attention not in (None, *BACKENDS):
            raise ValueError(
                f"attention has no backend {self.attention}; it has {', '.join(BACKENDS)}"
            )
        return self


class ResolvedModel(ModelConfig):
    """A ModelConfig with nothing left open: what the modules are built from."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    short_window: int
    context: int


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def resolve_model(c: ModelConfig, sequence_length: int) -> ResolvedModel:
    """Fill in what follows from the depth and the context length; anything set by hand wins."""
    width = c.width or round_up(64 * c.depth, c.head_dim)
    heads = c.heads or width // c.head_dim
    derived = {
        "width": width,
        "heads": heads,
        "kv_heads": c.kv_heads or heads,
        "hidden": c.hidden or 4 * width,
        "short_window": c.short_window or round_up(-(-sequence_length // 4), 128),
        "context": c.context or sequence_length,
    }
    return ResolvedModel.model_validate({**c.model_dump(), **derived})
