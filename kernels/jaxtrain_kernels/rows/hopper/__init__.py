"""Row kernels for Hopper, in Pallas Mosaic GPU (`rows.hopper.launch` describes how they run)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.rows.hopper import norm, rope
from jaxtrain_kernels.rows.hopper.launch import launch, like, load

ELEMENTS = 128 * 8 * 4  # per block of an elementwise kernel: 4 vectors of 16 bytes per thread
WIDEST = 2048  # columns of a row that a warp can hold in registers


def supports(target: Target, op: str, *arrays: Any) -> str | None:
    return hopper.unsupported_reason(target, *arrays) or unsupported_reason(op, *arrays)


def unsupported_reason(op: str, x: jax.Array | jax.ShapeDtypeStruct, *_: object) -> str | None:
    """Return why arrays of this shape cannot be served; None = they can."""
    if op == "relu2":
        # In float16 the squares of small values underflow, from which the gradient is computed.
        if x.dtype == jnp.float16:
            return "needs bfloat16, got float16"
        if x.size % ELEMENTS:
            return f"needs a multiple of {ELEMENTS} elements, got {x.size}"
        return None
    if op == "rope_norm":
        H, T = x.shape[-1], x.shape[1]
        if H not in (32, 64, 128, 256):
            return f"needs a head dim of 32, 64, 128 or 256, got {H}"
        tokens = rope.tokens_of_block(H)
        return f"needs a length in multiples of {tokens}, got {T}" if T % tokens else None
    D, rows = x.shape[-1], math.prod(x.shape[:-1])
    if D % 128 or D > WIDEST:
        return f"needs a width in multiples of 128 up to {WIDEST}, got {D}"
    if rows % norm.ROWS:
        return f"needs tokens in multiples of {norm.ROWS}, got {rows}"
    return None


def residual_norm(x_BTD, y_BTD, *, eps, interpret: hopper.Interpret = False):
    """Backend of the public function. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    return norm.residual_norm(norm.NormOptions(eps, interpret), x_BTD, y_BTD)


def mixed_norm(x_BTD, y_BTD, x0_BTD, a, b, *, eps, interpret: hopper.Interpret = False):
    """Backend of the public function."""
    options = norm.NormOptions(eps, interpret)
    return norm.mixed_norm(options, x_BTD, y_BTD, x0_BTD, a, b)


def rope_norm(q_BTNH, k_BTKH, cos_BTH, sin_BTH, *, eps, interpret: hopper.Interpret = False):
    """Backend of the public function."""
    options = rope.RopeOptions(eps, interpret)
    return rope.rope_norm(options, q_BTNH, k_BTKH, cos_BTH, sin_BTH)


def relu2(x_BTF, *, interpret: hopper.Interpret = False):
    """Backend of the public function. The backward needs only y: 2 max(x, 0) = 2 sqrt(y)."""
    return _relu2(interpret, x_BTF)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _relu2(interpret, x_BTF):
    return _elementwise(_square, interpret, x_BTF)


def _relu2_fwd(interpret, x_BTF):
    y_BTF = _relu2(interpret, x_BTF)
    return y_BTF, y_BTF


def _relu2_bwd(interpret, y_BTF, dy_BTF):
    return (_elementwise(_slope, interpret, y_BTF, dy_BTF),)


_relu2.defvjp(_relu2_fwd, _relu2_bwd)


def _square(x):
    return jnp.square(jnp.maximum(x, 0.0))


def _slope(y, dy):
    return 2.0 * dy * jnp.sqrt(y)


@hopper.jit_kernel("function", "interpret")
def _elementwise(function, interpret, *arrays):
    layout = plgpu.Layout.WG_STRIDED((ELEMENTS,), vec_size=8)

    def relu2(block, *refs):
        here = pl.ds(block * ELEMENTS, ELEMENTS)
        inputs, out = refs[:-1], refs[-1]
        out[here] = function(*(load(ref.at[here], layout) for ref in inputs)).astype(out.dtype)

    flat = [x.reshape(-1) for x in arrays]
    blocks = flat[0].size // ELEMENTS
    (out,) = launch(relu2, [like(flat[0])], blocks, *flat, interpret=interpret)
    return out.reshape(arrays[0].shape)
