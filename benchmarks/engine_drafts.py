"""Benchmark of speculative decoding of one request: tokens per second with and without draft
tokens, and the share of accepted ones.

    python -m benchmarks engine RUN                                    its held-out text
    python -m benchmarks engine RUN --text FILE
    python -m benchmarks engine --config gpt_d12 objective.name=mtp --draft-mtp    random weights

With random weights, drafts are accepted only by chance, so only the times are meaningful.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from benchmarks.decode_models import random_weights
from benchmarks.engine import PAGE, blank_tokenizer, serve
from benchmarks.record import Record, describe
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.compress.quantize import text_config
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import resolve, vocab_size_of
from jaxtrain.data import Tokenizer, validation_batches
from jaxtrain.estimate.arguments import option_given
from jaxtrain.estimate.workload import SHORT
from jaxtrain.evaluation.evaluate import prepare_validation
from jaxtrain.inference.arguments import DraftOptions
from jaxtrain.inference.engine import Engine, EngineOptions, EngineStats, Request, SamplingParams
from jaxtrain.inference.engine.load import params_of
from jaxtrain.model import Transformer, split
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.stack import take_apart
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Params

BENCH = "engine_drafts"
REPEATS = 5
TEXTS = 8  # prompts, one after another
TEMPERATURES = (0.0, 0.8)
GUESSES = 2  # default of the most draft tokens per step
OTHERS = ("batches", "cache_dtypes", "few_rows", "profile", "peer", "transformers", "weights")


class SpeculativeLoad(NamedTuple):
    """A workload: prompt and new tokens, most draft tokens per step, decode steps per call, and the
    text that prompts are taken from (None: the run's held-out text)."""

    prompt: int
    new: int
    most: int
    decode_steps: int
    text: Path | None


class DraftedModel(NamedTuple):
    """A model on the device that continues prompts. trained_steps: 0: random weights."""

    name: str
    config: ResolvedModel
    graphdef: nnx.GraphDef
    params: Params
    tokenizer: Tokenizer
    prompts: list[tuple[int, ...]]
    trained_steps: int

    def requests(self, load: SpeculativeLoad, temperature: float) -> list[Request]:
        """One request per prompt, without stop tokens."""
        how = SamplingParams(load.new, temperature, ignore_stop=True)
        asked = enumerate(self.prompts)
        return [Request(str(i), prompt, how._replace(seed=i)) for i, prompt in asked]


def runs_of(a: argparse.Namespace) -> list[str]:
    """The run directories of an `engine` command line."""
    return [one for one in a.overrides if "=" not in one]


def is_drafted(a: argparse.Namespace) -> bool:
    """Whether an `engine` command line asks for speculative decoding. Raises UserError for options
    that do not apply."""
    if not (runs_of(a) or a.draft_mtp):
        if a.text:
            raise UserError("--text is for bench engine with a RUN, whose prompts it gives")
        return False
    if stray := option_given(a, *OTHERS):
        raise UserError(f"{stray} is for bench engine without a RUN and without --draft-mtp")
    if runs_of(a) and a.config:
        raise UserError("bench engine takes a RUN or --config, not both")
    if a.text and not runs_of(a):
        raise UserError("--text is for bench engine with a RUN; random weights read random tokens")
    return True


def bench_drafts(a: argparse.Namespace) -> Iterator[Record]:
    """Yield the records of a command line, each again with its further rows."""
    prompt, new = (a.prompts or (64,))[0], a.new or 128
    load = SpeculativeLoad(prompt, new, a.drafts or GUESSES, a.decode_steps or 8, a.text)
    runs = runs_of(a)
    models = (
        (trained(run, load) for run in runs)
        if runs
        else (untrained(config, a.overrides, load) for config in a.config or ["gpt_d12"])
    )
    for model in models:
        yield from records_of(model, load, a.variant)


def trained(run: str, load: SpeculativeLoad) -> DraftedModel:
    """The model of a run directory, with prompts from text that it was not trained on."""
    saved = load_saved(Path(run))
    c, need = saved.config.model, load.prompt + load.new
    if need > c.context_length:
        raise UserError(
            f"{load.prompt} tokens of a prompt and {load.new} new ones exceed the context of "
            f"{c.context_length} that {run} was trained with; give fewer by --prompts and --new"
        )
    params = params_of(saved, None)
    take_apart(params, saved.specs)
    store = prepare_validation(saved, text_config(saved.config, load.text))
    rows = validation_batches(store, batch_size=TEXTS, sequence_length=load.prompt)
    batches = [batch for batch in rows if batch.weights_BT.all()]  # the last one may have padding
    if not batches:
        raise UserError(f"{load.text or run}: the text is too short for {TEXTS} prompts")
    # Prompts spread over the text: one row from each of several batches, as far as there are some.
    places = np.linspace(0, len(batches) - 1, TEXTS).round().astype(int).tolist()
    prompts = [tuple(batches[at].tokens_BT[i].tolist()) for i, at in enumerate(places)]
    name, steps = saved.config.run.name, saved.config.train.steps
    return DraftedModel(name, c, saved.graphdef, params, saved.tokenizer, prompts, steps)


def untrained(name: str, overrides: Sequence[str], load: SpeculativeLoad) -> DraftedModel:
    """A configuration with random weights, with prompts of random tokens."""
    config = load_config(find_config(name), overrides)
    dtype, vocab_size = compute_dtype(config.train.precision), vocab_size_of(config.data)
    c = resolve(config, vocab_size).model
    c = c.model_copy(update={"context_length": max(load.prompt + load.new, c.context_length)})
    graphdef, specs = split(Transformer(c, vocab_size))
    params = random_weights(specs, dtype)
    take_apart(params, specs)
    ids = np.random.default_rng(0).integers(0, vocab_size, (TEXTS, load.prompt)).tolist()
    prompts, tokenizer = list(map(tuple, ids)), blank_tokenizer(vocab_size)
    return DraftedModel(name, c, graphdef, params, tokenizer, prompts, 0)


def records_of(model: DraftedModel, load: SpeculativeLoad, variant: str | None) -> Iterator[Record]:
    """Yield the record with a row per temperature and draft method; the first drafts nothing."""
    dtype = SHORT[model.params["embed"].dtype.name]
    record = describe(BENCH, model.name, variant or dtype, devices=1)
    record |= {"workload": load._asdict() | {"text": load.text and load.text.name}}
    record["workload"] |= {"texts": TEXTS, "trained_steps": model.trained_steps}
    ways = [DraftOptions()]
    for drafts in range(1, load.most + 1):
        ways += [DraftOptions(drafts)] + [DraftOptions(drafts, None, True)] * bool(model.config.mtp)
    rows = list[dict[str, Any]]()
    for temperature in TEMPERATURES:
        rows += measure_ways(model, load, temperature, ways)
        yield record | {"rows": rows}


def label_of(way: DraftOptions) -> str:
    """The draft method, and its draft tokens per step."""
    if not way.drafts:
        return "no guesses"
    return f"{'module' if way.draft_mtp else 'text'}, {way.drafts} a step"


class Warm(NamedTuple):
    """An engine after one pass over all prompts, with that pass's draft statistics and outputs, and
    its compile seconds. Later passes add their seconds in total, and after the first tokens."""

    way: DraftOptions
    engine: Engine
    stats: EngineStats
    texts: list[tuple[int, ...]]
    compile_s: float
    total: list[float]
    decoding: list[float]


def warm_engine(
    model: DraftedModel, load: SpeculativeLoad, requests: Sequence[Request], way: DraftOptions
) -> Warm:
    """Make and warm up an engine with one slot and no prefix cache."""
    options = EngineOptions(
        slots=1, page_size=PAGE, context=load.prompt + load.new, decode_steps=load.decode_steps,
        prefix_cache=False, megakernel=False, **way._asdict(),
    )  # fmt: skip
    parts = model.config, model.graphdef, model.params, model.tokenizer
    engine = Engine(*parts, options=options)
    begin = time.perf_counter()
    engine.warm_up(requests[:1])
    compiling = time.perf_counter() - begin
    texts = [tokens_of(engine, request) for request in requests]
    return Warm(way, engine, engine.stats(), texts, compiling, [], [])


def measure_ways(
    model: DraftedModel, load: SpeculativeLoad, temperature: float, ways: Sequence[DraftOptions]
) -> Iterator[dict[str, Any]]:
    """Yield a row per draft method. A pass runs all prompts one after another. The methods
    alternate passes, so that other load affects all. Rates are of the median pass."""
    requests = model.requests(load, temperature)
    warm = [warm_engine(model, load, requests, way) for way in ways]
    for _, one in itertools.product(range(REPEATS), warm):
        timings = [serve(one.engine, [request]) for request in requests]
        one.total.append(sum(t.total for t in timings))
        one.decoding.append(sum(t.total - max(t.first.values()) for t in timings))
    behind = TEXTS * (load.new - 1)  # tokens after the first ones
    plain = warm[0]
    for one in warm:
        decoding = statistics.median(one.decoding)
        yield {
            "name": f"temperature {temperature:g}",
            "shape": f"1 x ({load.prompt} + {load.new})",
            "backend": label_of(one.way),
            "tokens_per_s": TEXTS * load.new / statistics.median(one.total),
            "decode_tokens_per_s": behind / decoding,
            "ms": 1e3 * decoding / behind,
            "speedup": statistics.median(plain.decoding) / decoding,
            "acceptance": one.stats.acceptance,
            "guesses": one.stats.drafts,
            "tokens_per_check": behind / (behind - one.stats.accepted_drafts),
            "same_text": sum(map(tuple.__eq__, plain.texts, one.texts)) / TEXTS,
            "compile_s": one.compile_s,
        }


def tokens_of(engine: Engine, request: Request) -> tuple[int, ...]:
    """Run a request alone; returns its new tokens."""
    engine.add(request)
    found = list[tuple[int, ...]]()
    while engine.busy:
        found += [update.tokens for update in engine.step()]
    return tuple(itertools.chain.from_iterable(found))
