"""Decode rates of a configuration's variants: what a smaller KV cache is worth in tokens/s."""

import concurrent.futures
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.decode_rate import MANY, cache_shapes, decode_steps, empty_cache, step_seconds
from benchmarks.kernels import failure
from benchmarks.record import describe
from benchmarks.timing import ceilings
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve, vocab_size_of
from jaxtrain.estimate.workload import SHORT
from jaxtrain.model import Cache, Transformer, cast, split
from jaxtrain.model.config import ResolvedModel
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import Params, Specs

BENCH = "decode_rate"
REPEATS = 3  # of a measurement
COMPILERS = 8  # programs at once: with cuBLAS alone there is no search among kernels on the GPU
COMPUTE = "compute"  # the cache dtype that is the model's own
# The switches of docs/howto/sharing.md, by the word that asks for them.
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "adjacent": ("model.share_kv=adjacent",),
    "global": ("model.share_kv=global",),
    "one_head": ("model.kv_heads=1",),
    "one_head_windows": ("model.kv_heads=1", "model.window_pattern=SSSSSL"),
    "one_head_adjacent": ("model.kv_heads=1", "model.share_kv=adjacent"),
    "latent": (
        "model.mla={kv_rank: 128, rope_dim: 32}",
        "model.qk_norm=false",
        "model.value_embeddings=false",
    ),
}


class Load(NamedTuple):
    """What a program decodes: rows, tokens that the cache holds of each, the cache's dtype."""

    batch: int
    prompt: int
    cache_dtype: str

    @property
    def kept(self) -> str | None:
        """As `Prefill` takes the dtype."""
        return None if self.cache_dtype == COMPUTE else self.cache_dtype


class Decoder(NamedTuple):
    """A variant with random weights on the device."""

    graphdef: nnx.GraphDef
    params: Params
    weight_bytes: int  # that a step reads


def bench_decode_models(
    name: str,
    words: Sequence[str],
    variant: str | None,
    prompts: Sequence[int],
    batches: Sequence[int],
    cache_dtypes: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """The record of a configuration, with the rows of one more variant each time.

    words: of VARIANTS (default all), and key=value overrides of every variant. floor_ms: what a
    step's weights and cache take at the rate of a copy that is measured in this call.
    """
    overrides = [word for word in words if "=" in word]
    asked = [word for word in words if "=" not in word] or list(VARIANTS)
    if unknown := [word for word in asked if word not in VARIANTS]:
        raise UserError(f"bench decode has no {unknown[0]}; it has {', '.join(VARIANTS)}")
    loads = [Load(*x) for x in itertools.product(batches, prompts, cache_dtypes)]
    dtype = compute_dtype(load_config(find_config(name), overrides).train.precision)
    limits, rows = ceilings(dtype), list[dict[str, Any]]()
    record = describe(BENCH, name, variant or SHORT[dtype.name], devices=1)
    for word in asked:
        one = make_decoder(name, [*overrides, *VARIANTS[word]], max(prompts), dtype)
        label = {"name": " ".join(VARIANTS[word]) or "none"}
        for row in decoder_rows(one, loads, dtype, limits.copy_gbps):
            rows.append(label | row)
            rate = row.get("failed") or f"{row['tokens_per_s']:,.0f} tokens/s"
            print(label["name"], row["shape"], row["backend"], rate, flush=True)
        yield record | {"rows": rows, "floor": limits._asdict()}


def make_decoder(name: str, overrides: Sequence[str], prompt: int, dtype: jnp.dtype) -> Decoder:
    """The model with a context that holds the longest prompt; windows stay what they are."""
    config = load_config(find_config(name), overrides)
    vocab_size = vocab_size_of(config.data)
    model = resolve(config, vocab_size).model
    context = max(prompt + MANY, model.context_length)
    model = model.model_copy(update={"context_length": context})
    graphdef, specs = split(Transformer(model, vocab_size))
    params = random_weights(specs, dtype)
    return Decoder(graphdef, params, weight_bytes(model, specs, params))


def random_weights(specs: Specs, dtype: jnp.dtype) -> Params:
    """Normal numbers in the compute dtype; made by the host, as nothing has to be compiled."""
    noise = np.random.default_rng(0).normal(0.0, 0.02, 1_000_003).astype(np.float32)
    like = jax.eval_shape(lambda p: cast(p, specs, dtype), shapes(specs))
    return jax.tree.map(lambda x: jnp.asarray(np.resize(noise, x.shape).astype(x.dtype)), like)


def shapes(specs: Specs) -> Params:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)


def weight_bytes(model: ResolvedModel, specs: Specs, params: Params) -> int:
    """Bytes that each step has to read: of embeddings it reads a few rows, unless the head is tied
    to them."""
    role = {name: spec.role for name, spec in flatten(specs).items()}
    return sum(
        x.nbytes
        for name, x in flatten(params).items()
        if role[name] != "embedding" or (model.tied_head and name == "embed")
    )


def decoder_rows(
    one: Decoder, loads: Sequence[Load], dtype: jnp.dtype, copy_gbps: float
) -> Iterator[dict[str, Any]]:
    """A row a load. All are compiled, some at a time, before the first is measured."""
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        futures = [pool.submit(compile_decode, one, load) for load in loads]
        concurrent.futures.wait(futures)
    for load, future in zip(loads, futures, strict=True):
        row = {"shape": f"{load.batch} x {load.prompt:,}"}
        row |= {"backend": load.kept or SHORT[dtype.name], "weight_bytes": one.weight_bytes}
        try:
            program = future.result()
            size = program.bytes_per_token
            seconds = step_seconds(run_of(one, load, program), REPEATS)
        except jax.errors.JaxRuntimeError as error:  # as of a cache that does not fit
            yield row | {"failed": failure(error)}
            continue
        held = load.prompt + MANY / 2  # on the average of the steps
        ms = 1e3 * seconds
        floor_ms = (one.weight_bytes + load.batch * held * size) / copy_gbps / 1e6
        row |= {"cache_bytes_per_token": size, "ms": ms, "tokens_per_s": load.batch / seconds}
        row |= {"floor_ms": floor_ms, "of_floor": floor_ms / ms, "compile_s": program.seconds}
        yield row


class Program(NamedTuple):
    """What decodes a load, the cache that it takes, and how long it was compiled."""

    compiled: jax.stages.Compiled
    cache: Cache  # shapes
    seconds: float

    @property
    def bytes_per_token(self) -> int:
        """Of the cache of all layers."""
        arrays = jax.tree.leaves(self.cache.kv)
        return sum(x.size * x.dtype.itemsize // (x.shape[0] * x.shape[1]) for x in arrays)


def compile_decode(one: Decoder, load: Load) -> Program:
    """The program of a load. JaxRuntimeError for one that does not fit."""
    begin = time.perf_counter()
    cache = cache_shapes(one.graphdef, one.params, load.batch, load.prompt, load.kept)
    tokens, count = jax.ShapeDtypeStruct((load.batch,), jnp.int32), jnp.int32(0)
    compiled = decode_steps.lower(one.graphdef, one.params, tokens, cache, count).compile()
    return Program(compiled, cache, time.perf_counter() - begin)


def run_of(one: Decoder, load: Load, program: Program) -> functools.partial[jax.Array]:
    """The program with all arguments but the number of steps."""
    cache = empty_cache(program.cache, load.prompt)
    tokens = jnp.ones(load.batch, jnp.int32)
    return functools.partial(program.compiled, one.params, tokens, cache)
