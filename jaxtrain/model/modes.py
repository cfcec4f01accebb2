"""What a Transformer is called for: whole rows, stages of a pipeline, a prompt, or one more token.

out = model(tokens_BT, positions_BT, segments_BT)                # Forward: states of all tokens
out = model(tokens_BT, mode=Prefill(lengths_B, capacity=256))    # prompts; fills a KV cache
out = model(tokens_B1, mode=Decode(out.cache))                   # one token a row, and so on
out = model(tokens_BT, mode=Paged(cache))                        # more tokens of rows in pages
"""

from typing import NamedTuple

from jaxtrain_kernels.decode_layers import PackedLayers
from jaxtyping import Array

from jaxtrain.model.branches import Branches
from jaxtrain.model.kv_cache import Cache, PagedCache
from jaxtrain.model.rope import Divisors


class Forward(NamedTuple):
    """Whole rows at once: training, evaluation, scoring.

    key: of a training step, for layers that draw (stochastic depth) or round (low-bit training);
    None in evaluation. zigzag: rows are split over the mesh's axis `context`; the states come in
    the order of `parallel.zigzag_shard`. document_mask: whether tokens attend inside their own
    segment alone; default `model.document_mask`. branches: what the last tokens of each row
    continue. rope: in the place of `model.rope_scaling`.
    """

    key: Array | None = None
    zigzag: bool = False
    document_mask: bool | None = None
    branches: Branches | None = None
    rope: Divisors | None = None


class Pipelined(NamedTuple):
    """Microbatches [M, B, T] through the stages of the mesh's axis `pipeline`; as with zigzag.

    repeats: chunks of layers of one stage (`mesh.pipeline_repeats`).
    """

    repeats: int = 1


class Prefill(NamedTuple):
    """Prompts padded on the right: fill a KV cache with room for `capacity` tokens.

    lengths_B: tokens of each prompt. cache_dtype: int8, float8, or None: the compute dtype.
    """

    lengths_B: Array
    capacity: int
    cache_dtype: str | None = None


class Decode(NamedTuple):
    """One more token of each row, [B, 1]; its keys and values are appended to the cache."""

    cache: Cache


class Paged(NamedTuple):
    """More tokens of each row, [B, T]: a part of a prompt, one new token, or several drafts.

    Only the first `cache.counts_B` of a row count; the states have all T. packed: the layers'
    weights for one kernel of all layers, which runs where there is one row with one token.
    begins: no row has tokens in its pages yet, so that the new ones attend to each other alone, by
    the kernels of whole rows."""

    cache: PagedCache
    packed: PackedLayers | None = None
    begins: bool = False


Mode = Forward | Pipelined | Prefill | Decode | Paged
FORWARD = Forward()


class Output(NamedTuple):
    """states: after the final norm, what the head reads: [B, T, D] (pipelined [M, B, T, D]); of
    Prefill and Decode [B, D], those of each row's last token. balance_B: each row's sum of the
    experts' balance losses, None without experts. cache: of Prefill, Decode and Paged."""

    states: Array
    balance_B: Array | None = None
    cache: Cache | PagedCache | None = None
