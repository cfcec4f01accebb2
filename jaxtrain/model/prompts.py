"""Prefill: prompts run as whole sequences, and their keys and values fill a KV cache."""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxtrain.model.config import check_decoder, round_up
from jaxtrain.model.kv_cache import Cache, PagedCache, StackedPages, init_kv_cache
from jaxtrain.model.modes import Output, Prefill

if TYPE_CHECKING:
    from jaxtrain.model.transformer import Transformer

CACHE_MULTIPLE = 128  # room for virtual tokens is a multiple of this, so that a cache can be split


def run_prompts(model: "Transformer", tokens_BT: Int[Array, "B T"], mode: Prefill) -> Output:
    """Prefill prompts into a new contiguous cache."""
    check_decoder(model.config)
    rows, ends = jnp.arange(tokens_BT.shape[0]), mode.lengths_B - 1
    x_BTD, plain_BTD = model.embed_tokens(tokens_BT, None)
    out = model.all_layers(x_BTD, tokens_BT, keep_kv=True)
    states_BTD = model.final_norm(out.x_BTD, out.middle_BTD)
    capacity = mode.capacity + round_up(model.config.virtual, CACHE_MULTIPLE)
    keep = lambda x: init_kv_cache(x, capacity, mode.cache_dtype)
    layers = tuple(tuple(map(keep, kv)) for kv in out.kv)
    last = plain_BTD[rows, ends], tokens_BT[rows, ends]
    cache = Cache(layers, mode.lengths_B + model.config.virtual, *last)
    return Output(states_BTD[rows, ends], cache=cache)


def run_first_chunks(
    model: "Transformer", tokens_BT: Int[Array, "B T"], cache: PagedCache
) -> Output:
    """Prefill sequences whose pages have no tokens, virtual ones included: no page is read."""
    x_BTD, _ = model.embed_tokens(tokens_BT, None)
    out = model.all_layers(x_BTD, tokens_BT, keep_kv=True)
    assert not isinstance(cache.kv, StackedPages)
    kv = tuple(
        cache.layer(pages).append(tuple(x for x in new if isinstance(x, Array)))
        for pages, new in zip(cache.kv, out.kv, strict=True)
    )
    states_BTD = model.final_norm(out.x_BTD, out.middle_BTD)
    return Output(states_BTD, cache=cache._replace(kv=kv))
