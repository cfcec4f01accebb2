"""Decode rates of a configuration's variants, which have smaller KV caches."""

import concurrent.futures
import dataclasses
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
from jaxtrain.weights import WEIGHTS
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import Params, ParamSpec, Specs, is_block_matrix
from jaxtrain.weights.quantized import QuantizedWeight

BENCH = "decode_rate"
REPEATS = 3  # repeats of a measurement
COMPILERS = 8  # programs compiled at once: with cuBLAS only, nothing is autotuned on the GPU
DEVIATION = 0.02  # of random weights
COMPUTE = "compute"  # cache dtype = compute dtype
# The switches of docs/howto/sharing.md, by variant name.
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
    """A decode workload: sequences, cached tokens of each, cache dtype."""

    batch: int
    prompt: int
    cache_dtype: str

    @property
    def kept(self) -> str | None:
        """The cache dtype as `Prefill` takes it."""
        return None if self.cache_dtype == COMPUTE else self.cache_dtype


class Decoder(NamedTuple):
    """A variant with random weights on the device."""

    graphdef: nnx.GraphDef
    params: Params
    weight_bytes: int  # read per step


def bench_decode_models(
    name: str,
    words: Sequence[str],
    variant: str | None,
    prompts: Sequence[int],
    batches: Sequence[int],
    cache_dtypes: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield the record of a configuration, each time with one more variant's rows.

    words: names in VARIANTS (default all), and key=value overrides for all variants. floor_ms: time
    to read a step's weights and cache at the copy rate measured in this call.
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
    """The model with a context that fits the longest prompt; windows stay unchanged."""
    config = load_config(find_config(name), overrides)
    vocab_size = vocab_size_of(config.data)
    model = resolve(config, vocab_size).model
    context = max(prompt + MANY, model.context_length)
    model = model.model_copy(update={"context_length": context})
    graphdef, specs = split(Transformer(model, vocab_size))
    params = random_weights(specs, dtype)
    return Decoder(graphdef, params, weight_bytes(model, specs, params))


def random_weights(specs: Specs, dtype: jnp.dtype, form: str | None = None) -> Params:
    """Normal random weights in the compute dtype; made on the host, which needs no compilation.
    form: of the blocks' matrices, `int8` or `int4`; random codes are made on the device."""
    noise = np.random.default_rng(0).normal(0.0, DEVIATION, 1_000_003).astype(np.float32)
    like = jax.eval_shape(lambda p: cast(p, specs, dtype), shapes(specs))

    def made(x: jax.ShapeDtypeStruct, spec: ParamSpec) -> Any:
        if form is not None and is_block_matrix(spec):
            return random_codes(x, form)
        return jnp.asarray(np.resize(noise.astype(x.dtype), x.shape))

    return jax.tree.map(made, like, specs)


def random_codes(like: jax.ShapeDtypeStruct, form: str) -> QuantizedWeight:
    """Uniform random codes of matrices, with scales that give all weights one deviation."""
    packed = jax.eval_shape(WEIGHTS[form].encode, like)
    steps = {"int8": 2**8, "int4": 2**4}[form] / 12**0.5  # deviation of the codes
    codes = jax.random.bits(jax.random.key(0), packed.codes.shape, jnp.uint8)
    scales = jnp.full(packed.scales.shape, DEVIATION / steps, packed.scales.dtype)
    codes = jax.lax.bitcast_convert_type(codes, packed.codes.dtype)
    return dataclasses.replace(packed, codes=codes, scales=scales)


def shapes(specs: Specs) -> Params:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)


def weight_bytes(model: ResolvedModel, specs: Specs, params: Params) -> int:
    """Bytes of weights that each step reads. Embedding tables do not count, except one tied to the
    head."""
    role = {name: spec.role for name, spec in flatten(specs).items()}
    return sum(
        array.nbytes
        for name, x in flatten(params).items()
        for array in jax.tree.leaves(x)
        if role[name] != "embedding" or (model.tied_head and name == "embed")
    )


def decoder_rows(
    one: Decoder, loads: Sequence[Load], dtype: jnp.dtype, copy_gbps: float
) -> Iterator[dict[str, Any]]:
    """Yield a row per load. All are compiled, several at a time, before the first measurement."""
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
        except jax.errors.JaxRuntimeError as error:  # such as a cache that does not fit
            yield row | {"failed": failure(error)}
            continue
        cached_tokens = load.prompt + MANY / 2  # mean over the steps
        ms = 1e3 * seconds
        floor_ms = (one.weight_bytes + load.batch * cached_tokens * size) / copy_gbps / 1e6
        row |= {"cache_bytes_per_token": size, "ms": ms, "tokens_per_s": load.batch / seconds}
        row |= {"floor_ms": floor_ms, "of_floor": floor_ms / ms, "compile_s": program.seconds}
        yield row


class Program(NamedTuple):
    """A compiled decode program, the cache that it takes, and its compile time."""

    compiled: jax.stages.Compiled
    cache: Cache  # shapes
    seconds: float

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes per token, over all layers."""
        arrays = jax.tree.leaves(self.cache.kv)
        return sum(x.size * x.dtype.itemsize // (x.shape[0] * x.shape[1]) for x in arrays)


def compile_decode(one: Decoder, load: Load) -> Program:
    """Compile the program of a load. Raises JaxRuntimeError if it does not fit."""
    begin = time.perf_counter()
    cache = cache_shapes(one.graphdef, one.params, load.batch, load.prompt, load.kept)
    tokens, count = jax.ShapeDtypeStruct((load.batch,), jnp.int32), jnp.int32(0)
    compiled = decode_steps.lower(one.graphdef, one.params, tokens, cache, count).compile()
    return Program(compiled, cache, time.perf_counter() - begin)


def run_of(one: Decoder, load: Load, program: Program) -> functools.partial[jax.Array]:
    """The program with all arguments bound but the number of steps."""
    cache = empty_cache(program.cache, load.prompt)
    tokens = jnp.ones(load.batch, jnp.int32)
    return functools.partial(program.compiled, one.params, tokens, cache)
