"""Timing functions, and the device's two measured ceilings: matmul and copy rate."""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.power import Meter

COLD_BYTES = 2**28  # inputs of this total size exceed any device's cache
WINDOW_SECONDS = 0.2
MOST_CALLS = 1000  # per window
# Programs compiled at once: XLA's autotuner times kernels on the GPU, where many at once would
# wait for each other.
COMPILERS = 3
SHORT_MS = 0.2  # below this, a call from Python may take longer than the device


class Ceilings(NamedTuple):
    """Measured rates of one device: a large square matmul, and a large copy (read + write)."""

    matmul_tflops: float
    copy_gbps: float


def median_ms(
    fn: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    *,
    calls: int | None = None,
    windows: int = 5,
    seconds: float | None = None,
    meter: Meter | None = None,
) -> float:
    """Milliseconds per call: median over windows of `calls` calls, synchronized after each window.

    A call only enqueues work, and the device does not idle if the host (about 20 us per call) is
    faster. So a window's time is the device's, plus one wait. For shorter kernels use `kernel_ms`.

    inputs: argument tuples that the calls rotate over (see `rotating`). calls: by default as many
    as fill `seconds` (0.2). The first calls, which compile and warm up, are not counted. meter:
    runs during the windows.
    """

    def window(count: int) -> float:
        begin = time.perf_counter()
        for i in range(count):
            # Keep only the last result: the outputs of a whole window may not fit.
            result = fn(*inputs[i % len(inputs)])
        jax.block_until_ready(result)
        return (time.perf_counter() - begin) / count

    window(max(2, len(inputs)))
    if calls is None:
        calls, seconds = 2, seconds or WINDOW_SECONDS
        while calls < MOST_CALLS and (each := window(calls)) * calls < seconds / 2:
            calls = min(MOST_CALLS, max(2 * calls, round(seconds / each)))
    with meter or contextlib.nullcontext():
        return 1e3 * statistics.median(window(calls) for _ in range(windows))


def kernel_ms(
    fn: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    compiler_options: dict[str, Any] | None = None,
    **options: Any,
) -> float:
    """Milliseconds of `fn`, which is jitted here and may be very short.

    A short one is timed as one program that runs it on each input set in turn, so that the host
    overhead occurs once for all of them.
    """
    compiled = functools.partial(jax.jit, compiler_options=compiler_options)
    ms = median_ms(compiled(fn), inputs, **options)
    if ms > SHORT_MS:
        return ms
    return median_ms(compiled(one_after_another(fn)), [tuple(inputs)], **options) / len(inputs)


def one_after_another(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A function that runs `fn` on each of its argument tuples.

    Each call's inputs depend on the previous result, so that XLA can neither merge nor reorder
    calls. All results are returned, so that none is eliminated.
    """

    def run(*sets: tuple[Any, ...]) -> list[Any]:
        results: list[Any] = []
        for arguments in sets:
            if results:
                arguments, _ = jax.lax.optimization_barrier((arguments, results[-1]))
            results.append(fn(*arguments))
        return results

    return run


def rotating(make: Callable[[jax.Array], tuple[Any, ...]], seed: int = 0) -> list[tuple[Any, ...]]:
    """2 to 8 input sets from random keys, enough that no call finds its inputs in a cache."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    sets = [make(next(keys)), make(next(keys))]
    each = sum(x.nbytes for x in jax.tree.leaves(sets[0]))
    for key in keys:
        if each * len(sets) >= COLD_BYTES:
            break
        sets.append(make(key))
    return sets


@functools.cache
def ceilings(dtype: Any) -> Ceilings:
    """Ceilings of the first device: a matmul of 8192^3 in `dtype`, and a copy of 2 GiB (far smaller
    on a CPU). Cached."""
    on_cpu = jax.default_backend() == "cpu"
    size, copied = (512, 2**24) if on_cpu else (8192, 2**31)

    def operands(key):
        return tuple(jax.random.normal(k, (size, size), dtype) for k in jax.random.split(key))

    def buffer(key):
        return (jax.random.bits(key, (copied // 4,), jnp.uint32),)

    matmul_ms = median_ms(jax.jit(jnp.matmul), rotating(operands))
    copy_ms = median_ms(jax.jit(jnp.copy), [buffer(jax.random.key(0))])
    return Ceilings(2 * size**3 / matmul_ms / 1e9, 2 * copied / copy_ms / 1e6)


def relative_errors(out: Any, reference: Any) -> list[float]:
    """||out - reference|| / ||reference|| of each leaf, in float32."""
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(reference), strict=True)
    return [relative_error(a, b) for a, b in pairs]


def relative_error(out: Any, reference: Any) -> float:
    """||out - reference|| / ||reference|| over all leaves, in float32."""
    pairs = list(zip(jax.tree.leaves(out), jax.tree.leaves(reference), strict=True))
    wide = lambda x: x.astype(jnp.float32)
    off = sum(jnp.sum(jnp.square(wide(a) - wide(b))) for a, b in pairs)
    return float(jnp.sqrt(off / sum(jnp.sum(jnp.square(wide(b))) for _, b in pairs)))
