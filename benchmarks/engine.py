"""Benchmark of the engine on random weights and prompts: tokens/s, time to first token."""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
import numpy as np
from jaxtrain_kernels.attention import paged
from jaxtrain_kernels.matmul import few_rows

from benchmarks.decode import bandwidth
from benchmarks.decode_models import COMPUTE, random_weights, weight_bytes
from benchmarks.engine_layers import layers_row
from benchmarks.engine_peers import Peers, peer_rows, with_peer_rows
from benchmarks.engine_profile import profile_decoding
from benchmarks.kernels import failure
from benchmarks.record import describe, stem
from benchmarks.timing import Ceilings, ceilings, rotating
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve, vocab_size_of
from jaxtrain.data.tokenizer.tokenizer import Tokenizer, text_of
from jaxtrain.estimate.workload import SHORT
from jaxtrain.inference.engine import Engine, EngineOptions, Request, SamplingParams
from jaxtrain.model import Transformer, split
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.kv_cache import CACHE_DTYPES, page_shapes
from jaxtrain.model.stack import codes_in_fragments, take_apart, transpose_large
from jaxtrain.settings import whole
from jaxtrain.weights.params import Params

BENCH = "engine"
CONCURRENT = 32  # concurrent requests for the time to first token
PAGE = 32  # tokens
REPEATS = 3
MEGAKERNEL = "megakernel"  # value of --few-rows
LONE = 8  # repeats of a lone request, and of one that joins others
SETTLE = 16  # decode calls before another request joins
FEW, LONG = 8, 512  # new tokens of a timed request, and of the running ones that it joins


class Served(NamedTuple):
    """A configuration with random weights on the device."""

    config: ResolvedModel
    graphdef: Any
    params: Params
    weight_bytes: int  # read per step
    vocab_size: int
    drafts: int
    decode_steps: int
    megakernel: bool | None

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return self.params["embed"].dtype

    def engine(self, slots: int, cache_dtype: str | None, adapt_steps: bool = False) -> Engine:
        """An engine with room for a full context in every slot, as far as memory allows."""
        options = EngineOptions(
            slots=slots,
            page_size=PAGE,
            cache_dtype=cache_dtype,
            drafts=self.drafts,
            decode_steps=self.decode_steps,
            adapt_steps=adapt_steps,
            megakernel=self.megakernel,
        )
        tokenizer = blank_tokenizer(self.vocab_size)
        return Engine(self.config, self.graphdef, self.params, tokenizer, options=options)


def blank_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer whose tokens are all "a", for untrained models."""
    pieces = (b"a",) * vocab_size
    decode = lambda ids: text_of(pieces, ids)
    return Tokenizer("bytes", b"", pieces, 0, lambda texts: [], decode)


class Asked(NamedTuple):
    """A workload of the engine: concurrent requests, prompt and new tokens, KV cache dtypes, draft
    tokens per step, decode steps per call, whether a single sequence uses the megakernel, and the
    peers to measure."""

    batches: Sequence[int]
    prompt: int
    new: int
    cache_dtypes: Sequence[str]
    drafts: int
    decode_steps: int
    megakernel: bool | None
    weights: str | None
    peers: Peers


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that only `engine` has."""
    parser.add_argument(
        "--new", type=whole(1), help="engine: new tokens of a request (256; RUN: 128)"
    )
    parser.add_argument(
        "--drafts", type=whole(1), help="engine: guessed tokens of a step (none; RUN: 2)"
    )
    parser.add_argument(
        "--draft-mtp", action="store_true",
        help="engine: one request, whose tokens the module of objective.name=mtp guesses",
    )  # fmt: skip
    parser.add_argument("--decode-steps", type=whole(1), help="engine: steps of a call (8)")
    parser.add_argument(
        "--weights", choices=("int8", "int4"),
        help="engine: form of the layers' matrices (the compute dtype)",
    )  # fmt: skip
    parser.add_argument(
        "--transformers",
        action="store_true",
        help="engine: Hugging Face's compiled decoding is timed first (needs torch)",
    )
    parser.add_argument(
        "--few-rows",
        choices=(*few_rows.BACKENDS, few_rows.FUSED, MEGAKERNEL),
        help="engine: the backend of products of a few rows; fused: and of what is between them; "
        "megakernel (one row's default where it serves): all layers are one kernel",
    )


def loads_of(a: argparse.Namespace) -> Asked:
    """The workload that a command line asks for."""
    prompt, dtypes = (a.prompts or (512,))[0], a.cache_dtypes or (COMPUTE,)
    return Asked(
        a.batches or (1, 32, 256), prompt, a.new or 256, dtypes, a.drafts or 0, a.decode_steps or 8,
        {MEGAKERNEL: True, None: None}.get(a.few_rows, False), a.weights,
        Peers(a.transformers, a.peer),
    )  # fmt: skip


def bench_engine(
    name: str,
    overrides: Sequence[str],
    variant: str | None,
    asked: Asked,
    profile_dir: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the record of a configuration, each time with one more row.

    Rows per batch: tokens/s of all requests from the first prompt to the last token, and tokens/s
    while all of them decode. The floor is reading weights and cache once per step, at the copy rate
    measured in this call. profile_dir: folder for a trace of each batch. The peers' rows follow
    ours.
    """
    batches, prompt, new, cache_dtypes, drafts, steps, mega, form, who = asked
    sizes = {"batches": batches, "prompt": prompt, "new": new, "many": CONCURRENT}
    peers = peer_rows(who, name, overrides, sizes | {"repeats": REPEATS})
    config = load_config(find_config(name), overrides)
    dtype, vocab_size = compute_dtype(config.train.precision), vocab_size_of(config.data)
    model = resolve(config, vocab_size).model
    model = model.model_copy(update={"context_length": max(prompt + new, model.context_length)})
    graphdef, specs = split(Transformer(model, vocab_size))
    params = random_weights(specs, dtype, form)
    read = weight_bytes(model, specs, params)
    take_apart(params, specs)
    transpose_large(params, specs, max(batches))
    codes_in_fragments(params, specs, max(batches) * (1 + drafts))
    one = Served(model, graphdef, params, read, vocab_size, drafts, steps, mega)
    limits, rows = ceilings(dtype), list[dict[str, Any]]()
    record = describe(BENCH, name, variant or form or SHORT[dtype.name], devices=1)
    record |= {"workload": {"prompt": prompt, "new": new, "page_size": PAGE, "drafts": drafts}}
    record["workload"] |= {"decode_steps": steps, "megakernel": mega}
    for cache_dtype in cache_dtypes:
        kept = None if cache_dtype == COMPUTE else cache_dtype
        label = {"name": "engine", "backend": kept or SHORT[dtype.name]}
        for batch in batches:
            shape = {"shape": f"{batch} x ({prompt} + {new})"}
            target = profile_dir and profile_dir / f"{stem(record)}-{label['backend']}-{batch}"
            try:
                found = rate(one, batch, kept, prompt, new, limits, target)
            except jax.errors.JaxRuntimeError as error:  # such as a cache that does not fit
                found = {"failed": failure(error)}
            rows.append(label | shape | found)
            yield record | {"rows": with_peer_rows(rows, peers), "floor": limits._asdict()}
            rows += attention_rows(one, batch, kept, prompt + new // 2, limits)
            if batch == 1 and kept is None and one.megakernel:
                try:
                    row = layers_row(one.config, graphdef, params, prompt + new // 2, limits)
                except jax.errors.JaxRuntimeError as error:  # experimental: other rows continue
                    row = {"name": "decode_layers", "failed": failure(error)}
                rows.append(row)
        # More rows than a few would restore the order of the codes in each step.
        if form is None or max(batches) >= CONCURRENT:
            first = first_tokens(one, kept, prompt)
            rows.append(
                label | {"name": "first_token", "shape": f"{CONCURRENT} x {prompt}"} | first
            )
        yield record | {"rows": with_peer_rows(rows, peers), "floor": limits._asdict()}


def requests_of(one: Served, batch: int, prompt: int, new: int, seed: int) -> list[Request]:
    """Requests with random prompts that share no prefix."""
    ids = np.random.default_rng(seed).integers(0, one.vocab_size, (batch, prompt)).tolist()
    how = SamplingParams(max_tokens=new, ignore_stop=True)
    return [Request(f"{seed}-{i}", tuple(x), how._replace(seed=i)) for i, x in enumerate(ids)]


class Timing(NamedTuple):
    """Seconds of serving some requests: to each one's first token, and at each step."""

    first: dict[str, float]
    steps: list[tuple[float, int]]  # (seconds, new tokens so far)

    @property
    def total(self) -> float:
        return self.steps[-1][0]

    def seconds_per_token(self, batch: int) -> float:
        """Seconds per new token of each request, while the whole batch decodes."""
        begin = max(self.first.values())
        inside = [(at, tokens) for at, tokens in self.steps if at >= begin]
        (start, before), (end, after) = inside[0], inside[-1]
        return (end - start) / max(after - before, 1) * batch


def serve(engine: Engine, requests: Sequence[Request]) -> Timing:
    """Add all requests at once, and run them to their end."""
    begin, first, steps, tokens = time.perf_counter(), dict[str, float](), [], 0
    for request in requests:
        engine.add(request)
    while engine.busy:
        updates = engine.step()
        now = time.perf_counter() - begin
        for update in updates:
            tokens += len(update.tokens)
            if update.tokens:
                first.setdefault(update.id, now)
        if updates:
            steps.append((now, tokens))
    return Timing(first, steps)


def rate(
    one: Served,
    batch: int,
    cache_dtype: str | None,
    prompt: int,
    new: int,
    limits: Ceilings,
    target: Path | None = None,
) -> dict[str, Any]:
    """A row: tokens/s of a batch of requests, medians after a warm-up. target: path of a trace."""
    engine = one.engine(batch, cache_dtype)
    timing = lambda seed: serve(engine, requests_of(one, batch, prompt, new, seed))
    begin = time.perf_counter()
    programs = engine.warm_up(requests_of(one, batch, prompt, new, 0))
    compiling = time.perf_counter() - begin
    timing(0)
    warm = [timing(1 + i) for i in range(REPEATS)]
    total = statistics.median(one.total for one in warm)
    each = statistics.median(one.seconds_per_token(batch) for one in warm)
    floor_ms = floor_bytes(one, batch, cache_dtype, prompt + new / 2) / limits.copy_gbps / 1e6
    if target is not None:
        profile_decoding(engine, requests_of(one, batch, prompt, new, 1 + REPEATS), target, limits)
    return {
        "tokens_per_s": batch * new / total,
        "ms": 1e3 * each,
        "decode_tokens_per_s": batch / each,
        "floor_ms": floor_ms,
        "of_floor": floor_ms / (1e3 * each),
        "weight_bytes": one.weight_bytes,
        "compile_s": compiling,
        "programs": programs,
        "preemptions": engine.stats().preemptions,
    }


def floor_bytes(one: Served, batch: int, cache_dtype: str | None, cached_tokens: float) -> float:
    """Bytes a step must read: weights, and each sequence's keys and values inside the windows."""
    layers = page_shapes(one.config, one.dtype, 1, cache_dtype)
    specs = [spec for spec in Transformer(one.config, one.vocab_size).plan if not spec.kv_from]
    seen = [
        cached_tokens if spec.window is None else min(cached_tokens, spec.window + 1)
        for spec in specs
    ]
    sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer)) for layer in layers]
    return one.weight_bytes + batch * sum(s * n for s, n in zip(sizes, seen, strict=True))


def serving(q_BTNH: jax.Array, k_PpKH: Any) -> list[str]:
    """Backends of paged attention that support these queries and pages."""
    reasons = paged.reasons(q_BTNH, k_PpKH)
    return [name for name in paged.BACKENDS if reasons[name] is None]


def attention_rows(
    one: Served, batch: int, cache_dtype: str | None, cached_tokens: int, limits: Ceilings
) -> Iterator[dict[str, Any]]:
    """Rows: attention of one token per request over `cached_tokens` tokens, by each backend."""
    c, W = one.config, -(-cached_tokens // PAGE)
    layer = page_shapes(c, one.dtype, PAGE, cache_dtype)[0]
    K, H = jax.tree.leaves(layer)[0].shape[2:]
    N, dtype = c.heads, one.dtype

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        pages = [
            jax.random.normal(k, (batch * W, PAGE, K, H), dtype) for k in jax.random.split(key)
        ]
        if cache_dtype is not None:
            store = functools.partial(kernels.quantize, dtype=CACHE_DTYPES[cache_dtype])
            pages = [jax.jit(store)(x) for x in pages]
        q_B1NH = jax.random.normal(key, (batch, 1, N, H), dtype)
        table_BW = jax.random.permutation(key, batch * W).reshape(batch, W)
        starts_B = jnp.full(batch, cached_tokens - 1, jnp.int32)
        return q_B1NH, *pages, table_BW.astype(jnp.int32), starts_B, jnp.ones(batch, jnp.int32)

    sets = rotating(inputs)
    size = sum(x.nbytes for x in jax.tree.leaves(sets[0]))
    for backend in serving(*sets[0][:2]):
        attend = functools.partial(kernels.paged_attention, implementation=backend)
        row = {"name": "paged_attention", "shape": f"{batch} x {cached_tokens}"}
        kind = f"{backend}, {cache_dtype or SHORT[dtype.name]}"
        yield row | {"backend": kind} | bandwidth(attend, sets, size, limits.copy_gbps)


class FirstTokens(NamedTuple):
    """Milliseconds from the arrival of requests to their first tokens, and `Engine.step` calls
    until then. host_ms: of each set of requests, what the engine's thread works for them."""

    ms: list[float]
    steps: list[int]
    host_ms: list[float]

    @classmethod
    def empty(cls) -> "FirstTokens":
        return cls([], [], [])

    def add(self, other: "FirstTokens") -> None:
        self.ms.extend(other.ms)
        self.steps.extend(other.steps)
        self.host_ms.extend(other.host_ms)

    def columns(self, prefix: str, *shares: int) -> dict[str, float]:
        """Columns of a record: the medians, and the percentiles `shares` of the milliseconds."""
        found = {f"{prefix}_ms": statistics.median(self.ms)}
        found |= {f"{prefix}_p{p}_ms": float(np.percentile(self.ms, p)) for p in shares}
        steps, host = (statistics.median(x) for x in (self.steps, self.host_ms))
        return found | {f"{prefix}_steps": steps, f"{prefix}_host_ms": host}


def wait_first(engine: Engine, requests: Sequence[Request]) -> FirstTokens:
    """Add requests at once, and step until each has its first token. Other requests may be running
    already."""
    begin, open_ids, found = time.perf_counter(), set[str](), FirstTokens.empty()
    host = time.thread_time()
    for request in requests:
        engine.add(request)
        open_ids.add(request.id)
    for step in itertools.count(1):
        updates = engine.step()
        for update in updates:
            if update.tokens and update.id in open_ids:
                open_ids.discard(update.id)
                found.ms.append(1e3 * (time.perf_counter() - begin))
                found.steps.append(step)
        if not open_ids:
            found.host_ms.append(1e3 * (time.thread_time() - host))
            return found
    raise AssertionError("unreachable")


def finish(engine: Engine) -> None:
    """Step until all requests have ended."""
    while engine.busy:
        engine.step()


def first_tokens(one: Served, cache_dtype: str | None, prompt: int) -> dict[str, Any]:
    """A row: milliseconds to the first token of a lone request, of CONCURRENT requests at once (and
    of the last of them), and of one that joins CONCURRENT - 1 decoding ones."""
    engine = one.engine(CONCURRENT, cache_dtype, adapt_steps=True)  # as in a server
    seeds = itertools.count()
    ask = lambda count, new: requests_of(one, count, prompt, new, next(seeds))
    alone, many, last, joining = (FirstTokens.empty() for _ in range(4))

    def measure(into: FirstTokens, requests: Sequence[Request]) -> FirstTokens:
        found = wait_first(engine, requests)
        into.add(found)
        return found

    for into in (FirstTokens.empty(), alone):  # the first pass compiles
        for _ in range(LONE * REPEATS):
            measure(into, ask(1, FEW))
            finish(engine)
    for into, ends in ((FirstTokens.empty(), []), *[(many, last.ms)] * REPEATS):
        ends.append(max(measure(into, ask(CONCURRENT, FEW)).ms))
        finish(engine)
    for into in (FirstTokens.empty(), *[joining] * REPEATS):
        wait_first(engine, ask(CONCURRENT - 1, LONG))  # they outlast the request that joins them
        for _ in range(SETTLE):
            engine.step()
        for _ in range(LONE):
            measure(into, ask(1, 1))
            engine.step()
        for id in list(engine.by_id):
            engine.cancel(id)
        finish(engine)
    found = alone.columns("alone", 99) | many.columns("median", 99)
    return found | {"last_ms": statistics.median(last.ms)} | joining.columns("joining", 99)
