"""Sharing of weights, or of keys and values, between layers.

`model.share_layers`: fewer parameters at the same depth, width and FLOPs.

adjacent  layers 0 0 1 1 2 2   adjacent layers use one set (ALBERT's groups, MobileLLM-LS)
all       layers 0 0 0 0 0 0   all layers use one set (ALBERT)

A set is a block: attention, feed-forward network and norms. It is stored once, [sets, ...], its
gradient is the sum over its uses, and each use has its own keys and values. Residual scales and
value embeddings are not shared. ALBERT: Lan et al. 2020, arXiv:1909.11942. MobileLLM: Liu et al.
2024, arXiv:2402.14905.

`model.share_kv`: a smaller KV cache. A layer without its own keys and values has no K and V
projections and reads the keys and values of an earlier layer.

adjacent  layers 0 0 2 2 4 4           CLA (Brandon et al. 2024, arXiv:2405.12981)
global    S S S L S S S L              short-window layers share in groups, in their order; all
          0 0 2 3 2 5 5 3              full-context layers read the first one's (Character.AI 2024)
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxtrain.settings import Settings


class SharedByAll(Settings):
    """All layers use one set of weights (ALBERT)."""

    name: Literal["all"] = "all"


class SharedByAdjacent(Settings):
    """Each group of `layers` adjacent layers uses one set of weights (MobileLLM-LS: two)."""

    name: Literal["adjacent"] = "adjacent"
    layers: int = Field(
        2, ge=2, description="adjacent layers that share one set of weights; divides the depth"
    )


def section_of_name(given: object) -> object:
    """Expand a section given as its name alone."""
    return {"name": given} if type(given) is str else given


ShareLayers = Annotated[
    SharedByAll | SharedByAdjacent, Field(discriminator="name"), BeforeValidator(section_of_name)
]


def layers_of_set(share: SharedByAll | SharedByAdjacent | None, depth: int) -> int:
    """Number of layers that use one set of weights."""
    if share is None:
        return 1
    return depth if share.name == "all" else share.layers


class LatentKV(Settings):
    """Multi-head latent attention: keys and values are projections of one latent per token.

    Values have `model.head_dim` channels. DeepSeek-V2 (arXiv:2405.04434) has head_dim 128, kv_rank
    512, q_rank 1536, rope_dim 64 and nope_dim 128.
    """

    kv_rank: int = Field(512, ge=1, description="channels of the key/value latent")
    q_rank: int | None = Field(
        None,
        ge=1,
        description="channels of the query latent; default none",
    )
    rope_dim: int = Field(
        64, ge=2, multiple_of=2, description="channels of queries and keys with RoPE"
    )
    nope_dim: int | None = Field(
        None,
        ge=1,
        description="channels of queries and keys without RoPE; default head_dim - rope_dim, "
        "which needs no padding of heads",
    )


class KVOfAdjacent(Settings):
    """Each group of `layers` adjacent layers uses the keys and values of its first layer
    (cross-layer attention, CLA)."""

    name: Literal["adjacent"] = "adjacent"
    layers: int = Field(2, ge=2, description="adjacent layers that share keys and values")


class KVOfFirstFull(Settings):
    """Full-context layers use the keys and values of the first such layer. Short-window layers
    share in groups of `layers`, in order."""

    name: Literal["global"] = "global"
    layers: int = Field(
        2, ge=1, description="consecutive short-window layers that share keys and values"
    )


ShareKV = Annotated[
    KVOfAdjacent | KVOfFirstFull, Field(discriminator="name"), BeforeValidator(section_of_name)
]


def kv_sources(share: KVOfAdjacent | KVOfFirstFull | None, kinds: str) -> list[int | None]:
    """Each layer's distance to the earlier layer whose keys and values it reads; None: no sharing.

    0: its own. kinds: S or L of each layer.
    """
    if share is None:
        return [None] * len(kinds)
    if share.name == "adjacent":
        return [i % share.layers for i in range(len(kinds))]
    full, short = ([i for i, kind in enumerate(kinds) if kind == k] for k in "LS")
    source = dict.fromkeys(full, full[0] if full else 0)
    source |= {i: short[n - n % share.layers] for n, i in enumerate(short)}
    return [i - source[i] for i in range(len(kinds))]
