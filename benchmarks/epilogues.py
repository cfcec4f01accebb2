"""Benchmark of float8 matmuls with their output cast to float8, in the epilogue or a later pass."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.matmul import fp8, fp8_epilogue
from jaxtrain_kernels.matmul.fp8.functions import relu2, relu2_grad
from jaxtrain_kernels.matmul.fp8_epilogue import hopper
from jaxtrain_kernels.matmul.fp8_epilogue.reference import ProductOptions
from jaxtrain_kernels.matmul.hopper.gemm import GemmTiling

from benchmarks.kernels import Row, error_of, measured
from benchmarks.timing import rotating
from jaxtrain.cluster.xla_flags import known_options

# Tilings tried besides the default, by `gradient`: tile shape, and the data in flight.
TILINGS = {
    False: (
        GemmTiling(128, 192, stages=4, parts=2), GemmTiling(128, 192, stages=4, parts=1, cluster=1),
        GemmTiling(128, 192, stages=4, parts=1, group=16), GemmTiling(128, 128, stages=5, parts=2),
        GemmTiling(128, 128, stages=3, parts=1, cluster=1, shared=True),
    ),
    True: (
        GemmTiling(128, 128, stages=3, parts=1, shared=True),
        GemmTiling(128, 128, stages=3, parts=1, cluster=1, shared=True, group=16),
    ),
}  # fmt: skip


def epilogue_rows(
    name: str, sizes: tuple[int, int, int], backends: set[str], dtype: Any
) -> Iterator[Row]:
    """Rows for the matmul into the hidden layer (output kept) and its gradient; sizes: M, K, N.

    TF/s count the matmul alone; ms include the casts. A non-default tiling is part of the row's
    name.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return
    for gradient in (False, True):
        options = options_of(gradient)
        op = "fp8_product_relu2_grad" if gradient else "fp8_product_relu2"
        make = functools.partial(operands, options, sizes)
        inputs, tested = rotating(make), operands(options, (256, 256, 384), jax.random.key(1))
        known = known_options(("cublas",))  # as a float8 training step is compiled
        for backend in [b for b in ("xla", "mosaic") if b in backends]:
            module = fp8_epilogue.BACKENDS[backend]
            if module.supports(target(), options, *inputs[0]):
                continue
            tilings = (None, *TILINGS[gradient]) if backend == "mosaic" else (None,)
            for tiling in tilings:
                fn = product(module, options, tiling)
                flops = 2.0 * sizes[0] * sizes[1] * sizes[2]
                figures = measured(fn, inputs, flops, compiler_options=known)
                if figures is None:
                    continue
                label = "" if tiling is None else f" {numbers_of(tiling)}"
                row = {"name": f"{op}{label}", "shape": name, "backend": backend}
                plain = product(fp8_epilogue.reference, options, None)
                yield row | figures | {"error": error_of(fn, plain, tested, known)}
        del inputs


def numbers_of(t: GemmTiling) -> str:
    how = "shared" if t.shared else "in turns"
    sizes = f"{t.rows}x{t.columns} {how}, {t.stages} stages, {t.parts} parts, cluster {t.cluster}"
    return f"{sizes}, group {t.group}"


def options_of(gradient: bool) -> ProductOptions:
    """The options that a feed-forward network uses."""
    function, dtype = (relu2_grad, fp8.E5M2) if gradient else (relu2, fp8.E4M3)
    return ProductOptions(function, dtype, jnp.bfloat16, keep=not gradient, exact=gradient)


def operands(
    options: ProductOptions, sizes: tuple[int, int, int], key: jax.Array
) -> tuple[jax.Array, ...]:
    """Normal random values in float8; for the gradient also the hidden layer."""
    (M, K, N), keys = sizes, jax.random.split(key, 3)
    kinds = options.dtype, fp8.E4M3
    pairs = zip(keys, ((M, K), (N, K)), kinds)
    arrays = [jax.random.normal(k, shape, jnp.bfloat16).astype(kind) for k, shape, kind in pairs]
    if options.function is relu2_grad:
        arrays.append(jax.random.normal(keys[2], (M, N), jnp.bfloat16))
    return tuple(arrays)


def product(module: Any, options: ProductOptions, tiling: GemmTiling | None) -> Callable[..., Any]:
    """The arrays in float8 and their maximum, of a product with entries of some K^0.5."""
    more = {"tiling": tiling} if module is hopper else {}

    def run(*arrays: jax.Array) -> Any:
        one = jnp.float32(1)
        scale = jnp.float32(2.0 ** -round(math.log2(arrays[0].shape[1]) / 2))
        found = module.product_quantized(options, arrays, scale, one, **more)
        return [x for x in found if x is not None]

    return run
