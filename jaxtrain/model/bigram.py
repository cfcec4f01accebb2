"""Hashed bigram embedding, in addition to the token embedding (`model.bigram_rows`).

A hash of a token and its predecessor selects a row of a table that starts at zero. A tenth of the
row is added to the token's embedding, and so, by `model.residual_scales`, to the stream before each
layer. modded-nanogpt (record 62) and nanochat (dev/LOG.md, 2026-01-27) have a separate scale per
layer. nanochat found a gain at d12 with five rows per vocabulary token, and none at d25.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain.model.branches import Branches, take_before
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.init import constant
from jaxtrain.model.kv_cache import Cache, PagedCache
from jaxtrain.model.layers import lookup
from jaxtrain.parallel import constrain, previous_token
from jaxtrain.weights.params import declare

CURRENT, PREVIOUS = 36313, 27191  # odd factors: every bit of an id changes the row
SCALE = 0.1


class BigramEmbedding(nnx.Module):
    """Table of `bigram_rows` rows, with the learning rate of the token embedding."""

    def __init__(self, c: ResolvedModel):
        assert c.bigram_rows
        self.table = declare(
            (c.bigram_rows, c.width), ("vocab", "embed"), constant(0.0), "embedding",
            dtype=c.embedding_dtype,
        )  # fmt: skip

    def __call__(
        self, tokens_BT: Int[Array, "B T"], before_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """before_BT: the previous token of each; 0 before the first token of a sequence."""
        unsigned = lambda ids: ids.astype(jnp.uint32)
        mixed = (CURRENT * unsigned(tokens_BT)) ^ (PREVIOUS * unsigned(before_BT))
        rows_BT = (mixed % self.table.shape[0]).astype(jnp.int32)
        return SCALE * constrain(lookup(self.table[...], rows_BT), "batch", "tokens", None)


def tokens_before(
    tokens_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"] | None,
    branches: Branches | None,
    zigzag: bool,
) -> Int[Array, "B T"]:
    """The previous token of each; 0 at the start of a row and of each segment."""
    before_BT = previous_token(tokens_BT, zigzag)
    if segments_BT is not None:
        before_BT *= segments_BT == previous_token(segments_BT, zigzag)
    if branches is not None:
        before_BT = take_before(before_BT[..., None], tokens_BT[..., None], branches)[..., 0]
    return before_BT


def tokens_ahead(tokens_BT: Array, cache: Cache | PagedCache) -> Array:
    """The previous token of each new token of cached sequences; 0 at the start of a sequence."""
    if isinstance(cache, Cache):
        return cache.last_B[:, None]
    first_B1 = jnp.where(cache.starts_B > 0, cache.before_B, 0)[:, None]
    return jnp.concatenate([first_B1, tokens_BT[:, :-1]], axis=1)
