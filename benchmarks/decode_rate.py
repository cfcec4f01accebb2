"""Decode tokens per second of a whole model, without prefill."""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.cluster.xla_flags import jit
from jaxtrain.model import Cache, Decode, Prefill
from jaxtrain.model.config import round_up
from jaxtrain.model.prompts import CACHE_MULTIPLE
from jaxtrain.weights.params import Params

CACHED_TOKENS = 32  # default number of cached tokens per sequence at the start
FEW, MANY = 16, 80  # steps of the two measurements; CACHED_TOKENS + MANY fit the smallest cache
REPEATS = 7


def next_token(
    graphdef: nnx.GraphDef, params: Params, token_B: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """The greedy token after `token_B`, and the cache one token longer."""
    model = nnx.merge(graphdef, params)
    x_BD, _, longer = model(token_B[:, None], mode=Decode(cache))
    return jnp.argmax(model.logits(x_BD), axis=-1).astype(jnp.int32), longer


@jit("cublas", static_argnames="graphdef")
def decode_steps(
    graphdef: nnx.GraphDef, params: Params, token_B: jax.Array, cache: Cache, count: jax.Array
) -> jax.Array:
    """Greedy tokens after `count` decode steps on the device, for sequences of equal length and a
    cache without pages."""

    def one(_: jax.Array, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        return next_token(graphdef, params, *carry)

    return jax.lax.fori_loop(0, count, one, (token_B, cache))[0]


def cache_shapes(
    graphdef: nnx.GraphDef,
    params: Params,
    batch: int,
    cached_tokens: int = CACHED_TOKENS,
    cache_dtype: str | None = None,
) -> Cache:
    """Shapes of a cache with room for `cached_tokens` + MANY tokens per sequence."""
    capacity = round_up(cached_tokens + MANY, CACHE_MULTIPLE)

    def prefill(params: Params, tokens_BT: jax.Array) -> Cache | None:
        mode = Prefill(jnp.full(batch, CACHED_TOKENS, jnp.int32), capacity, cache_dtype)
        return nnx.merge(graphdef, params)(tokens_BT, mode=mode).cache

    return jax.eval_shape(prefill, params, jax.ShapeDtypeStruct((batch, CACHED_TOKENS), jnp.int32))


def empty_cache(like: Cache, cached_tokens: int = CACHED_TOKENS) -> Cache:
    """A cache of zeros with `cached_tokens` tokens per sequence."""
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return cache._replace(lengths_B=jnp.full_like(cache.lengths_B, cached_tokens))


def decode_rate(graphdef: nnx.GraphDef, params: Params, batch: int) -> float:
    """Tokens per second of all sequences together. params: on the device, in the compute dtype."""
    cache = empty_cache(cache_shapes(graphdef, params, batch))
    tokens = jnp.ones(batch, jnp.int32)
    run = functools.partial(decode_steps, graphdef, params, tokens, cache)
    return batch / step_seconds(run, REPEATS)


def step_seconds(run: Callable[[jax.Array], jax.Array], repeats: int) -> float:
    """Seconds per step; run(n) does n steps.

    Computed from the difference of MANY and FEW steps, which removes the call and the cache's copy;
    medians after a warm-up.
    """

    def seconds(count: int) -> float:
        steps, found = jnp.int32(count), []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(run(steps))
            found.append(time.perf_counter() - begin)
        return statistics.median(found)

    jax.block_until_ready(run(jnp.int32(FEW)))  # compiles
    return max(seconds(MANY) - seconds(FEW), 1e-9) / (MANY - FEW)
