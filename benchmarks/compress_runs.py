"""Measurements of one model under several compression methods, each in its own process."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.decode_rate import decode_rate
from benchmarks.importing import SHAPES
from jaxtrain import data
from jaxtrain.cluster.runtime import compute_dtype, start
from jaxtrain.compress import prune
from jaxtrain.compress.calibration_text import calibration_rows
from jaxtrain.compress.methods import METHODS, MethodOptions
from jaxtrain.compress.quantize import (
    Calibration,
    is_quantizable,
    measure,
    quantize_saved,
    save_quantized,
    text_config,
)
from jaxtrain.compress.sparsify import parse_target
from jaxtrain.data.evaluation.tasks import NANOCHAT
from jaxtrain.evaluation.tasks import run_tasks
from jaxtrain.interop.configs import model_fields
from jaxtrain.model import ModelConfig, ParamSpec, Transformer, cast, count, resolve_model, split
from jaxtrain.runs.environment import environment
from jaxtrain.runs.saved import WEIGHTS, Saved, load_saved
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Params, Specs
from jaxtrain.weights.quantized import QuantizedWeight

BATCHES = (1, 32)
RATED = "tokens_per_s_1"
PLAIN = "none"  # row of the uncompressed model, in the compute dtype
PATTERN = "2:4"  # row of a pruned model; zeros are stored like the other weights
PRUNING = "sparsegpt"


class Texts(NamedTuple):
    """UTF-8 files; None: the text that the model's configuration names."""

    held_out: Path | None = None  # for bits per byte
    calibration: Path | None = None
    sequences: int = 128  # calibration sequences of `train.sequence_length` tokens


class Job(NamedTuple):
    """A row: a model and a method. folder: a run or model folder; a name of SHAPES if `shape`."""

    label: str
    folder: str
    method: str | None = None  # a key of METHODS, or PATTERN; None: uncompressed
    shape: bool = False
    core: int | None = None  # examples per CORE task; None: no CORE
    texts: Texts = Texts()
    rated: bool = True  # decode rates are measured as well


class Outcome(NamedTuple):
    """Figures of a row and the environment that they were measured in; `error` if it failed."""

    figures: dict[str, Any]
    env: dict[str, Any]
    error: str | None = None


def run_job(job: Job, on_gpu: bool = False) -> Outcome:
    """Measure a row in this process. Raises UserError if `on_gpu` and there is no GPU."""
    begin = time.perf_counter()
    start(quiet=True)
    if on_gpu and jax.default_backend() != "gpu":
        raise UserError("--workers: there are fewer GPUs than that")
    figures = shape_figures(job) if job.shape else model_figures(job)
    return Outcome(figures | {"seconds": round(time.perf_counter() - begin, 1)}, environment())


def model_figures(job: Job) -> dict[str, Any]:
    """Bits per byte, CORE, sizes and rates of a saved model, after compression."""
    with tempfile.TemporaryDirectory() as folder:
        source = saved = load_saved(Path(job.folder))
        if job.method:
            saved = made_small(saved, job, Path(folder) / "model")
        config = text_config(source.config, job.texts.held_out)
        found: dict[str, Any] = {**measure(saved, config, saved.tokenizer_dir / WEIGHTS)}
        if job.core is not None:
            rules, tasks = NANOCHAT._replace(limit=job.core), Path(folder) / "tasks.json"
            bundle = data.open_bundle(None, ["core"])
            found["core"] = run_tasks(saved, source.config, bundle, ["core"], tasks, rules)["core"]
        dtype = compute_dtype(saved.config.train.precision)
        params = cast(jax.device_put(saved.params), saved.specs, dtype)
        found |= {"dtype": dtype.name, "parameters": count(saved.specs)}
        return found | (rates(saved.graphdef, params) if job.rated else {})


def made_small(saved: Saved, job: Job, out: Path) -> Saved:
    """Compress `saved` by the job's method into the folder `out`, and load the result."""
    calibration = Calibration(job.texts.calibration, job.texts.sequences)
    if job.method == PATTERN:
        rows = calibration_rows(saved, saved.config, *calibration)
        params = prune.prune(saved, PRUNING, parse_target(None, PATTERN), rows)
        save_quantized(out, saved, saved.config, params)
    elif job.method:
        small = quantize_saved(saved, job.method, calibration=calibration)
        save_quantized(out, saved, *small)
    return load_saved(out)


def rates(graphdef: nnx.GraphDef, params: Params) -> dict[str, float]:
    """Decode rates tokens_per_s_1 and tokens_per_s_32, by batch size."""
    return {f"tokens_per_s_{n}": round(decode_rate(graphdef, params, n), 2) for n in BATCHES}


def shape_figures(job: Job) -> dict[str, Any]:
    """Bytes and rates of a shape with random weights; no loss, since nothing was trained."""
    fields = SHAPES[job.folder]
    c = resolve_model(ModelConfig.model_validate(model_fields(fields)), 2048)
    graphdef, specs = split(Transformer(c, fields["vocab_size"]))
    dtype = compute_dtype("auto")
    params = cast(random_params(specs, job.method), specs, dtype)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    return {"memory_bytes": size, "dtype": dtype.name} | rates(graphdef, params)


def random_params(specs: Specs, method: str | None) -> Params:
    """Small random weights; each block matrix is quantized before the next one is drawn."""
    key = jax.random.key(0)

    def draw(i: int, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.fold_in(key, i), shape, jnp.bfloat16)

    def one(spec: ParamSpec) -> jax.Array | QuantizedWeight:
        if method is None or not is_quantizable(spec, head=False):
            return draw(0, spec.shape)
        form = METHODS[method].quantize
        *front, K, N = spec.shape
        quantize = jax.jit(
            lambda i: form(draw(i, (K, N)).astype(jnp.float32), None, MethodOptions())
        )
        found = [quantize(i) for i in range(int(np.prod(front)))]
        return jax.tree.map(lambda *xs: jnp.stack(xs).reshape((*front, *xs[0].shape)), *found)

    return jax.tree.map(one, specs)


def run_all(jobs: Sequence[Job], gpus: int | None = None) -> Iterator[tuple[Job, Outcome]]:
    """Yield jobs and their outcomes, in order. gpus: number of GPUs, each running one job at a
    time; default one job after another on the visible devices."""
    if gpus is None:
        yield from ((job, in_own_process(job)) for job in jobs)
        return
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in range(gpus):
        free.put(gpu)

    def on_free_gpu(job: Job) -> Outcome:
        gpu = free.get()
        try:
            return in_own_process(job, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(gpus) as threads:
        yield from zip(jobs, threads.map(on_free_gpu, jobs))


def see_only(gpu: int | None) -> None:
    """Hide the other GPUs from this process."""
    if gpu is None:
        return
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(gpu + 1)]
    os.environ["CUDA_VISIBLE_DEVICES"] = names[gpu] if gpu < len(names) else ""


def in_own_process(job: Job, gpu: int | None = None) -> Outcome:
    """`run_job` in a new process, so that its memory is freed even if it crashes."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=see_only, initargs=(gpu,)
    ) as pool:
        try:
            return pool.submit(run_job, job, gpu is not None).result()
        except BrokenProcessPool:
            return Outcome({}, {}, "the process died; it may have run out of memory")
        except Exception as error:  # a failing method must not stop the others
            first_line = (str(error).splitlines() or [""])[0][:200]
            return Outcome({}, {}, f"{type(error).__name__}: {first_line}")


def line_of(outcome: Outcome) -> str:
    """The terminal line of a row."""
    if outcome.error:
        return f"failed: {outcome.error}"
    figures = outcome.figures
    bpb = f"{figures['bpb']:.4f} bits per byte, " if "bpb" in figures else ""
    rate = f"{figures[RATED]:,.0f} tokens/s at batch 1, " if RATED in figures else ""
    return f"{bpb}{rate}{figures['seconds']} s in all"
