"""Benchmark of the memory techniques, and of the longest sequences that a device can train on."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.random_inputs import new_state, random_batch
from benchmarks.record import describe
from benchmarks.step import compiled_step, peak_bytes
from benchmarks.timing import COMPILERS, median_ms
from jaxtrain.estimate.workload import (
    Workload,
    at_depth,
    load_workload,
    new_hyperparams,
    random_base,
)  # fmt: skip
from jaxtrain.model import initialize
from jaxtrain.model.saved_activations import COMPRESSIONS
from jaxtrain.runs.metrics import format_bytes
from jaxtrain.settings import UserError
from jaxtrain.train.program import memory_needed
from jaxtrain.train.step import gradients

SCANNED = ["model.scan_layers=true"]
TECHNIQUES: dict[str, list[str]] = {
    "none": [],
    "remat attention": ["model.remat=attention"],
    "remat ffn": ["model.remat=ffn"],
    "remat dots": ["model.remat=dots"],
    "remat block": ["model.remat=block"],
    "remat block, scanned": ["model.remat=block", *SCANNED],
    **{f"remat {name}": [f"model.remat={name}"] for name in COMPRESSIONS},
    "offload, scanned": ["model.remat=offload", *SCANNED],
    "ffn in 8 tiles": ["model.ffn_tiles=8"],
    "bfloat16 states": ["optim.state_dtype=bfloat16"],
    "states on the host": ["optim.offload.name=host"],
}
# Sequence lengths are multiples of STEP; the search tries the FIRST two and REFINED more.
STEP, FIRST, REFINED = 2048, (4096, 8192), 4
# Small enough to be exact in float32, deep enough to test a scan over layers.
SMALL = [
    "train.sequence_length=256", "train.batch_size=1", "train.device_batch_size=1",
    "train.precision=float32", "model.attention=xla", "mesh.data=1", "mesh.fsdp=1",
]  # fmt: skip


def bench_techniques(
    name: str, overrides: Sequence[str], variant: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the record, each time with one more technique.

    A row has the bytes of a step and, on a GPU, its rate and its gradients' error.
    """
    rows: list[dict[str, Any]] = []
    running = jax.default_backend() == "gpu"
    w = load_workload(name, overrides)
    record = describe("techniques", w.name, variant or w.precision, workload=w.facts())
    expected = small_gradients(name, overrides) if running else None
    for technique, changes in TECHNIQUES.items():
        row: dict[str, Any] = {"name": technique, "shape": f"T {w.config.train.sequence_length}"}
        given = [*overrides, *changes]
        # One after another: XLA autotunes on the GPU while it compiles, and our own kernels are
        # compiled one at a time in any case.
        try:
            with ThreadPoolExecutor(COMPILERS) as pool:
                compiled = pool.submit(compiled_workload, name, given)
                small = pool.submit(small_gradients, name, given) if running else None
            tried, step = compiled.result()
            row |= needs(step)
            if small is not None:
                row |= rate(tried, step, random_frozen(tried))
                row["error"] = difference(small.result(), expected)
        except UserError as error:
            row |= {"ms": None, "failed": str(error).partition(";")[0]}
        rows.append(row)
        print(f"  {row}", file=sys.stderr, flush=True)
        yield record | {"rows": list(rows)}


def compiled_workload(name: str, overrides: Sequence[str]) -> tuple[Workload, Any]:
    """The workload of a configuration, and its compiled step."""
    w = load_workload(name, overrides)
    return w, compiled_step(w)


def figures(w: Workload, running: bool) -> dict[str, Any]:
    """Bytes of a step according to the compiler and, if `running`, the time of a single step."""
    compiled = compiled_step(w)
    return needs(compiled) | (rate(w, compiled, random_frozen(w), once=True) if running else {})


def needs(compiled: Any) -> dict[str, int]:
    """Bytes on the device and on the host."""
    m = compiled.memory_analysis()
    host = m.host_temp_size_in_bytes + m.host_argument_size_in_bytes
    return {"total_bytes": memory_needed(compiled), "host_bytes": host}


def random_frozen(w: Workload) -> Any:
    """Random frozen parameters, which the step only reads."""
    with jax.set_mesh(w.mesh):
        return random_base(w)


def rate(w: Workload, compiled: Any, frozen: Any, once: bool = False) -> dict[str, float]:
    """Time of a compiled step on random batches; frozen: from `random_frozen`.

    once: time only its first call, since a step on a very long sequence takes minutes.
    """
    with jax.set_mesh(w.mesh):
        state, hyperparams = new_state(w), new_hyperparams(w)

        def step(batch: Any) -> jax.Array:
            nonlocal state
            state, values = compiled(state, batch, hyperparams, frozen)
            return values["loss"]

        batches = [(random_batch(w, i),) for i in range(1 if once else 2)]
        ms = first_ms(step, *batches) if once else median_ms(step, batches, calls=3, windows=2)
    return {"ms": ms, "tokens_per_s": 1e3 * w.tokens / ms}


def first_ms(step: Callable[..., jax.Array], batch: tuple[Any]) -> float:
    """Milliseconds of a single call without a warm-up."""
    jax.block_until_ready(batch)
    begin = time.perf_counter()
    jax.block_until_ready(step(*batch))
    return 1e3 * (time.perf_counter() - begin)


def small_gradients(name: str, overrides: Sequence[str]) -> Any:
    """Gradients of the model with at most 12 layers on one sequence."""
    w = load_workload(name, [*overrides, *SMALL], jax.devices()[:1])
    w = at_depth(w, min(w.config.model.depth, 12))
    with jax.set_mesh(w.mesh):
        params = jax.jit(lambda: initialize(w.spec.specs, 0))()
        # Matrices initialized to zero would make the gradients of the others zero.
        params = jax.tree.map(
            lambda p: p + 0.02 * jnp.sin(jnp.arange(p.size)).reshape(p.shape), params
        )
        key = jax.random.key(0) if w.spec.draws else None
        run = jax.jit(lambda p, b: gradients(w.spec, p, b, jnp.float32(1 / w.tokens), key=key)[1])
        return jax.device_get(run(params, random_batch(w, 0)))


def difference(found: Any, expected: Any) -> float:
    """Largest |found - expected| / |expected| over all parameters."""
    norm = lambda x: float(jnp.linalg.norm(x.astype(jnp.float32).ravel()))
    each = jax.tree.map(lambda f, e: norm(f - e) / max(norm(e), 1e-20), found, expected)
    return max(jax.tree.leaves(each))


def bench_longest(
    name: str, overrides: Sequence[str], variant: str | None = None, memory: int | None = None
) -> dict[str, Any]:
    """The longest sequence (batch size 1) that fits this device; on a GPU it is also trained on.

    A step's memory is nearly linear in the length: two lengths predict a third, the two nearest to
    the limit the next, until within 5%. memory: the limit in bytes, for devices that do not report
    theirs. With train.sequence_length among the overrides only that length is tried. Raises
    UserError if no length fits.
    """
    limit = memory or (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise UserError("bench memory --longest: the device does not say its memory; use --memory")

    def at(length: int, run: bool = False) -> dict[str, Any]:
        size = [f"train.sequence_length={length}", "train.batch_size=1"]
        w = load_workload(name, [*overrides, *size, "train.device_batch_size=1"], jax.devices()[:1])
        row: dict[str, Any] = {"name": "longest row", "shape": f"T {length}"} | figures(w, run)
        if run:
            row |= {"peak_bytes": peak_bytes(), "limit_bytes": limit}
        print(f"  {row}", file=sys.stderr, flush=True)
        return row

    rows: dict[int, dict[str, Any]]
    if asked := asked_length(overrides):
        rows = {asked: at(asked, run=jax.default_backend() == "gpu")}
        return record_longest(name, variant, overrides, rows, asked)
    with ThreadPoolExecutor(COMPILERS) as pool:
        rows = dict(zip(FIRST, pool.map(at, FIRST)))
    for _ in range(REFINED):
        length = next_length({n: row["total_bytes"] for n, row in rows.items()}, 0.97 * limit)
        if length is None:
            break
        rows[length] = at(length)
    fit = [n for n, row in rows.items() if row["total_bytes"] < 0.97 * limit]
    if not fit:
        first = rows[FIRST[0]]["total_bytes"]
        raise UserError(
            f"bench memory --longest: a row of {FIRST[0]} already needs {format_bytes(first)} of "
            f"{format_bytes(limit)}; try optim.name=adamw8bit"
        )
    length = max(fit)
    while jax.default_backend() == "gpu" and length > STEP:
        try:
            rows[length] = at(length, run=True)
            break
        except UserError as error:
            print(f"  T {length}: {error}", file=sys.stderr, flush=True)
            length = int(0.9 * length) // STEP * STEP
    return record_longest(name, variant, overrides, rows, length)


def asked_length(overrides: Sequence[str]) -> int | None:
    """The sequence length among the overrides."""
    given = dict(one.split("=", 1) for one in overrides)
    length = given.get("train.sequence_length")
    return None if length is None else int(length)


def record_longest(
    name: str,
    variant: str | None,
    overrides: Sequence[str],
    rows: Mapping[int, dict[str, Any]],
    length: int,
) -> dict[str, Any]:
    workload = {"batch_size": 1, "overrides": list(overrides)}
    record = describe("techniques", name, variant or "longest", workload=workload)
    return record | {"rows": list(rows.values()), "longest": length}


def next_length(needed: dict[int, int], limit: float) -> int | None:
    """The next length to try, given the bytes of those tried. None if the longest that fits is
    within 5% of the limit, or of a length that does not fit."""
    fit = [n for n, size in needed.items() if size < limit]
    over = sorted(n for n, size in needed.items() if size >= limit)
    if not fit or (over and over[0] <= 1.05 * max(fit)) or needed[max(fit)] > 0.95 * limit:
        return None
    one, two = (max(fit), over[0]) if over else sorted(needed)[-2:]
    slope = (needed[two] - needed[one]) / (two - one)
    length = int((limit - needed[one]) / slope + one) // STEP * STEP
    return length if length > max(fit) and length not in needed else None
