"""Benchmark of casts to float8 against the rate of a copy: plain tensors, fused ReLU^2, norms."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtrain_kernels import rows
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.matmul import fp8
from jaxtrain_kernels.matmul.fp8.functions import itself, relu2, relu2_grad
from jaxtrain_kernels.rows import fp8 as fp8_norms

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
    name: str, shape: tuple[int, int], backends: set[str], dtype: jnp.dtype
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


def norm_casts(
    name: str, shape: tuple[int, int], backends: set[str], dtype: jnp.dtype
) -> Iterator[dict[str, Any]]:
    """Rows for norms of x + y, and of a (x + y) + b x0, and their casts: in one pass, or `apart`.

    GB/s count reading x, y and x0 and writing the sum and both layouts, once each.
    """
    copy_gbps = ceilings(dtype).copy_gbps
    for mixed in (False, True):
        make = lambda key, shape=shape, mixed=mixed: tuple(
            jax.random.normal(k, (1, *shape), dtype) for k in jax.random.split(key, 2 + mixed)
        )
        inputs = rotating(make)
        size = (len(inputs[0]) * dtype.itemsize + dtype.itemsize + 2) * shape[0] * shape[1]
        for backend in [b for b in ("xla", "mosaic") if b in backends]:
            if fp8_norms.BACKENDS[backend].supports(target(), *inputs[0]):
                continue
            for how, run in (("", norm_and_cast), (" apart", norm_then_cast)):
                row = {"name": f"norm_cast {'mixed' if mixed else 'residual'}{how}"}
                row |= {"shape": name, "backend": backend, "floor_ms": size / copy_gbps / 1e6}
                yield row | bandwidth(run(backend), inputs, size, copy_gbps)
        del inputs


SCALES = 0.9, 0.1  # of the stream and of x0


def norm_and_cast(backend: str) -> Callable[..., Any]:
    """The sum and its norm in float8, by an earlier amax of 4."""

    def run(x: jax.Array, y: jax.Array, *x0: jax.Array) -> Any:
        scales = tuple(map(jnp.float32, SCALES)) if x0 else None
        given = x, y, x0[0] if x0 else None, scales, jnp.float32(4)
        made = fp8_norms.norm_quantized(*given, eps=1e-6, implementation=backend)
        return made.s_BTD, made.cast

    return run


def norm_then_cast(backend: str) -> Callable[..., Any]:
    """The same by two kernels, as without `model.fp8_norms`."""

    def run(x: jax.Array, y: jax.Array, *x0: jax.Array) -> Any:
        more = {"eps": 1e-6, "implementation": backend}
        if x0:
            s, h, _ = rows.mixed_norm(x, y, *x0, *map(jnp.float32, SCALES), **more)
        else:
            s, h = rows.residual_norm(x, y, **more)
        h_MK = h.reshape(-1, h.shape[-1])
        return s, fp8.fp8_quantize_delayed(
            h_MK, fp8.E4M3, jnp.float32(4), implementation=backend
        )  # fmt: skip

    return run
