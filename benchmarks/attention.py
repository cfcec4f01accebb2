"""Benchmark of the attention backends and their peers."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
import numpy as np
from jaxtrain_kernels.attention import BACKENDS
from jaxtrain_kernels.shapes import ATTENTION_BENCH, AttentionShape

from benchmarks.kernels import Kernel, Row, chosen, exact, failure, growing, measured, sized
from benchmarks.peers import FLASH_ATTENTION, flash_attention
from benchmarks.timing import relative_errors, rotating
from jaxtrain.cluster.runtime import compute_dtype

Make = Callable[[AttentionShape], Kernel]
BACKWARD = 3.5  # FLOPs of forward and backward over the forward's: five more matmuls for two
VISITED = 128  # side of the blocks that `tflops_visited` counts
SMALL_T = 256  # context on a CPU
ERROR_T = 1000  # context for measuring errors; no multiple of a kernel's block size
ROUNDING = 2e-6  # rounding error of the float32 reference


def bench_attention(
    variant: str | None = None, names: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Measure every backend and peer. TF/s count visible pairs only.

    names: shapes and backends to measure; default all.
    """
    dtype = compute_dtype("auto")
    yield from growing("attention", dtype, variant, attention_rows(names, dtype))


def attention_rows(names: Sequence[str], dtype: Any) -> Iterator[Row]:
    made = backends()
    every = [*made, FLASH_ATTENTION]
    shapes, wanted = chosen("attention", names, [s.name for s in ATTENTION_BENCH], every)
    of_these = [s for s in ATTENTION_BENCH if s.name in shapes]
    if FLASH_ATTENTION in wanted and jax.default_backend() == "gpu":
        yield from flash_attention_rows(of_these)
    for shape in map(sized(small_attention), of_these):
        inputs = rotating(lambda key, s=shape: attention_inputs(s, dtype, key))
        for backend in [name for name in made if name in wanted]:
            for name, wrap in WRAPS.items():
                figures = rate(shape, wrap(made[backend](shape)), inputs, name)
                if figures is not None:
                    row = {"name": f"attention_{name}", "shape": shape.name, "backend": backend}
                    yield row | figures | errors(shape, made[backend], wrap, dtype)


def without_gradients(f: Kernel) -> Kernel:
    return lambda q, k, v, segments, do: f(q, k, v, segments)


def with_gradients(f: Kernel) -> Kernel:
    def run(q, k, v, segments, do):
        out, pull = jax.vjp(lambda *qkv: f(*qkv, segments), q, k, v)
        return out, pull(do)

    return run


WRAPS = {"forward": without_gradients, "forward_backward": with_gradients}


def rate(
    shape: AttentionShape, fn: Kernel, inputs: Any, name: str, **options: Any
) -> dict[str, Any] | None:
    """ms, TF/s of the visible pairs, and TF/s of all pairs in the blocks that hold any of them."""
    figures = measured(fn, inputs, 0.0, **options)
    return figures and figures | rates(shape, name, figures["ms"])


def rates(shape: AttentionShape, name: str, ms: float | None) -> dict[str, float]:
    """TF/s of the visible pairs, and of all pairs in the blocks that hold any of them."""
    if ms is None:
        return {}
    flops = 4.0 * shape.N * shape.H * (1.0 if name == "forward" else BACKWARD)
    pairs = {
        "tflops": shape.B * visible_pairs(shape),
        "tflops_visited": visited_blocks(shape) * VISITED**2,
    }
    return {key: flops * count / ms / 1e9 for key, count in pairs.items()}


def flash_attention_rows(shapes: Sequence[AttentionShape]) -> Iterator[Row]:
    """Rows of FlashAttention 4 in PyTorch, in its own process; its errors are not measured."""
    by_name = {s.name: s for s in shapes}
    for row in flash_attention(shapes):
        shape, name = by_name[row["shape"]], row["name"].removeprefix("attention_")
        yield row | rates(shape, name, row["ms"])


def errors(shape: AttentionShape, make: Make, wrap: Any, dtype: Any) -> dict[str, Any]:
    """Largest relative errors of an output or gradient against the float32 specification.

    naive_error: error of the specification computed in `dtype`. exact: whether no error exceeds
    twice the naive one. Measured at a smaller shape with the same features.
    """
    T = SMALL_T if jax.default_backend() == "cpu" else ERROR_T
    s = small_attention(shape, T)
    inputs, wide, naive = specified(s, wrap, dtype)
    try:
        ours = relative_errors(jax.jit(wrap(make(s)))(*inputs), wide)
    except Exception as error:
        return {"error": None, "naive_error": max(naive), "exact": False, "why": failure(error)}
    within = all(a <= 2 * b + ROUNDING for a, b in zip(ours, naive))
    return {"error": max(ours), "naive_error": max(naive), "exact": within}


@functools.lru_cache(maxsize=len(WRAPS))  # one shape at a time; all its backends share these
def specified(s: AttentionShape, wrap: Any, dtype: Any) -> tuple[Any, Any, list[float]]:
    """Inputs, the specification's results in float32, and its errors when computed in `dtype`."""
    inputs = attention_inputs(s, dtype, jax.random.key(1))
    reference = wrap(our_attention("reference")(s))
    wide = exact(reference, inputs)
    return inputs, wide, relative_errors(jax.jit(reference)(*inputs), wide)


# ---- backends and peers ----------------------------------------------------------------------


def backends() -> dict[str, Make]:
    """Name -> (shape -> q, k, v, segments -> out): our backends but `reference`, then peers."""
    made: dict[str, Make] = {name: our_attention(name) for name in BACKENDS if name != "reference"}
    with contextlib.suppress(ImportError):
        tokamax = importlib.import_module("tokamax")
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()  # tokamax reads absl flags
        made |= {f"tokamax {n}": tokamax_attention(tokamax, n) for n in ("mosaic", "triton")}
    return made


def our_attention(backend: str, tiling: dict[str, Any] | None = None) -> Make:
    return lambda s: lambda q, k, v, segments: kernels.attention(
        q, k, v, causal=s.causal, window=s.window, softcap=s.softcap, segment_ids_BT=segments,
        implementation=backend, tiling=tiling,
    )  # fmt: skip


def tokamax_attention(tokamax: ModuleType, implementation: str) -> Make:
    def make(s: AttentionShape) -> Kernel:
        window = None if s.window is None else (s.window, 0)
        return lambda q, k, v, segments: tokamax.dot_product_attention(
            q, k, v, is_causal=s.causal, local_window_size=window, logits_soft_cap=s.softcap,
            implementation=implementation,
        )  # fmt: skip

    def make_packed(s: AttentionShape) -> Kernel:
        def run(q, k, v, segments):
            # The public function lacks the key ranges by which tokamax's kernels skip blocks.
            inner = "tokamax._src.ops.attention"
            mask = importlib.import_module(f"{inner}.base").Mask
            every = importlib.import_module(f"{inner}.api").IMPLEMENTATIONS
            op = every.get(implementation) or every[f"{implementation}_gpu"]
            starts_B1T = document_starts(segments)[:, None]
            return op(
                q, k, v, mask=mask(is_causal=True, k_start=starts_B1T), logits_soft_cap=s.softcap
            )

        return run

    return lambda s: make_packed(s) if s.documents else make(s)


def document_starts(segments_BT: jax.Array) -> jax.Array:
    """The position at which each token's document begins, int32 [B, T]."""
    before_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    place_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1]), segments_BT.shape)
    return jax.lax.cummax(jnp.where(segments_BT != before_BT, place_BT, 0), axis=1)


# ---- shapes ----------------------------------------------------------------------------------


def attention_inputs(s: AttentionShape, dtype: Any, key: jax.Array) -> tuple[Any, ...]:
    """q, k, v, segment ids (or None), the output's cotangent."""
    q_key, k_key, v_key, do_key = jax.random.split(key, 4)
    query, shared = (s.B, s.T, s.N, s.H), (s.B, s.T, s.K, s.H)
    ids = s.segment_ids_BT()
    return (
        jax.random.normal(q_key, query, dtype),
        jax.random.normal(k_key, shared, dtype),
        jax.random.normal(v_key, shared, dtype),
        None if ids is None else jnp.asarray(ids),
        jax.random.normal(do_key, query, dtype),
    )


def small_attention(s: AttentionShape, T: int | None = None) -> AttentionShape:
    """The shape with a context (and batch and heads) small enough for the specification."""
    T = T or SMALL_T
    return s._replace(
        name=f"{s.name}_small",
        B=2,
        T=T,
        N=2 * s.N // s.K,
        K=2,
        window=None if s.window is None else s.window * T // s.T,
        documents=tuple(n * T // s.T for n in s.documents if n * T >= s.T),
    )


def visible_pairs(s: AttentionShape) -> int:
    """Number of (query, key) pairs of one head and sequence that the mask allows."""
    total = 0
    for length in s.documents or (s.T,):
        keys = np.arange(1, length + 1) if s.causal else np.full(length, length)
        total += int((keys if s.window is None else np.minimum(keys, s.window + 1)).sum())
    return total


def visited_blocks(s: AttentionShape, side: int = VISITED) -> int:
    """Number of query x key blocks, of one head and all sequences, with any visible pair."""
    ids_BT = s.segment_ids_BT()
    if ids_BT is None:
        return s.B * int(_visited_of_row(s, np.ones(s.T, np.int32), side).sum())
    return sum(int(_visited_of_row(s, ids_T, side).sum()) for ids_T in ids_BT)


def _visited_of_row(s: AttentionShape, ids_T: np.ndarray, side: int) -> np.ndarray:
    """Whether each block has a visible pair, bool [query blocks, key blocks]."""
    n = -(-s.T // side)
    visited, block = np.zeros((n, n), bool), np.arange(n) * side
    for document in np.unique(ids_T[ids_T > 0]):
        (places,) = np.nonzero(ids_T == document)
        first = np.maximum(block, places[0])
        last = np.minimum(block + side - 1, places[-1])
        t, t_last, s_first, s_last = first[:, None], last[:, None], first[None], last[None]
        some = (t <= t_last) & (s_first <= s_last)
        if s.causal:
            some &= s_first <= t_last
        if s.window is not None:
            some &= s_last >= t - s.window
        visited |= some
    return visited
