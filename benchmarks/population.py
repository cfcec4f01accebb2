"""Benchmark of training many small models at once, compared with one after another.

    python -m benchmarks population --depth 4 --depth 6 --members 1 2 4 8 16 --steps 300
    python -m benchmarks population --config quickstart --members 1 2 4 8

Without --config: the model of the verdicts' d4 scale (`techniques.yaml`), with --depth layers.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.random_inputs import new_state, random_batch
from benchmarks.record import describe
from benchmarks.verdicts import TABLE
from jaxtrain.data import Batch
from jaxtrain.estimate.workload import Workload, load_workload, new_hyperparams
from jaxtrain.optim.types import Hyperparams
from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import read_yaml
from jaxtrain.train.population_members import is_batched, make_population_step, stack_states
from jaxtrain.train.program import compile_step, memory_needed
from jaxtrain.train.step import State, init_state, make_step, state_shardings

BATCHES = 8  # on the device, in rotation
PAIRS = 5  # pairs of windows, one of each side
WINDOW_SECONDS = 1.0
COMPARED = 5  # steps in which a member's loss is compared with that of a single run
STEPS = 300  # steps per run, over which compile time is spread


class Milliseconds(NamedTuple):
    """Milliseconds per step. cpu: of all threads of the process; other load hardly affects it."""

    wall: float
    cpu: float


class Trained:
    """A compiled step with its state, for one model or a population."""

    def __init__(
        self,
        w: Workload,
        step: jax.stages.Wrapped,
        make_state: Callable[[], State],
        hyperparams: Hyperparams,
        batches: Sequence[Batch],
    ):
        self.make_state, self.hyperparams, self.batches = make_state, hyperparams, batches
        self.state = make_state()
        begin = time.perf_counter()
        self.compiled = compile_step(step, self.state, batches[0], hyperparams, w.config)
        self.compile_s = time.perf_counter() - begin

    def restart(self) -> None:
        self.state = self.make_state()

    def step(self, number: int) -> jax.Array:
        """Do a step; returns the loss, or the members' losses."""
        batch = self.batches[number % len(self.batches)]
        self.state, values = self.compiled(self.state, batch, self.hyperparams, None)
        return values["loss"]


def bench_population(
    config: str | None,
    depth: int | None,
    members: Sequence[int],
    steps: int | None,
    overrides: Sequence[str],
    variant: str | None = None,
    note: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the record of one model, again after each number of members.
    steps: per run, over which compile time is spread. note: on how it was measured.

    Ratios are of throughput: N runs one after another with one compiled step, over N at once.
    """
    name, lines = configuration(config, depth)
    w = load_workload(name, [*lines, *overrides])
    label = f"d{w.config.model.depth}" if config is None else w.name
    label += f"_depth{depth}" if config is not None and depth else ""
    record = describe("population", label, variant or w.precision, workload=w.facts())
    if note:
        record["note"] = note
    if jax.default_backend() == "cpu":
        record["floor"] = {"matmul_gflops_per_cpu_s": matmul_rate()}
    total, rows = steps or STEPS, []
    with jax.set_mesh(w.mesh):
        batches = [random_batch(w, i) for i in range(BATCHES)]
        alone = single(w, batches)
        for count in members:
            try:
                row = compared(w, batches, alone, count, total)
            except (UserError, jax.errors.JaxRuntimeError) as error:
                if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                print(f"  {count} members: {str(error).splitlines()[0]}", file=sys.stderr)
                break
            rows.append(row)
            print(f"  {count} members: {row['ratio']:.2f} times", file=sys.stderr, flush=True)
            yield record | {"rows": rows, "steps": total}


def configuration(config: str | None, depth: int | None) -> tuple[str, list[str]]:
    """(name, overrides) of a model, without any data source."""
    more = [f"model.depth={depth}"] if depth else []
    if config is not None:
        return config, more
    scale = read_yaml(TABLE)["scales"]["d4"]
    # Batches of these shapes are random tokens; no text is read.
    return scale["config"], [*scale["overrides"], *more, f"train.steps={scale['steps']}"]


def single(w: Workload, batches: Sequence[Batch]) -> Trained:
    """One model's step, as `train` compiles it."""
    make_state = functools.partial(new_state, w)
    return Trained(w, make_step(w.spec, w.mesh), make_state, new_hyperparams(w), batches)


def population(w: Workload, batches: Sequence[Batch], count: int) -> Trained:
    """The step of `count` members with seeds 0, 1, ... and learning rates 1% apart."""
    places = state_shardings(w.spec, w.mesh)
    create = jax.jit(lambda seed: init_state(w.spec, seed), out_shardings=places)
    everywhere = jax.sharding.NamedSharding(w.mesh, jax.P())
    scale = 1 + 0.01 * np.arange(count, dtype=np.float32)

    def make_state() -> State:
        return jax.device_put(stack_states(count, lambda i: create(jnp.uint32(i))), everywhere)

    def of_members(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        factor = scale if getattr(path[-1], "key", "") == "learning_rate" else np.ones_like(scale)
        return jnp.asarray(np.asarray(x)[None] * factor.reshape(-1, *[1] * np.ndim(x)))

    hyperparams = jax.tree_util.tree_map_with_path(of_members, w.spec.optimizer.hyperparams)
    hyperparams = jax.device_put(hyperparams, everywhere)
    step = make_population_step(w.spec, w.mesh, is_batched(w.config))
    return Trained(w, step, make_state, hyperparams, batches)


def compared(
    w: Workload, batches: Sequence[Batch], alone: Trained, count: int, total: int
) -> dict[str, Any]:
    """The row of one number of members, from pairs of windows of both sides."""
    many = population(w, batches, count)
    difference = loss_difference(w, alone, many)
    steps = [steps_of_a_window(side.step) for side in (alone, many)]
    pairs = [
        (window_ms(alone.step, steps[0]), window_ms(many.step, steps[1])) for _ in range(PAIRS)
    ]
    ratios = [count * a.wall / b.wall for a, b in pairs]
    in_cpu = [count * a.cpu / b.cpu for a, b in pairs]
    alone_cpu = statistics.median(a.cpu for a, _ in pairs)
    one, both = (statistics.median(x.wall for x in side) for side in zip(*pairs, strict=True))
    # N runs in one process: the step is compiled once, or once per run.
    once = alone.compile_s + count * total * one / 1e3
    each = count * (alone.compile_s + total * one / 1e3)
    at_once = many.compile_s + total * both / 1e3
    backend = "vmap" if is_batched(w.config) else "map"
    return {
        "name": w.name, "shape": f"{count} members", "backend": backend, "members": count,
        "ms": both, "ms_alone": one, "tokens_per_s": 1e3 * count * w.tokens / both,
        "tokens_per_s_alone": 1e3 * w.tokens / one, "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios), "ratio_highest": max(ratios),
        "ratio_cpu_seconds": statistics.median(in_cpu),
        "gflops_per_cpu_s_alone": 1e-6 * w.flops_per_token * w.tokens / alone_cpu,
        "compile_s": many.compile_s,
        "compile_s_alone": alone.compile_s, "ratio_compiled_once": once / at_once,
        "ratio_compiled_each": each / at_once, "peak_bytes": memory_needed(many.compiled),
        "peak_bytes_alone": memory_needed(alone.compiled), "error": difference,
    }  # fmt: skip


def loss_difference(w: Workload, alone: Trained, many: Trained) -> float:
    """Largest difference between the first member's loss and a single run's in COMPARED steps."""
    alone.restart()
    pairs = [(float(alone.step(i)), float(many.step(i)[0])) for i in range(COMPARED)]
    if not np.isfinite(pairs).all():
        raise UserError(f"{w.name}: a loss is not finite: {pairs}")
    return max(abs(a - b) for a, b in pairs)


def matmul_rate() -> float:
    """GFLOPs of a large float32 matmul per second of CPU time, an upper bound for every step."""
    multiply, x = jax.jit(lambda x: x @ x), jnp.ones((1024, 1024))
    jax.block_until_ready(multiply(x))
    return 1e-6 * 2 * 1024**3 / window_ms(lambda _: multiply(x), 20).cpu


def steps_of_a_window(step: Callable[[int], jax.Array]) -> int:
    """Number of steps that fill a window, at least 2."""
    jax.block_until_ready(step(0))
    begin = time.perf_counter()
    for i in range(2):
        jax.block_until_ready(step(i))
    return max(2, round(2 * WINDOW_SECONDS / (time.perf_counter() - begin)))


def window_ms(step: Callable[[int], jax.Array], steps: int) -> Milliseconds:
    wall, cpu = time.perf_counter(), time.process_time()
    for i in range(steps):
        losses = step(i)
    jax.block_until_ready(losses)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Milliseconds(1e3 * wall / steps, 1e3 * cpu / steps)
