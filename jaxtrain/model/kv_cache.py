"""Caches of keys and values: one array of rows (`Cache`), or pages that rows share (`PagedCache`).

A layer sees its own part: `append` writes the keys and values of new tokens, `attend` reads them
back. An inference engine keeps them in pages: rows have any length, and no row moves when another
begins or ends (Kwon et al. 2023, arXiv:2309.06180).
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

CacheArray = Array | kernels.Quantized
CACHE_DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
# Of a layer: k_BTKH and v_BTKH, or k_BSKH and v_BSKH; with `model.mla` one array, of latents.
KeysValues = tuple[CacheArray, ...]


class RowsOfLayer(NamedTuple):
    """Keys and values of one layer; row b is valid below lengths_B[b], this token included."""

    kv: KeysValues
    lengths_B: Array

    def append(self, new: tuple[Array, ...]) -> KeysValues:
        """The cache with one more token a row, its last; new: keys, values, each [B, 1, K, H]."""
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
        """One token a row attends to the last `window` tokens of the cache and itself, its last."""
        k_BSKH, v_BSKH = kv
        y_BNH = kernels.decode_attention(
            q_B1NH[:, 0], k_BSKH, v_BSKH, self.lengths_B, window=window, softcap=softcap,
            scale=scale,
        )  # fmt: skip
        return y_BNH[:, None]


class PagesOfLayer(NamedTuple):
    """Keys and values of one layer in pages: arrays [pages, page size, K, H].

    Row b has the pages table_BW[b] and new tokens at starts_B[b] .. starts_B[b] + counts_B[b] - 1.
    """

    kv: KeysValues
    table_BW: Array
    starts_B: Array
    counts_B: Array

    def append(self, new: tuple[Array, ...]) -> KeysValues:
        """The pages with the new tokens of each row, [B, T, K, H]; of padding nothing is kept."""
        stored = tuple(map(as_stored, new, self.kv))
        (pages, form), fresh = jax.tree.flatten(self.kv), jax.tree.leaves(stored)
        where = self.table_BW, self.starts_B, self.counts_B
        return form.unflatten(kernels.paged_append(tuple(pages), tuple(fresh), *where))

    def attend(
        self,
        q_BTNH: Float[Array, "B T N H"],
        kv: KeysValues,
        window: int,
        softcap: float | None,
        scale: float,
    ) -> Float[Array, "B T N H"]:
        """The new tokens attend to the last `window` tokens before each, and to itself."""
        k_PpKH, v_PpKH = kv
        return parallel.paged_attention(
            q_BTNH, k_PpKH, v_PpKH, self.table_BW, self.starts_B, self.counts_B, window=window,
            softcap=softcap, scale=scale,
        )  # fmt: skip


LayerCache = RowsOfLayer | PagesOfLayer


class Cache(NamedTuple):
    """What decoding keeps: keys and values per layer, and of each row's last token the embedding
    (for the smear) and the id (for `model.bigram_rows`)."""

    kv: tuple[KeysValues, ...]  # k_BSKH, v_BSKH of each layer that has its own
    lengths_B: Array
    last_BD: Array
    last_B: Array

    def layer(self, kv: KeysValues) -> RowsOfLayer:
        """What a layer with these keys and values sees."""
        return RowsOfLayer(kv, self.lengths_B)


class StackedPages(NamedTuple):
    """Pages of all layers, [L, pages, page size, K, H]: what one kernel of all layers reads."""

    k_LPpKH: Array
    v_LPpKH: Array

    def apart(self) -> tuple[KeysValues, ...]:
        """The pages of each layer."""
        return tuple((k, v) for k, v in zip(self.k_LPpKH, self.v_LPpKH, strict=True))

    @classmethod
    def of(cls, kv: Iterable[KeysValues]) -> "StackedPages":
        """The pages of each layer, stacked."""
        return cls(*(jnp.stack(arrays) for arrays in zip(*kv, strict=True)))


LayerPages = tuple[KeysValues, ...] | StackedPages


class PagedCache(NamedTuple):
    """Pages of keys and values per layer, and where each row's new tokens go.

    table_BW: the numbers of each row's pages, in its order; behind its last, any. The first ones
    hold the model's virtual tokens, if it has some. starts_B: tokens of each row that the pages
    hold already, virtual ones not counted. counts_B: its new tokens, 0 in an idle row. before_B:
    the token in front of the new ones; any at the start of a text.
    """

    kv: LayerPages  # of each layer that has its own
    table_BW: Int[Array, "B W"]
    starts_B: Int[Array, "B"]
    counts_B: Int[Array, "B"]
    before_B: Int[Array, "B"]

    def layer(self, kv: KeysValues) -> PagesOfLayer:
        """What a layer with these keys and values sees."""
        return PagesOfLayer(kv, self.table_BW, self.starts_B, self.counts_B)


def page_shapes(
    c: ResolvedModel, dtype: jnp.dtype, page_size: int, cache_dtype: str | None = None
) -> PyTree:
    """Shapes of one page, [1, page_size, K, H], of each layer that has its own keys and values.

    dtype: of the computation. cache_dtype: of CACHE_DTYPES, or None: that of the computation.
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
    """The start of a cache with room for `capacity` tokens; dtype: of CACHE_DTYPES, or None as it
    is."""
    x_BSKH = jnp.pad(x_BTKH, ((0, 0), (0, capacity - x_BTKH.shape[1]), (0, 0), (0, 0)))
    return x_BSKH if dtype is None else kernels.quantize(x_BSKH, CACHE_DTYPES[dtype])


def as_stored(x_BTKH: Array, cache: CacheArray) -> CacheArray:
    """New keys or values in the form of a cache."""
    if isinstance(cache, kernels.Quantized):
        return kernels.quantize(x_BTKH, cache.values_BSKH.dtype)
    return x_BTKH.astype(cache.dtype)
