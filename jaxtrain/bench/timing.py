"""How everything is timed, and the two ceilings of the device that nothing can beat."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

COLD_BYTES = 2**28  # inputs that add up to this do not stay in any device's cache
WINDOW_SECONDS = 0.2


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
) -> float:
    """Milliseconds of one call: median over windows of `calls` calls, each waited for at its end.

    inputs: argument tuples that the calls rotate over (see `rotating`). calls: by default as many
    as fill 0.2 s. The first calls, which compile and warm up, are not counted.
    """

    def window(count: int) -> float:
        begin = time.perf_counter()
        for i in range(count):
            # Only the last result is kept: the outputs of a whole window may not fit.
            result = fn(*inputs[i % len(inputs)])
        jax.block_until_ready(result)
        return (time.perf_counter() - begin) / count

    window(max(2, len(inputs)))
    if calls is None:
        calls = min(100, max(2, round(WINDOW_SECONDS / window(2))))
    return 1e3 * statistics.median(window(calls) for _ in range(windows))


def rotating(make: Callable[[jax.Array], tuple[Any, ...]], seed: int = 0) -> list[tuple[Any, ...]]:
    """Input sets from random keys, so many (2 to 8) that no call finds its own in a cache."""
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
    """Measured on the first device: 8192^3 in `dtype`, and a copy of 2 GiB (a CPU: far smaller)."""
    on_cpu = jax.default_backend() == "cpu"
    size, copied = (512, 2**24) if on_cpu else (8192, 2**31)

    def operands(key):
        return tuple(jax.random.normal(k, (size, size), dtype) for k in jax.random.split(key))

    def buffer(key):
        return (jax.random.bits(key, (copied // 4,), jnp.uint32),)

    matmul_ms = median_ms(jax.jit(jnp.matmul), rotating(operands))
    copy_ms = median_ms(jax.jit(jnp.copy), [buffer(jax.random.key(0))])
    return Ceilings(2 * size**3 / matmul_ms / 1e9, 2 * copied / copy_ms / 1e6)


def relative_error(out: Any, reference: Any) -> float:
    """||out - reference|| / ||reference|| over all leaves, in float32."""
    pairs = list(zip(jax.tree.leaves(out), jax.tree.leaves(reference), strict=True))
    wide = lambda x: x.astype(jnp.float32)
    off = sum(jnp.sum(jnp.square(wide(a) - wide(b))) for a, b in pairs)
    return float(jnp.sqrt(off / sum(jnp.sum(jnp.square(wide(b))) for _, b in pairs)))
