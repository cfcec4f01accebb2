"""Benchmark of a training step's matmuls at the power limit: XLA's choice, the best of cuBLASLt's
first candidates, our own kernel.

    python -m benchmarks products --config gpt_d12

Each is repeated for over a second, so that the GPU's clock settles at its power limit; rows have
watts and clock. `burst_ms` is the time of the first calls after a rest, as an autotuner measures
it. The last rows sum up a step, per backend and with the fastest backend of each matmul.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtrain_kernels.cross_entropy.xla import default_chunk
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.matmul.hopper import gemm

from benchmarks.cublaslt import Problem, Products
from benchmarks.kernels import Row, failure, finished, growing, measured, report
from benchmarks.power import Meter
from benchmarks.record import Record
from benchmarks.timing import median_ms, relative_error, rotating
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.estimate.workload import load_workload
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Specs, is_block_matrix, path_name

SECONDS = 0.25  # per window; five are measured
REST_S = 0.15  # before a burst
BURST_CALLS = 4
MOST = 12  # cuBLASLt kernels tried, in the heuristic's order
TOLERANCE = 0.02  # largest relative error; beyond it, the kernel was called wrongly
JOINED = ("q", "k", "v")  # matrices that are one fused matmul


class StepProduct(NamedTuple):
    """A matmul of a step, and how often it is computed. pass_: forward, or the gradient of the
    input or of the weight."""

    name: str
    pass_: str
    count: int
    problem: Problem

    @property
    def flops(self) -> float:
        return 2.0 * self.problem.M * self.problem.N * self.problem.K


def step_products(specs: Specs, tokens: int, dtype: str = "bfloat16") -> list[StepProduct]:
    """Matmuls of the blocks' matrices and of the head, forward and backward, for `tokens` tokens.

    The head runs in chunks of tokens, whose weight gradients are accumulated in float32.
    Raises UserError for experts, whose grouped matmuls are no plain ones.
    """
    shapes: dict[str, tuple[int, int, int]] = {}  # count, in, out
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        parent, _, name = path_name(path).rpartition("/")
        if spec.group == "experts":
            raise UserError("products: a mixture of experts has groups of rows; bench matmul does")
        if not (is_block_matrix(spec) or spec.role == "head"):
            continue
        ins, outs = spec.shape[-2:]
        key = f"{parent}/qkv" if name in JOINED else path_name(path)
        before = shapes.get(key, (0, 0, 0))[2]
        shapes[key] = spec.size // (ins * outs), ins, outs + before
    found = []
    for name, (layers, ins, outs) in shapes.items():
        rows, times, out_dtype = tokens, layers, dtype
        if name == "head":
            rows = min(tokens, default_chunk(tokens, outs))
            times, out_dtype = layers * -(-tokens // rows), "float32"
        each = {
            "forward": Problem(rows, outs, ins, dtype=dtype, out_dtype=dtype),
            "input": Problem(rows, ins, outs, b_turned=True, dtype=dtype, out_dtype=dtype),
            "weight": Problem(ins, outs, rows, True, adds=name == "head", dtype=dtype,
                              out_dtype=out_dtype),
        }  # fmt: skip
        found += [StepProduct(name, way, times, problem) for way, problem in each.items()]
    return found


def bench_products(config: str, overrides: Sequence[str], variant: str | None) -> Iterator[Record]:
    """Yield the record, each time with one more row; the last one has the sums."""
    w = load_workload(config, overrides)
    dtype = compute_dtype(w.config.train.precision)
    products = step_products(w.spec.specs, w.tokens, str(jnp.dtype(dtype)))
    label = {"config": w.name, "workload": w.facts()}
    kept: list[Row] = []
    for record in growing("products", dtype, variant, product_rows(products)):
        kept = record["rows"]
        yield record | label
    totals = sums_of(kept)
    for row in totals:
        report(row)
    yield finished("products", dtype, variant, [*kept, *totals]) | label


def product_rows(products: Sequence[StepProduct]) -> Iterator[Row]:
    for product in products:
        p = product.problem
        label = {
            "name": f"{product.name} {product.pass_}", "shape": f"{p.M} x {p.N} x {p.K}",
            "count": product.count,
        }  # fmt: skip
        sets = rotating(lambda key, p=p: operands(p, key))
        expected = jax.jit(lambda a, b, y, p=p: multiply(p, a, b, y))(*sets[0])
        fn = lambda a, b, y, p=p: multiply(p, a, b, y)
        figures = measured(fn, sets, product.flops, seconds=SECONDS)
        yield label | {"backend": "xla"} | (figures or {})
        if ours := our_product(p):
            figures = measured(ours, sets, product.flops, seconds=SECONDS)
            yield label | {"backend": "mosaic"} | (figures or {})
        if jax.default_backend() == "gpu":
            yield label | {"backend": "cublaslt"} | fastest_of_library(product, sets, expected)


def operands(p: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random a, b and y of a problem; b is scaled to keep the variance."""
    keys = jax.random.split(key, 3)
    a = jax.random.normal(keys[0], (p.K, p.M) if p.a_turned else (p.M, p.K), p.dtype)
    b = jax.random.normal(keys[1], (p.N, p.K) if p.b_turned else (p.K, p.N), p.dtype)
    y = jnp.ones((p.M, p.N), p.out_dtype)
    return a, (b * p.K**-0.5).astype(p.dtype), y


def multiply(p: Problem, a: jax.Array, b: jax.Array, y: jax.Array) -> jax.Array:
    """The matmul as a training step computes it."""
    dims = (((0 if p.a_turned else 1,), (1 if p.b_turned else 0,)), ((), ()))
    found = lax.dot_general(a, b, dims, preferred_element_type=jnp.dtype(p.out_dtype))
    return y + found if p.adds else found


def our_product(p: Problem) -> Callable[..., jax.Array] | None:
    """The kernel of `gemm`; None if it does not support the problem."""
    a = jax.ShapeDtypeStruct((p.M, p.K), p.dtype)
    if p.a_turned or p.adds or gemm.supports(target(), a):
        return None
    return lambda a, b, _: gemm.matmul(a, b, b_is_NK=p.b_turned)


def fastest_of_library(
    product: StepProduct, sets: Sequence[tuple[jax.Array, ...]], expected: jax.Array
) -> Row:
    """The row of the kernel that is fastest under sustained load; `burst`: of the kernel that is
    fastest after a rest."""
    try:
        with contextlib.closing(Products(product.problem)) as products:
            tried = min(products.count, MOST)
            rows = [library_kernel(products, i, sets, expected) for i in range(tried)]
    except (UserError, RuntimeError, OSError) as error:
        return {"ms": None, "tflops": None, "failed": failure(error)}
    found = [row for row in rows if "ms" in row]
    if not found:
        why = next((row["failed"] for row in rows), "cuBLASLt offers no kernel")
        return {"ms": None, "tflops": None, "failed": why}
    best = min(found, key=lambda row: row["ms"])
    chosen = min(found, key=lambda row: row["burst_ms"])
    rate = {"tflops": product.flops / best["ms"] / 1e9}
    counts = {"kernels": len(found), "failed_kernels": len(rows) - len(found)}
    return best | rate | counts | {"ms_of_burst": chosen["ms"]}


def library_kernel(
    products: Products, i: int, sets: Sequence[tuple[jax.Array, ...]], expected: jax.Array
) -> Row:
    """Figures of one kernel; only `failed` if it does not run or its result is wrong."""
    a, b, like_y = sets[0]
    y = jnp.ones_like(like_y)
    jax.block_until_ready((y, sets))
    try:
        products.run(i, a, b, y)
        products.block_until_ready()
    except RuntimeError as error:
        return {"failed": failure(error)}
    if (error := relative_error(jnp.copy(y), expected)) > TOLERANCE:
        return {"failed": f"kernel {i} of cuBLASLt is off by {error:.2g}"}

    def call(a: jax.Array, b: jax.Array, _: jax.Array) -> Products:
        products.run(i, a, b, y)
        return products

    time.sleep(REST_S)
    burst = burst_ms(call, sets)
    meter = Meter()
    ms = median_ms(call, sets, seconds=SECONDS, meter=meter)
    return {"ms": ms, "burst_ms": burst, **products.describe(i), "error": error} | meter.figures()


def burst_ms(call: Callable[..., Products], sets: Sequence[tuple[jax.Array, ...]]) -> float:
    begin = time.perf_counter()
    for i in range(BURST_CALLS):
        products = call(*sets[i % len(sets)])
    products.block_until_ready()
    return 1e3 * (time.perf_counter() - begin) / BURST_CALLS


def sums_of(rows: Sequence[Row]) -> list[Row]:
    """Milliseconds of a step's matmuls for each backend that has all of them, and for the best."""
    measured_rows = [row for row in rows if row.get("ms")]
    by_product: dict[str, dict[str, float]] = {}
    for row in measured_rows:
        by_product.setdefault(row["name"], {})[row["backend"]] = row["count"] * row["ms"]
    if len(by_product) < len({row["name"] for row in rows}):
        return []  # some matmul has no measurement
    flops = sum(
        {row["name"]: row["count"] * row["ms"] * row["tflops"] for row in measured_rows}.values()
    )
    totals = {
        backend: sum(times[backend] for times in by_product.values())
        for backend in dict.fromkeys(row["backend"] for row in measured_rows)
        if all(backend in times for times in by_product.values())
    }
    totals["fastest of each"] = sum(min(times.values()) for times in by_product.values())
    return [
        {
            "name": "step",
            "shape": "all products",
            "backend": backend,
            "ms": ms,
            "tflops": flops / ms,
        }
        for backend, ms in totals.items()
    ]
