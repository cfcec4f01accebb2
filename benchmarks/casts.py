"""Benchmark of casts to float8 against the rate of a copy: plain tensors, and fused ReLU^2."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.matmul import fp8
from jaxtrain_kernels.matmul.fp8.functions import itself, relu2, relu2_grad

from benchmarks.decode import bandwidth
from benchmarks.kernels import error_of
from benchmarks.timing import ceilings, rotating

# (name, function of the arrays, number of arrays, dtype), as in a feed-forward network.
CASES = (
    ("fp8_cast", itself, 1, fp8.E4M3),
    ("fp8_cast_relu2", relu2, 1, fp8.E4M3),
    ("fp8_cast_relu2_grad", relu2_grad, 2, fp8.E5M2),
)


def casts(
    name: str, shape: tuple[int, int], backends: set[str], dtype: Any
) -> Iterator[dict[str, Any]]:
    """Rows for casts of tensors [M, F] by a given scale; `measured` ones also return the amax.

    GB/s count reading each array once and writing both layouts.
    """
    copy_gbps = ceilings(dtype).copy_gbps
    for op, function, count, to in CASES:
        make = lambda key, shape=shape, count=count: tuple(
            jax.random.normal(k, shape, dtype) for k in jax.random.split(key, count)
        )
        inputs, tested = rotating(make), make(jax.random.key(1), (64, 128))
        size = (count * dtype.itemsize + 2) * shape[0] * shape[1]
        for backend in [b for b in ("xla", "mosaic") if b in backends]:
            if fp8.BACKENDS[backend].supports(target(), *inputs[0]):
                continue
            for how, measure in (("", False), (" measured", True)):
                fn, plain = (cast(b, function, to, measure) for b in (backend, "reference"))
                row = {"name": f"{op}{how}", "shape": name, "backend": backend}
                row |= {"floor_ms": size / copy_gbps / 1e6}
                row |= bandwidth(fn, inputs, size, copy_gbps)
                yield row | {"error": error_of(fn, plain, tested)}
        del inputs


def cast(backend: str, function: Any, to: Any, measure: bool) -> Callable[..., Any]:
    module, scale = fp8.BACKENDS[backend], jnp.float32(1)
    if measure:
        return lambda *arrays: module.cast_measured(arrays, scale, to, function)
    return lambda *arrays: module.cast(arrays, scale, to, function, saturate=False)
