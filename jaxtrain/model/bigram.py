"""A hashed embedding of pairs of tokens, beside that of single ones (`model.bigram_rows`).

A token and the one before it pick a row of a table that starts at zero; a tenth of the row is added
to the token's embedding, and with it, by `model.residual_scales`, to the stream before each layer.
modded-nanogpt (record 62) and nanochat (dev/LOG.md, 2026-01-27) have a scale of its own for each
layer; nanochat found a gain at d12 with five rows a token of the vocabulary, and none at d25.
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

CURRENT, PREVIOUS = 36313, 27191  # odd factors: every bit of an id moves the row
SCALE = 0.1


class BigramEmbedding(nnx.Module):
    """The table of `bigram_rows` rows; its rate is that of the token embedding."""

    def __init__(self, c: ResolvedModel):
        assert c.bigram_rows
        self.table = declare(
            (c.bigram_rows, c.width), ("vocab", "embed"), constant(0.0), "embedding",
            dtype=c.embedding_dtype,
        )  # fmt: skip

    def __call__(
        self, tokens_BT: Int[Array, "B T"], before_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """before_BT: the token before each; 0 before the first of a text."""
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
    """The token that each one follows; 0 at the start of a row and of each segment."""
    before_BT = previous_token(tokens_BT, zigzag)
    if segments_BT is not None:
        before_BT *= segments_BT == previous_token(segments_BT, zigzag)
    if branches is not None:
        before_BT = take_before(before_BT[..., None], tokens_BT[..., None], branches)[..., 0]
    return before_BT


def tokens_ahead(tokens_BT: Array, cache: Cache | PagedCache) -> Array:
    """The token in front of each new one of a cache's rows; 0 at the start of a text."""
    if isinstance(cache, Cache):
        return cache.last_B[:, None]
    first_B1 = jnp.where(cache.starts_B > 0, cache.before_B, 0)[:, None]
    return jnp.concatenate([first_B1, tokens_BT[:, :-1]], axis=1)
