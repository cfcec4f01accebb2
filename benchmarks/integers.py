"""Benchmark of matmuls of a few rows with int8, int4 and bf16 weights; reading the weights is the
floor."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels.matmul import integers

from benchmarks.decode import bandwidth
from benchmarks.kernels import Kernel, Row, error_of
from benchmarks.timing import COLD_BYTES, ceilings
from jaxtrain.estimate.workload import SHORT

GROUP = 128
MOST_LAYERS = 16


class Product(NamedTuple):
    """x [M, K] times a matrix [K, N] of a stack."""

    name: str
    M: int
    K: int
    N: int


# Matrices of llama_8b, gpt_d12 and gpt_d24.
PRODUCTS = tuple(
    Product(f"m{M}_k{K}_n{N}", M, K, N)
    for K, N in ((4096, 14336), (14336, 4096), (4096, 4096), (4096, 1024),
                 (768, 3072), (3072, 768), (1536, 6144))
    for M in (1, 8, 32)
)  # fmt: skip
OPS = {"int8": integers.w8a16_matmul, "int4": integers.w4a16_matmul}
# plain: bf16 matmul. fragments: triton, with codes in the order of its kernels for a few rows.
# reduce (one row) and dot are XLA's.
BACKENDS = ("plain", "fragments", "triton", "reduce", "dot")


def product_rows(s: Product, backends: set[str], dtype: Any) -> Iterator[Row]:
    """Rows with ms of one matmul, including launches: one program runs each layer of a stack.

    floor_ms: time to read a matrix at the rate of a copy.
    """
    copy_gbps = ceilings(dtype).copy_gbps
    for form in (SHORT[dtype.name], "int8", "int4"):
        size = sum(x.nbytes for x in stack(s, form, 1, dtype, jax.random.key(0))[1:])
        layers = max(2, min(MOST_LAYERS, math.ceil(COLD_BYTES / size)))
        layers = 2 if jax.default_backend() == "cpu" else layers
        inputs = [stack(s, form, layers, dtype, jax.random.key(0))]
        _, *arrays = inputs[0]
        for backend in [b for b in BACKENDS if b in backends and (b == "plain") != (form in OPS)]:
            inputs = [(inputs[0][0], *ordered(arrays, backend))]
            fn = product(form, backend)
            figures = bandwidth(in_turn(fn, layers), inputs, size * layers, copy_gbps)
            if figures["ms"] is None and "failed" not in figures:
                continue  # the backend does not support it
            if figures["ms"]:
                figures["ms"] /= layers
                figures["floor_ms"] = size / copy_gbps / 1e6
            row = {"name": form, "shape": s.name, "backend": backend}
            of_first = lambda *arrays, fn=fn: fn(0, *arrays)
            reference = product(form, "reference" if form in OPS else "plain")
            error = error_of(of_first, lambda *a, f=reference: f(0, *a), inputs[0])
            yield row | figures | {"error": error}
        del inputs, arrays


def product(form: str, backend: str) -> Kernel:
    """A function (layer, x, arrays of a stack) -> x times that layer's matrix."""
    if form not in OPS:
        return lambda layer, x, w: x @ w[layer]
    return lambda layer, x, codes, scales: OPS[form](
        x, codes, scales, layer=layer, implementation={"fragments": "triton"}.get(backend, backend)
    )


def ordered(arrays: Sequence[Any], backend: str) -> list[Any]:
    """The arrays of stacks, with codes in the order that the backend multiplies fastest."""
    if backend != "fragments":
        return list(arrays)
    is_codes = lambda a: a.dtype in (jnp.int8, jnp.uint8)
    return [integers.to_fragments(a) if is_codes(a) else a for a in arrays]


def in_turn(fn: Kernel, layers: int) -> Kernel:
    """Run `fn` for each layer; each depends on the previous one, so that XLA cannot merge two."""

    def run(x: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        results: list[jax.Array] = []
        for layer in range(layers):
            if results:
                x, _ = jax.lax.optimization_barrier((x, results[-1]))
            results.append(fn(layer, x, *arrays))
        return results

    return run


def stack(s: Product, form: str, layers: int, dtype: Any, key: jax.Array) -> tuple[Any, ...]:
    """x, then `layers` stacked matrices; for int8 and int4 their codes and scales."""
    x_key, w_key, scale_key = jax.random.split(key, 3)
    x_MK = jax.random.normal(x_key, (s.M, s.K), dtype)
    if form not in OPS:
        return x_MK, jax.random.normal(w_key, (layers, s.K, s.N), dtype)
    if form == "int8":
        codes = jax.random.bits(w_key, (layers, s.K, s.N), jnp.uint8).astype(jnp.int8)
        return x_MK, codes, jax.random.uniform(scale_key, (layers, s.N))
    codes = jax.random.bits(w_key, (layers, s.K // 2, s.N), jnp.uint8)
    scales = jax.random.uniform(scale_key, (layers, s.K // GROUP, s.N))
    return x_MK, codes, scales.astype(jnp.bfloat16)


def small_product(s: Product) -> Product:
    return s._replace(name=f"{s.name}_small", K=256, N=128)
