"""Kernels beside their peers: attention, and the last matmul with its cross-entropy."""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
import numpy as np
from jaxtrain_kernels import cross_entropy
from jaxtrain_kernels.attention import BACKENDS as ATTENTION
from jaxtrain_kernels.shapes import ATTENTION_BENCH, LOSS_BENCH, AttentionShape, LossShape

from jaxtrain.bench.record import describe
from jaxtrain.bench.timing import ceilings, median_ms, relative_error, rotating
from jaxtrain.bench.workload import SHORT
from jaxtrain.parallel.runtime import compute_dtype

Kernel = Callable[..., Any]
BACKWARD = 3.5  # FLOPs of forward and backward over the forward's: five more matmuls for two
SMALL_T = 256  # context that the error is measured at


def bench_attention(variant: str | None = None) -> dict[str, Any]:
    """Rows of every backend and peer over the benchmark shapes; TF/s count visible pairs only."""
    dtype, rows = compute_dtype("auto"), []
    for shape in map(sized(small_attention), ATTENTION_BENCH):
        flops = 4 * shape.B * shape.N * shape.H * visible_pairs(shape)
        inputs = rotating(lambda key, s=shape: attention_inputs(s, dtype, key))
        for backend, make in attention_backends().items():
            for name, wrap, factor in (
                ("attention_forward", without_gradients, 1.0),
                ("attention_forward_backward", with_gradients, BACKWARD),
            ):
                figures = measured(wrap(make(shape)), inputs, flops * factor)
                if figures is not None:
                    row = {"name": name, "shape": shape.name, "backend": backend} | figures
                    rows.append(row | {"error": attention_error(shape, make, wrap, dtype)})
    return finished("attention", dtype, variant, rows)


def bench_loss(variant: str | None = None) -> dict[str, Any]:
    """Value and both gradients of every backend; `reference` has all logits in memory."""
    dtype, rows = compute_dtype("auto"), []
    for shape in map(sized(small_loss), LOSS_BENCH):
        inputs = rotating(lambda key, s=shape: loss_inputs(s, dtype, key))
        flops = 6.0 * shape.N * shape.D * shape.V
        for backend in cross_entropy.BACKENDS:
            figures = measured(loss_with_gradients(shape, backend), inputs, flops)
            if figures is not None:
                row = {"name": "linear_cross_entropy", "shape": shape.name, "backend": backend}
                rows.append(row | figures | {"error": loss_error(shape, backend, dtype)})
    return finished("loss", dtype, variant, rows)


def sized(small: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Shapes that suit the device: a CPU gets small ones of the same kind."""
    return small if jax.default_backend() == "cpu" else lambda shape: shape


def finished(
    bench: str, dtype: jnp.dtype, variant: str | None, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    record = describe(bench, "shapes", variant or SHORT[dtype.name], devices=1)
    return record | {"rows": rows, "floor": ceilings(dtype)._asdict()}


def measured(fn: Kernel, inputs: Sequence[tuple[Any, ...]], flops: float) -> dict[str, Any] | None:
    """ms and TF/s; None where the backend cannot serve.

    Any other failure stands in the row: that of one backend must not lose the others.
    """
    try:
        ms = median_ms(jax.jit(fn), inputs)
    except NotImplementedError:
        return None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return {"ms": None, "tflops": None, "failed": reason}
    return {"ms": ms, "tflops": flops / ms / 1e9}


# ---- attention -------------------------------------------------------------------------------


def attention_backends() -> dict[str, Callable[[AttentionShape], Kernel]]:
    """Name -> (shape -> q, k, v -> out): ours without the specification, then the peers."""

    table = {name: our_attention(name) for name in ATTENTION if name != "reference"}
    with contextlib.suppress(ImportError):
        tokamax = importlib.import_module("tokamax")
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()  # it reads its options there
        table |= {f"tokamax {n}": tokamax_attention(tokamax, n) for n in ("mosaic", "triton")}
    return table


def our_attention(backend: str) -> Callable[[AttentionShape], Kernel]:
    def make(s: AttentionShape) -> Kernel:
        ids = s.segment_ids_BT()
        segments_BT = None if ids is None else jnp.asarray(ids)
        return lambda q, k, v: kernels.attention(
            q, k, v, causal=s.causal, window=s.window, softcap=s.softcap,
            segment_ids_BT=segments_BT, implementation=backend,
        )  # fmt: skip

    return make


def tokamax_attention(
    tokamax: ModuleType, implementation: str
) -> Callable[[AttentionShape], Kernel]:
    def make(s: AttentionShape) -> Kernel:
        window = None if s.window is None else (s.window, 0)
        return lambda q, k, v: tokamax.dot_product_attention(
            q, k, v, is_causal=s.causal, local_window_size=window, logits_soft_cap=s.softcap,
            implementation=implementation,
        )  # fmt: skip

    return make


def without_gradients(f: Kernel) -> Kernel:
    return lambda q, k, v, do: f(q, k, v)


def with_gradients(f: Kernel) -> Kernel:
    def run(q, k, v, do):
        out, pull = jax.vjp(f, q, k, v)
        return out, pull(do)

    return run


def attention_inputs(s: AttentionShape, dtype: Any, key: jax.Array) -> tuple[Any, ...]:
    q_key, k_key, v_key, do_key = jax.random.split(key, 4)
    query, shared = (s.B, s.T, s.N, s.H), (s.B, s.T, s.K, s.H)
    return (
        jax.random.normal(q_key, query, dtype),
        jax.random.normal(k_key, shared, dtype),
        jax.random.normal(v_key, shared, dtype),
        jax.random.normal(do_key, query, dtype),
    )


def visible_pairs(s: AttentionShape) -> int:
    """(query, key) pairs of one head and row that the mask leaves."""
    total = 0
    for length in s.documents or (s.T,):
        keys = np.arange(1, length + 1) if s.causal else np.full(length, length)
        total += int((keys if s.window is None else np.minimum(keys, s.window + 1)).sum())
    return total


def small_attention(s: AttentionShape) -> AttentionShape:
    """The same kind at a context that the specification can be computed for."""
    return s._replace(
        name=f"{s.name}_small",
        B=1,
        T=SMALL_T,
        N=s.N // s.K,
        K=1,
        window=None if s.window is None else s.window * SMALL_T // s.T,
        documents=tuple(n * SMALL_T // s.T for n in s.documents),
    )


def attention_error(shape: AttentionShape, make: Any, wrap: Any, dtype: Any) -> float | None:
    """Against the float32 specification, over outputs and gradients alike."""
    s = small_attention(shape)
    inputs = attention_inputs(s, dtype, jax.random.key(1))
    return error_of(wrap(make(s)), wrap(our_attention("reference")(s)), inputs)


def error_of(fn: Kernel, reference: Kernel, inputs: tuple[Any, ...]) -> float | None:
    """None where the backend fails on the smaller shape."""
    try:
        out = jax.jit(fn)(*inputs)
    except Exception:
        return None
    widen = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    with jax.default_matmul_precision("highest"):
        wide = jax.jit(reference)(*map(widen, inputs))
    return relative_error(out, wide)


# ---- loss ------------------------------------------------------------------------------------


def loss_with_gradients(s: LossShape, backend: str) -> Kernel:
    """x, w, labels, weights -> the mean loss and its gradients in x and w."""

    def loss(x, w, labels, weights):
        return kernels.linear_cross_entropy(
            x, w, labels, weights, softcap=s.softcap, z_loss=s.z_loss, valid_vocab=s.valid_vocab,
            implementation=backend,
        )  # fmt: skip

    return jax.value_and_grad(loss, argnums=(0, 1))


def loss_inputs(s: LossShape, dtype: Any, key: jax.Array) -> tuple[Any, ...]:
    x_key, w_key, label_key = jax.random.split(key, 3)
    return (
        jax.random.normal(x_key, (s.N, s.D), dtype),
        jax.random.normal(w_key, (s.D, s.V), dtype) * s.D**-0.5,
        jax.random.randint(label_key, (s.N,), 0, s.valid_vocab or s.V),
        jnp.full((s.N,), 1 / s.N, jnp.float32),
    )


def small_loss(s: LossShape) -> LossShape:
    return s._replace(name=f"{s.name}_small", N=256, D=64, V=512, valid_vocab=s.valid_vocab and 500)


def loss_error(shape: LossShape, backend: str, dtype: Any) -> float | None:
    """Of the gradients, against the float32 specification."""
    s = small_loss(shape)
    gradients = lambda name: lambda *inputs: loss_with_gradients(s, name)(*inputs)[1]
    inputs = loss_inputs(s, dtype, jax.random.key(1))
    return error_of(gradients(backend), gradients("reference"), inputs)
