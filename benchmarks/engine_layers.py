"""Benchmark of the decode megakernel (all layers for one sequence): time per layer, GB/s."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import decode_layers as kernels
from jaxtrain_kernels.decode_layers import LayersWeights
from jaxtyping import Array

from benchmarks.decode_rate import step_seconds
from benchmarks.timing import Ceilings, relative_error
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.kv_cache import StackedPages
from jaxtrain.model.packed import kernel_of, layers_shape, pack_layers, why_not_packed
from jaxtrain.weights.params import Params

REPEATS = 5
TOLERANCE = 0.05  # relative error of the residual stream after all layers, in 16 bits
PAGE = 32  # tokens


def layers_row(
    c: ResolvedModel, graphdef: nnx.GraphDef, params: Params, cached_tokens: int, limits: Ceilings
) -> dict[str, Any]:
    """A row of the kernel with a sequence of `cached_tokens`. GB/s: of weights, keys and values.
    error: of the residual stream against the reference; beyond TOLERANCE nothing is timed."""
    label = {"name": "decode_layers", "shape": f"1 x {cached_tokens}"}
    pages = cached_tokens // PAGE + 1
    sizes = (c.depth, pages, PAGE, c.kv_heads, c.head_dim)
    stack = jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    if why := why_not_packed(c, params, (stack, stack)):
        return label | {"failed": why}
    kernel, _ = kernel_of(c, params, (stack, stack))
    label["backend"] = kernel
    keys, values = (jax.random.normal(jax.random.key(i), sizes, stack.dtype) for i in (0, 1))
    kv = StackedPages(keys, values)
    shape, packed = layers_shape(c), pack_layers(kernel, graphdef, params)
    x0_D = jax.random.normal(jax.random.key(2), (c.width,), jnp.bfloat16)
    angles_h = jnp.arange(c.head_dim // 2, dtype=jnp.float32)
    cos_h, sin_h = jnp.cos(angles_h), jnp.sin(angles_h)
    values_LC = jnp.zeros((c.depth, c.kv_heads * c.head_dim), jnp.bfloat16)
    table_W = jnp.arange(pages, dtype=jnp.int32)

    token = table_W, jnp.int32(cached_tokens), jnp.int32(1)
    given = shape, packed, x0_D, cos_h, sin_h, values_LC, (keys, values), *token
    found, expected = (
        kernels.decode_layers(*given, implementation=name)[0] for name in (kernel, "reference")
    )
    if not (error := relative_error(found, expected)) <= TOLERANCE:
        return label | {"failed": f"off by {error:.2g}", "error": error}

    @jax.jit
    def run(packed: LayersWeights, x0_D: Array, kv: StackedPages, count: Array) -> Array:
        def step(i: int, carry: tuple[Array, StackedPages]) -> tuple[Array, StackedPages]:
            x_D, kv = carry
            x_D, _, (keys, values), _ = kernels.decode_layers(
                shape, packed, x_D, cos_h, sin_h, values_LC, (kv.k_LPpKH, kv.v_LPpKH), *token,
                implementation=kernel,
            )  # fmt: skip
            return x_D, StackedPages(keys, values)

        return jax.lax.fori_loop(0, count, step, (x0_D, kv))[0]

    seconds = step_seconds(functools.partial(run, packed, x0_D, kv), REPEATS)
    seen = sum(min(cached_tokens, window) for window in shape.windows)
    size = sum(x.nbytes for x in packed) + seen * 2 * sizes[-1] * sizes[-2] * 2
    gbps = size / seconds / 1e9
    return label | {
        "error": error,
        "ms": 1e3 * seconds,
        "us_a_layer": 1e6 * seconds / c.depth,
        "gbps": gbps,
        "of_copy": gbps / limits.copy_gbps,
    }
