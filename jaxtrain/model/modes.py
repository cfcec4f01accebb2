"""Modes of calling a Transformer: whole sequences, pipeline stages, prefill, or decoding.

out = model(tokens_BT, positions_BT, segments_BT)                # Forward: states of all tokens
out = model(tokens_BT, mode=Prefill(lengths_B, capacity=256))    # prompts; fills a KV cache
out = model(tokens_B1, mode=Decode(out.cache))                   # one token per sequence
out = model(tokens_BT, mode=Paged(cache))                        # tokens of sequences in KV pages
"""

from typing import NamedTuple

from jaxtrain_kernels.decode_layers import LayersWeights
from jaxtyping import Array

from jaxtrain.model.branches import Branches
from jaxtrain.model.kv_cache import Cache, PagedCache
from jaxtrain.model.rope import Divisors


class Forward(NamedTuple):
    """Whole sequences at once: training, evaluation, scoring.

    key: PRNG key of a training step, for stochastic depth, token dropping and stochastic rounding;
    None in evaluation. zigzag: sequences are sharded over the mesh's axis `context`; the states are
    in the order of `parallel.zigzag_shard`. document_mask: whether tokens attend only within their
    own segment; default `model.document_mask`. branches: see `Branches`. rope: replaces
    `model.rope_scaling`.
    """

    key: Array | None = None
    zigzag: bool = False
    document_mask: bool | None = None
    branches: Branches | None = None
    rope: Divisors | None = None


class Pipelined(NamedTuple):
    """Microbatches [M, B, T] through the stages of the mesh's axis `pipeline`, zigzag-sharded.

    repeats: chunks of layers per stage (`mesh.pipeline_repeats`).
    """

    repeats: int = 1


class Prefill(NamedTuple):
    """Right-padded prompts, which fill a KV cache with room for `capacity` tokens.

    lengths_B: length of each prompt. cache_dtype: int8, float8, or None for the compute dtype.
    """

    lengths_B: Array
    capacity: int
    cache_dtype: str | None = None


class Decode(NamedTuple):
    """One more token of each sequence, [B, 1]; its keys and values are appended to the cache."""

    cache: Cache


class Paged(NamedTuple):
    """More tokens of each sequence, [B, T]: a prefill chunk, one new token, or draft tokens.

    Only the first `cache.counts_B` tokens of a sequence are valid; the states have all T. packed:
    the layers' weights for the kernel that runs all layers, used for one sequence with one token.
    first_chunk: no sequence has tokens in its pages yet. The new tokens then attend only to each
    other, with the kernels for whole sequences."""

    cache: PagedCache
    packed: LayersWeights | None = None
    first_chunk: bool = False


Mode = Forward | Pipelined | Prefill | Decode | Paged
FORWARD = Forward()


class Output(NamedTuple):
    """states: after the final norm, for the head: [B, T, D] (pipelined [M, B, T, D]); from Prefill
    and Decode [B, D], the last token of each sequence. balance_B: each sequence's sum of the
    experts' balance losses, None without experts. cache: from Prefill, Decode and Paged."""

    states: Array
    balance_B: Array | None = None
    cache: Cache | PagedCache | None = None
