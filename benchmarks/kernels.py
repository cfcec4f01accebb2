"""Helpers of the kernel benchmarks, and the benchmark of the head's matmul with cross-entropy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from jaxtrain_kernels import cross_entropy
from jaxtrain_kernels.shapes import LOSS_BENCH, LossShape

from benchmarks.peers import QUACK, quack
from benchmarks.power import Meter
from benchmarks.record import describe
from benchmarks.timing import ceilings, kernel_ms, relative_error, rotating
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.cluster.xla_flags import known_options
from jaxtrain.estimate.workload import SHORT
from jaxtrain.settings import UserError

Kernel = Callable[..., Any]
Row = dict[str, Any]


def bench_loss(variant: str | None = None, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Loss and both gradients for every backend; `reference` keeps all logits in memory.

    names: shapes and backends to measure; default all.
    """
    dtype = compute_dtype("auto")
    yield from growing("loss", dtype, variant, loss_rows(names, dtype))


def loss_rows(names: Sequence[str], dtype: Any) -> Iterator[Row]:
    known = [s.name for s in LOSS_BENCH]
    shapes, backends = chosen("loss", names, known, [*cross_entropy.BACKENDS, QUACK])
    for s in LOSS_BENCH:
        if s.name in shapes and QUACK in backends:
            yield from quack_rows(
                "linear_cross_entropy", s.name, (s.N, s.D, s.V), 6.0 * s.N * s.D * s.V
            )
    for shape in map(sized(small_loss), [s for s in LOSS_BENCH if s.name in shapes]):
        inputs = rotating(lambda key, s=shape: loss_inputs(s, dtype, key))
        flops = 6.0 * shape.N * shape.D * shape.V
        for backend in [name for name in cross_entropy.BACKENDS if name in backends]:
            # As a float8 training step is compiled (jaxtrain/train/program.py).
            options = known_options(("cublas",)) if backend.startswith("fp8") else {}
            fn = loss_with_gradients(shape, backend)
            figures = measured(fn, inputs, flops, compiler_options=options)
            if figures is not None:
                row = {"name": "linear_cross_entropy", "shape": shape.name, "backend": backend}
                yield row | figures | {"error": loss_error(shape, backend, dtype, options)}


def quack_rows(
    op: str, shape: str, sizes: Sequence[int], flops: float = 0, size: float = 0
) -> Iterator[Row]:
    """QuACK's row, in its own process; its error is not measured. size: bytes."""
    work = {"tflops": flops / 1e9, "gbps": size / 1e6}
    for row in quack(op, shape, *sizes) if jax.default_backend() == "gpu" else ():
        rates = {key: done / row["ms"] for key, done in work.items() if done and row["ms"]}
        yield row | rates


def sized(small: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that makes shapes suit the device: a CPU gets small ones of the same kind."""
    return small if jax.default_backend() == "cpu" else lambda shape: shape


def growing(
    bench: str, dtype: jnp.dtype, variant: str | None, rows: Iterable[Row]
) -> Iterator[dict[str, Any]]:
    """Yield the record, each time with one more row; an interrupted one keeps its rows so far."""
    ceilings(dtype)  # before the first row, since a peer's process measures while it yields rows
    kept: list[Row] = []
    for row in rows:
        kept.append(row)
        report(row)
        yield finished(bench, dtype, variant, kept)


def finished(bench: str, dtype: jnp.dtype, variant: str | None, rows: list[Row]) -> dict[str, Any]:
    """The record. floor_ms: time of a row's FLOPs at the rate of a large matmul."""
    record = describe(bench, "shapes", variant or SHORT[dtype.name], devices=1)
    limits = ceilings(dtype)
    for row in rows:
        if row.get("ms") and "tflops" in row:
            row["floor_ms"] = row["ms"] * row["tflops"] / limits.matmul_tflops
    return record | {"rows": rows, "floor": limits._asdict()}


def report(row: Row) -> None:
    """Print a row as one line immediately, since a kernel benchmark takes minutes."""
    rates = (("ms", "ms"), ("tflops", "TF/s"), ("gbps", "GB/s"), ("watts", "W"), ("sm_mhz", "MHz"))
    figures = [f"{row[key]:.4g} {unit}" for key, unit in rates if row.get(key)]
    wrong = [] if row.get("exact", True) else [f"WRONG: error {row['error']}"]
    found = row.get("failed") or ", ".join([*figures, *wrong])
    print(row["name"], row["shape"], row["backend"], found, flush=True)


def chosen(what: str, names: Sequence[str], *groups: Iterable[str]) -> list[set[str]]:
    """The members of each group (shapes, backends, ops) that are in `names`; if none, all of them.

    Raises UserError for a name that is in no group.
    """
    sets = [set(group) for group in groups]
    for name in names:
        if not any(name in group for group in sets):
            known = ", ".join(name for group in groups for name in group)
            raise UserError(f"bench {what} has no {name}; it has {known}")
    return [group & set(names) or group for group in sets]


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def measured(
    fn: Kernel, inputs: Sequence[tuple[Any, ...]], flops: float, **options: Any
) -> dict[str, Any] | None:
    """ms, TF/s, watts and clock; None if the backend does not support the inputs.

    Any other failure is put into the row, so that the other backends are still measured. options:
    of `kernel_ms`.
    """
    meter = Meter()
    try:
        ms = kernel_ms(fn, inputs, meter=meter, **options)
    except NotImplementedError:
        return None
    except Exception as error:
        return {"ms": None, "tflops": None, "failed": failure(error)}
    return {"ms": ms, "tflops": flops / ms / 1e9} | meter.figures()


def error_of(
    fn: Kernel,
    reference: Kernel,
    inputs: tuple[Any, ...],
    compiler_options: dict[str, Any] | None = None,
) -> float | None:
    """Relative error of `fn` against the float32 reference; None if it fails on these inputs."""
    try:
        out = jax.jit(fn, compiler_options=compiler_options)(*inputs)
    except Exception:
        return None
    return relative_error(out, exact(reference, inputs))


def exact(reference: Kernel, inputs: tuple[Any, ...]) -> Any:
    """The reference's results in float32, from the same rounded inputs."""
    widen = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    with jax.default_matmul_precision("highest"):
        return jax.jit(reference)(*jax.tree.map(widen, inputs))


def loss_with_gradients(s: LossShape, backend: str) -> Kernel:
    """A function (x, w, labels, weights) -> mean loss and its gradients in x and w."""

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


def loss_error(
    shape: LossShape, backend: str, dtype: Any, compiler_options: dict[str, Any] | None = None
) -> float | None:
    """Relative error of the gradients against the float32 specification."""
    s = small_loss(shape)
    gradients = lambda name: lambda *inputs: loss_with_gradients(s, name)(*inputs)[1]
    inputs = loss_inputs(s, dtype, jax.random.key(1))
    return error_of(gradients(backend), gradients("reference"), inputs, compiler_options)
