"""Benchmark of a configuration's train step: its time, its parts, its memory."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.power import Meter
from benchmarks.profile import profile
from benchmarks.random_inputs import new_state, random_batch
from benchmarks.record import describe, stem
from benchmarks.timing import ceilings, median_ms
from jaxtrain.estimate.workload import (
    Workload,
    abstract_frozen,
    abstract_state,
    batch_shapes,
    branch_share,
    load_workload,
    new_hyperparams,
    random_base,
)
from jaxtrain.model import active, cast
from jaxtrain.optim import MuonConfig
from jaxtrain.optim.orthogonalize import COEFFICIENTS, orthogonalize_flops
from jaxtrain.runs.environment import peak_flops
from jaxtrain.settings import UserError
from jaxtrain.train.program import compile_step, memory_needed
from jaxtrain.train.step import State, gradients, make_step, state_shardings

BATCHES = 16  # batches on the device, in rotation; enough that the few steps do not overfit
STEPS = 10  # steps per window; fewer if they would take longer than this:
WINDOW_SECONDS = 3.0
WINDOWS = 3


def bench_step(
    name: str,
    overrides: Sequence[str],
    variant: str | None = None,
    profile_dir: Path | None = None,
    parts: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield the record of a configuration's step; `profile_dir` gets a profile of its kernels.

    parts: yield it again with the times of forward + backward and of the optimizer alone. These are
    separate programs, which take minutes to compile for a large model.
    """
    w = load_workload(name, overrides)
    limits = ceilings(w.spec.dtype)
    with jax.set_mesh(w.mesh):
        batches, hyperparams = [(random_batch(w, i),) for i in range(BATCHES)], new_hyperparams(w)
        begin = time.perf_counter()
        compiled = compiled_step(w)
        metrics: dict[str, Any] = {"compile_s": time.perf_counter() - begin}
        before, steps = peak_bytes(), 0
        state, frozen = new_state(w), random_base(w)

        def step(batch: Any) -> jax.Array:
            nonlocal state, steps
            steps += 1
            state, values = compiled(state, batch, hyperparams, frozen)  # noqa: F821 - deleted below
            return values["loss"]

        calls, meter = steps_of_a_window(step, batches), Meter()
        ms = median_ms(step, batches[: 2 * calls], calls=calls, windows=WINDOWS, meter=meter)
        # The allocator's peak is per process: an earlier, larger peak hides this step's.
        after = peak_bytes()
        metrics["peak_bytes"] = after if after > before else memory_needed(compiled)
        metrics |= {"ms": ms, "tokens_per_s": 1e3 * w.tokens / ms, "mfu": mfu(w, ms)}
        loss = float(step(*batches[0]))
        # A loss can be compared with another run's after as many steps; a slow start makes fewer.
        metrics |= memory(compiled) | {"loss": loss, "steps": steps} | meter.figures()
        if not jnp.isfinite(metrics["loss"]):
            raise UserError(f"{w.name}: the loss became {metrics['loss']} while it was timed")
        record = describe("step", w.name, variant or w.precision, workload=w.facts())
        if profile_dir is not None:
            spread = dict(w.mesh.shape), branch_share(w)
            target = profile_dir / stem(record)
            record["kinds"] = profile(step, batches, compiled, target, limits, *spread)
        record |= {
            "metrics": metrics,
            "floor": limits._asdict() | floors_ms(w, limits.matmul_tflops),
        }
        del compiled
        drawn = ", ".join(f"{x:,.0f} {name}" for name, x in meter.figures().items())
        print(
            f"  {ms:.1f} ms, {metrics['tokens_per_s']:,.0f} tokens/s {drawn}".rstrip(),
            file=sys.stderr,
            flush=True,
        )
        yield record
        if parts:
            metrics = metrics | parts_ms(w, state, batches[: 2 * calls], hyperparams, frozen, calls)
            yield record | {"metrics": metrics}


def steps_of_a_window(step: Callable[..., jax.Array], batches: Sequence[tuple[Any, ...]]) -> int:
    """Number of steps that fill a window: at least 2, at most STEPS."""
    jax.block_until_ready(step(*batches[0]))
    begin = time.perf_counter()
    jax.block_until_ready(step(*batches[1]))
    return max(2, min(STEPS, round(WINDOW_SECONDS / (time.perf_counter() - begin))))


def compiled_step(w: Workload) -> Any:
    """The step compiled for this device. Raises UserError if it does not fit. Thread-safe."""
    with jax.set_mesh(w.mesh):
        return compile_step(
            make_step(w.spec, w.mesh), abstract_state(w), batch_shapes(w), new_hyperparams(w),
            w.config, abstract_frozen(w),
        )  # fmt: skip


def parts_ms(
    w: Workload, state: State, batches: Any, hyperparams: Any, frozen: Any, calls: int
) -> dict[str, float]:
    """Milliseconds of gradients (with the cast) alone, and of the optimizer alone. Donates the
    state."""
    task, factor = w.spec, jnp.float32(1 / w.tokens)

    def forward_backward(state: State, frozen: Any, batch: Any) -> Any:
        params = cast(state.params, task.specs, task.dtype)
        return gradients(task, params, batch, factor, frozen, extras=state.extras)

    compute = jax.jit(forward_backward)
    inputs = [(state, frozen, *batch) for batch in batches]
    gradient_ms = median_ms(compute, inputs, calls=calls, windows=WINDOWS)
    grads = compute(*inputs[0])[1]
    return {
        "ms_forward_backward": gradient_ms,
        "ms_optimizer": update_ms(w, state, grads, hyperparams),
    }


def update_ms(w: Workload, state: State, grads: Any, hyperparams: Any) -> float:
    """Milliseconds of the optimizer alone, in place as in the step. Donates the state.

    Work that is not done at every step (SOAP's new basis) counts by its share.
    """

    def update(params: Any, opt: Any, grads: Any, step: jax.Array, hyperparams: Any) -> Any:
        return w.spec.optimizer.apply(grads, opt, params, step, hyperparams)

    where = state_shardings(w.spec, w.mesh)
    compiled = jax.jit(update, donate_argnums=(0, 1), out_shardings=(where.params, where.optimizer))
    carry = state.params, state.optimizer

    def one() -> Any:
        nonlocal carry
        carry = compiled(*carry, grads, state.step, hyperparams)
        return carry

    every = getattr(w.config.optim, "precondition_frequency", None)
    return median_ms(one, [()], calls=every, windows=1 if every else 5)


def bench_memory(name: str, overrides: Sequence[str], variant: str | None = None) -> dict[str, Any]:
    """The memory that a configuration's step needs, without running it."""
    w = load_workload(name, overrides)
    with jax.set_mesh(w.mesh):
        begin = time.perf_counter()
        lowered = make_step(w.spec, w.mesh).lower(
            abstract_state(w), batch_shapes(w), new_hyperparams(w), abstract_frozen(w)
        )
        compiled = lowered.compile()
        seconds = time.perf_counter() - begin
    record = describe("memory", w.name, variant or w.precision, workload=w.facts())
    device = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    record["metrics"] = memory(compiled) | {"device_bytes": device, "compile_s": seconds}
    return record


def memory(compiled: Any) -> dict[str, int]:
    """Bytes on one device according to the compiler's memory analysis."""
    m = compiled.memory_analysis()
    return {
        "arguments_bytes": m.argument_size_in_bytes,
        "temp_bytes": m.temp_size_in_bytes,
        "total_bytes": memory_needed(compiled),
    }


def peak_bytes() -> int:
    """Peak bytes of the fullest local device since the process started; 0 if unknown (CPU)."""
    return max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices())


def mfu(w: Workload, ms: float) -> float | None:
    """MFU against the devices' bf16 peak, in nanochat's convention; None for an unknown device."""
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak is None:
        return None
    return w.flops_per_token * w.tokens / (ms / 1e3) / (peak * w.mesh.size)


# ---- floors ----------------------------------------------------------------------------------


def floors_ms(w: Workload, matmul_tflops: float) -> dict[str, float]:
    """Milliseconds of the step's matmuls (6 FLOPs per token and active weight) and of Muon's, at
    the measured matmul rate."""
    rate = matmul_tflops * 1e9 * w.mesh.size
    c = w.config
    return {
        "ms": 6 * active(c.model, w.spec.specs) * w.tokens / rate,
        "ms_optimizer": muon_flops(c.optim, w.spec.specs) / rate,
    }


def muon_flops(c: Any, specs: Any) -> int:
    """FLOPs of one orthogonalization of all matrices; 0 for another optimizer."""
    if not isinstance(c, MuonConfig):
        return 0
    total, steps = 0, len(COEFFICIENTS[c.orthogonalize])
    for spec in jax.tree.leaves(specs):
        if spec.role == "matrix":
            short, long = sorted(spec.shape[-2:])
            total += (
                spec.size
                // (short * long)
                * orthogonalize_flops(short, long, steps, c.gram_newton_schulz)
            )
    return total
