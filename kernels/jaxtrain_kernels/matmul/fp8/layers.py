"""Float8 copies of stacked weights, layer by layer: one read and two writes of each.

A layer's kernel reads it out of the stack, so XLA copies neither the layer nor its float8 matrices.
XLA's own fusion of a cast and a transpose runs at 1.8 TB/s on an H200, and XLA transposes some
stacks twice. In Triton, whose conversions of layouts transpose bytes.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.matmul.fp8 import E4M3, Fp8, fp8_scale
from jaxtrain_kernels.matmul.fp8.xla import fp8_amax

BLOCK = 64  # rows and columns of a program's tile
WARPS = 4


def supports(target: Target, *stacks) -> str | None:
    """Return why the kernel cannot cast these stacks; None = it can."""
    if reason := triton_unsupported(target) or hopper.unsupported_reason(target):
        return reason
    for K, N in (w_LKN.shape[1:] for w_LKN in stacks):
        if K % BLOCK or N % BLOCK:
            return f"needs rows and columns in multiples of {BLOCK}, got {(K, N)}"
    return None


def quantize_layers(*stacks: Float[Array, "L K _"], interpret: bool = False) -> list[Fp8]:
    """`fp8_quantize` of each layer, with a scale of its own; of several stacks, of their matrices
    concatenated by columns.

    A weight in 16 bits is read as float32. If it is a step's copy of a float32 weight, XLA drops
    the rounding, as it does in its own casts, and the kernel reads the weight itself.
    """
    wide = [w_LKN.astype(jnp.float32) for w_LKN in stacks]
    amax_L = functools.reduce(jnp.maximum, (jax.vmap(fp8_amax)(w_LKN) for w_LKN in wide))
    scale_L = fp8_scale(amax_L, E4M3)
    index = functools.partial(jnp.full, (1,), dtype=jnp.int32)
    layers = []
    for layer in range(len(amax_L)):
        q_KN, q_NK = cast_layer(interpret, 1 / scale_L, index(layer), wide)
        layers.append(Fp8(q_KN, q_NK, scale_L[layer]))
    return layers


@functools.partial(jax.jit, static_argnums=0)
def cast_layer(interpret: bool, multiplier_L, layer_1, stacks):
    """Return a layer's concatenated matrices times its multiplier in e4m3, and their transpose."""
    K, columns = stacks[0].shape[1], [w_LKN.shape[2] for w_LKN in stacks]
    N, ends = sum(columns), list(itertools.accumulate(columns))

    def kernel(multiplier_ref, layer_ref, *refs):
        *w_refs, q_ref, qt_ref = refs
        layer = layer_ref[0]
        row = pl.program_id(0) * BLOCK + jnp.arange(BLOCK)
        first = pl.program_id(1) * BLOCK
        column = first + jnp.arange(BLOCK)

        def read(n: int) -> Array:
            own = column - (ends[n] - columns[n])
            return plgpu.load(w_refs[n].at[layer, row[:, None], own[None]])

        reads = [functools.partial(read, n) for n in range(len(ends))]
        number = sum((first >= end).astype(jnp.int32) for end in ends[:-1])
        w = lax.switch(number, reads)
        q = (w * multiplier_ref[layer]).astype(E4M3)
        plgpu.store(q_ref.at[row[:, None], column[None]], q)
        plgpu.store(qt_ref.at[column[:, None], row[None]], q.T)

    struct = jax.ShapeDtypeStruct
    return pl.pallas_call(
        kernel,
        grid=(K // BLOCK, N // BLOCK),
        out_shape=[struct((K, N), E4M3), struct((N, K), E4M3)],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="fp8_cast_layer",
    )(multiplier_L, layer_1, *stacks)
