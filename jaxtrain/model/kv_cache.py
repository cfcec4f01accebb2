"""KV caches: contiguous, one row per sequence (`Cache`), or paged, pages shared (`PagedCache`).

A layer gets its own slice: `append` writes the keys and values of new tokens, `attend` reads them.
The inference engine uses pages: sequences have any length, and none moves when another begins or
ends (PagedAttention, Kwon et al. 2023, arXiv:2309.06180).
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from jaxtyping import Array, Float, Int, PyTree

from jaxtrain import parallel
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.plan import make_plan
from jaxtrain.parallel.axes import current_mesh

CacheArray = Array | kernels.Quantized
CACHE_DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
# One layer's k_BTKH and v_BTKH, or k_BSKH and v_BSKH; with `model.mla` a single array of latents.
KeysValues = tuple[CacheArray, ...]


class RowsOfLayer(NamedTuple):
    """Keys and values of one layer; row b is valid below lengths_B[b], this token included."""

    kv: KeysValues
    lengths_B: Array

    def append(self, new: tuple[Array, ...]) -> KeysValues:
        """The cache with one more token per sequence, its last; new: keys, values [B, 1, K, H]."""
        rows = jnp.arange(new[0].shape[0])

        def put(cache_BSKH: CacheArray, x_B1KH: Array) -> CacheArray:
            one = lambda old, x: old.at[rows, self.lengths_B - 1].set(x[:, 0])
            return jax.tree.map(one, cache_BSKH, as_stored(x_B1KH, cache_BSKH))

        return tuple(map(put, self.kv, new))

    def attend(
        self,
        q_B1NH: Float[Array, "B 1 N H"],
        kv: KeysValues,
        window: int,
        softcap: float | None,
        scale: float,
    ) -> Float[Array, "B 1 N H"]:
        """Attention of each sequence's last token to itself and the `window` tokens before it."""
        k_BSKH, v_BSKH = kv
        y_BNH = kernels.decode_attention(
            q_B1NH[:, 0], k_BSKH, v_BSKH, self.lengths_B, window=window, softcap=softcap,
            scale=scale,
        )  # fmt: skip
        return y_BNH[:, None]


class PagesOfLayer(NamedTuple):
    """Keys and values of one layer in pages: arrays [pages, page size, K, H].

    Sequence b has the pages table_BW[b]; its new tokens are at positions starts_B[b] ..
    starts_B[b] + counts_B[b] - 1.
    """

    kv: KeysValues
    table_BW: Array
    starts_B: Array
    counts_B: Array

    def append(self, new: tuple[Array, ...]) -> KeysValues:
        """The pages with each sequence's new tokens, [B, T, K, H]; padding is not written."""
        stored = tuple(map(as_stored, new, self.kv))
        (pages, form), fresh = jax.tree.flatten(self.kv), jax.tree.leaves(stored)
        where = self.table_BW, self.starts_B, self.counts_B
        return form.unflatten(kernels.paged_append(tuple(pages), tuple(fresh), *where))

    def rotates(self, q_BTNH: Float[Array, "B T N H"], new: tuple[Array, ...]) -> bool:
        """Whether one kernel rotates queries and keys and writes these new keys and values."""
        return current_mesh() is None and kernels.supports_rope_append(q_BTNH, new, self.kv)

    def rope_append(
        self, q_BTNH: Float[Array, "B T N H"], new: tuple[Array, Array], rotation: kernels.Rotation
    ) -> tuple[Float[Array, "B T N H"], KeysValues]:
        """`append` after RoPE and norm of queries and keys; also returns the queries."""
        pages, where = jax.tree.leaves(self.kv), (self.table_BW, self.starts_B, self.counts_B)
        return kernels.rope_append(q_BTNH, new, rotation, tuple(pages), *where)

    def attend(
        self,
        q_BTNH: Float[Array, "B T N H"],
        kv: KeysValues,
        window: int,
        softcap: float | None,
        scale: float,
    ) -> Float[Array, "B T N H"]:
        """Attention of each new token to itself and the `window` tokens before it."""
        k_PpKH, v_PpKH = kv
        return parallel.paged_attention(
            q_BTNH, k_PpKH, v_PpKH, self.table_BW, self.starts_B, self.counts_B, window=window,
            softcap=softcap, scale=scale,
        )  # fmt: skip


LayerCache = RowsOfLayer | PagesOfLayer


class Cache(NamedTuple):
    """State of decoding: keys and values per layer, and each sequence's last token, as embedding
    (for the smear) and as id (for `model.bigram_rows`)."""

    kv: tuple[KeysValues, ...]  # k_BSKH, v_BSKH of each layer that has its own
    lengths_B: Array
    last_BD: Array
    last_B: Array

    def layer(self, kv: KeysValues) -> RowsOfLayer:
        """The cache of one layer, with its keys and values `kv`."""
        return RowsOfLayer(kv, self.lengths_B)


class StackedPages(NamedTuple):
    """Pages of all layers, [L, pages, page size, K, H], for the kernel that runs all layers."""

    k_LPpKH: Array
    v_LPpKH: Array

    def apart(self) -> tuple[KeysValues, ...]:
        """The pages of each layer."""
        return tuple((k, v) for k, v in zip(self.k_LPpKH, self.v_LPpKH, strict=True))

    @classmethod
    def of(cls, kv: Iterable[KeysValues]) -> "StackedPages":
        """Stack the pages of the layers."""
        return cls(*(jnp.stack(arrays) for arrays in zip(*kv, strict=True)))


LayerPages = tuple[KeysValues, ...] | StackedPages


class PagedCache(NamedTuple):
    """KV pages per layer, and the page table and positions of each sequence's new tokens.

    table_BW: page table, the page indices of each sequence in order; entries after its last page
    are arbitrary. The first pages hold the model's virtual tokens, if any. starts_B: tokens of each
    sequence already in its pages, without virtual tokens. counts_B: number of new tokens, 0 in an
    idle slot. before_B: the token before the new ones; arbitrary at the start of a sequence.
    """

    kv: LayerPages  # of each layer that has its own
    table_BW: Int[Array, "B W"]
    starts_B: Int[Array, "B"]
    counts_B: Int[Array, "B"]
    before_B: Int[Array, "B"]

    def layer(self, kv: KeysValues) -> PagesOfLayer:
        """The paged cache of one layer, with its keys and values `kv`."""
        return PagesOfLayer(kv, self.table_BW, self.starts_B, self.counts_B)


def page_shapes(
    c: ResolvedModel, dtype: jnp.dtype, page_size: int, cache_dtype: str | None = None
) -> PyTree:
    """Shapes of one page, [1, page_size, K, H], of each layer that has its own keys and values.

    dtype: the compute dtype. cache_dtype: a key of CACHE_DTYPES, or None for the compute dtype.
    """
    layers = sum(not spec.kv_from for spec in make_plan(c))
    if c.mla is not None:
        heads, size, arrays = 1, c.mla.kv_rank + c.mla.rope_dim, 1
    else:
        heads, size, arrays = c.kv_heads, max(c.qk_dim, c.head_dim), 2
    one = jax.ShapeDtypeStruct((1, page_size, heads, size), dtype)
    if cache_dtype is not None:
        one = jax.eval_shape(lambda x: kernels.quantize(x, CACHE_DTYPES[cache_dtype]), one)
    return ((one,) * arrays,) * layers


def init_kv_cache(x_BTKH: Float[Array, "B T K H"], capacity: int, dtype: str | None) -> CacheArray:
    """A new cache that starts with `x` and has room for `capacity` tokens.

    dtype: a key of CACHE_DTYPES, or None for x's dtype."""
    x_BSKH = jnp.pad(x_BTKH, ((0, 0), (0, capacity - x_BTKH.shape[1]), (0, 0), (0, 0)))
    return x_BSKH if dtype is None else kernels.quantize(x_BSKH, CACHE_DTYPES[dtype])


def as_stored(x_BTKH: Array, cache: CacheArray) -> CacheArray:
    """Cast or quantize new keys or values to the cache's dtype."""
    if isinstance(cache, kernels.Quantized):
        return kernels.quantize(x_BTKH, cache.values_BSKH.dtype)
    return x_BTKH.astype(cache.dtype)
