"""Float8 matmuls whose output's gradient is cast by the kernel that computes it.

The backward pass of the op that reads a matmul's output knows the gradient first. With delayed
scaling it also knows the scale, so it can write float8 in both layouts, and the matmul reads no
gradient in 16 bits. JAX passes a cotangent for each output, of its shape and dtype. So the matmul
has further outputs, the arrays of `GradientCast`, which nobody computes or reads: their cotangents
are the gradient in float8. Exactly one op may read the output, and it takes the `GradientCast` too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain_kernels.matmul import fp8
from jaxtrain_kernels.matmul.fp8 import E5M2, Fp8, Fp8Input, Implementation
from jaxtrain_kernels.matmul.fp8.functions import itself


class GradientCast(NamedTuple):
    """Placeholders, whose cotangents are an output's gradient in e5m2, its transpose, and its amax,
    in slots (see `fp8.amax_in_slots`).

    scale: of the gradient, from the amax of earlier steps; its own cotangent is not read.
    """

    q_MN: Array
    q_NM: Array
    seen: Array
    scale: Array


def placeholders(M: int, N: int, amax: Float[Array, "*P"]) -> GradientCast:
    """For the gradient of an output [M, N]; amax: of it in earlier steps, 0 = none yet."""
    zeros = lambda *shape: jnp.zeros(shape, E5M2)
    scale = jax.lax.stop_gradient(fp8.given_scale(fp8.known_amax(amax), E5M2))
    return GradientCast(zeros(M, N), zeros(N, M), jnp.zeros_like(amax), scale)


def cotangent(q_MN: Array, q_NM: Array, seen: Array, slots: tuple[int, ...]) -> GradientCast:
    """The cotangent of a `GradientCast`. seen: amaxes of parts; slots: shape of its `seen`."""
    seen = fp8.amax_in_slots(seen, slots)
    return GradientCast(q_MN, q_NM, seen, jnp.zeros((), jnp.float32))


def cast_gradient(
    y: Float[Array, "*M N"], gradient: GradientCast, *, implementation: Implementation = None
) -> Float[Array, "*M N"]:
    """y itself; a pass of its own casts its gradient, after the op that computes it.

    implementation: of `fp8_quantize`. Raises NotImplementedError on a device without float8.
    """
    return _cast_gradient(implementation, y, gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cast_gradient(implementation, y, gradient):
    return y


def _cast_gradient_backward(implementation, saved, dy):
    scale, like_seen = saved
    dy_MN = dy.reshape(-1, dy.shape[-1])
    backend = fp8.choose_cast((dy_MN,), E5M2, implementation)
    found = backend.cast_measured((dy_MN,), 1 / scale, E5M2, itself)
    return dy, cotangent(*found, like_seen.shape)


_cast_gradient.defvjp(
    lambda implementation, y, gradient: (y, (gradient.scale, gradient.seen)),
    _cast_gradient_backward,
)


def fp8_matmul_for_cast(
    x_MK: Float[Array, "M K"],
    w_KN: Float[Array, "K N"],
    *,
    w_fp8: Fp8 | None = None,
    amax_2: Float[Array, "2 *P"],
    x_cast: Fp8Input | None = None,
    fast_accum: bool = False,
    implementation: Implementation = None,
) -> tuple[Float[Array, "M N"], GradientCast]:
    """`fp8_matmul`, for an op that casts the gradient of the output, and only that op.

    The output's own cotangent is not read.
    """
    if w_fp8 is None:
        w_fp8 = fp8.fp8_quantize(jax.lax.stop_gradient(w_KN), implementation=implementation)
    options = fp8.MatmulOptions(implementation, fast_accum)
    return _matmul(options, x_MK, w_KN, w_fp8, amax_2, x_cast)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(options, x_MK, w_KN, w_fp8, amax_2, x_cast):
    return _forward(options, x_MK, w_KN, w_fp8, amax_2, x_cast)[0]


def _forward(options, x_MK, w_KN, w_fp8, amax_2, x_cast):
    y_MN, saved = fp8.matmul_forward(options, x_MK, w_KN, w_fp8, amax_2, x_cast)
    M, N = y_MN.shape
    return (y_MN, placeholders(M, N, amax_2[1])), saved


def _backward(options, saved, cotangents):
    dy_MN, (q_MN, q_NM, seen, _) = cotangents
    scale = fp8.given_scale(fp8.known_amax(saved.amax_2[1]), E5M2)
    return fp8.matmul_backward(options, saved, Fp8(q_MN, q_NM, scale), seen, dy_MN.dtype)


_matmul.defvjp(_forward, _backward)
