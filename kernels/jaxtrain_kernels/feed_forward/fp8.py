"""The feed-forward network with the squared ReLU in float8: the activation is part of the casts.

One cast reads the hidden layer and writes relu(h)^2 in e4m3, in both layouts; in the backward one
reads h and the activation's gradient and writes h's in e5m2. Neither is ever there in 16 bits.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxtrain_kernels.matmul.fp8 import (
    E4M3,
    E5M2,
    Fp8,
    fp8_product,
    fp8_quantize,
    fp8_quantize_function,
)
from jaxtrain_kernels.matmul.fp8.functions import itself, relu2, relu2_grad


def fp8_feed_forward_relu2(
    x: Float[Array, "*M D"],
    w_up_DF: Float[Array, "D F"],
    w_down_FD: Float[Array, "F D"],
    *,
    copies: tuple[Fp8, Fp8] | None = None,
    amax_22: Float[Array, "2 2"] | None = None,
    constrain: Callable[[Array], Array] = lambda h: h,
    keep_hidden: bool = True,
    implementation: str | None = None,
) -> Float[Array, "*M D"]:
    """relu(x W_up)^2 W_down in x's dtype, with all six products in float8 as in `fp8_matmul`.

    copies: of both matrices in e4m3, made before; they themselves then only receive the gradient.
    amax_22: delayed scaling: of W_up and of W_down, the largest magnitudes of what it reads and of
    its output's gradient in earlier steps; what stands in for its gradient is those of this call.
    constrain: pins the placement of the hidden layer and of the activation's gradient under a mesh.
    keep_hidden: the backward pass has the hidden layer in x's dtype; else the root of its square's
    float8 copy, which it keeps anyway: 2 bytes less for each hidden value, of which the gradient's
    factor is then off by at most 1/32 (before its own cast, which is off by up to 1/8).
    implementation: of `fp8_quantize`. Raises NotImplementedError on a device without float8.
    """
    if copies is None:
        quantize = functools.partial(fp8_quantize, implementation=implementation)
        weights = jax.lax.stop_gradient((w_up_DF, w_down_FD))
        copies = quantize(weights[0]), quantize(weights[1])
    options = implementation, constrain, keep_hidden
    return _network(*options, x, (w_up_DF, w_down_FD), copies, amax_22)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _network(implementation, constrain, keep_hidden, x, weights, copies, amax_22):
    return _forward(implementation, constrain, keep_hidden, x, weights, copies, amax_22)[0]


def _forward(implementation, constrain, keep_hidden, x, weights, copies, amax_22):
    up, down = copies
    most_x, most_a = (None, None) if amax_22 is None else amax_22[:, 0]
    cast = functools.partial(fp8_quantize_function, dtype=E4M3, implementation=implementation)
    x_fp8, seen_x = cast(itself, (_rows(x),), amax=most_x)
    h_MF = fp8_product(x_fp8.q_MK, up.q_KM, x_fp8.scale * up.scale, x.dtype)
    h_MF = _pinned(constrain, h_MF, x)
    a_fp8, seen_a = cast(relu2, (h_MF,), amax=most_a)
    y_MD = fp8_product(a_fp8.q_MK, down.q_KM, a_fp8.scale * down.scale, x.dtype)
    # Of what is multiplied the backward needs the transposes alone, of the weights what is not
    # transposed; empty arrays carry the weights' dtypes.
    read = x_fp8._replace(q_MK=None), a_fp8._replace(q_MK=None)
    copies = up._replace(q_KM=None), down._replace(q_KM=None)
    like = weights[0][:0], weights[1][:0]
    h_MF = h_MF if keep_hidden else None
    return y_MD.reshape(x.shape), (read, h_MF, copies, like, amax_22, (seen_x, seen_a))


def _backward(implementation, constrain, keep_hidden, saved, dy):
    (x_fp8, a_fp8), h_MF, (up, down), (like_up, like_down), amax_22, seen = saved
    if not keep_hidden:
        h_MF = _pinned(constrain, _root(a_fp8, dy.dtype), dy)
    most_dh, most_dy = (None, None) if amax_22 is None else amax_22[:, 1]
    cast = functools.partial(fp8_quantize_function, dtype=E5M2, implementation=implementation)
    exact = functools.partial(fp8_product, exact=True)
    dy_fp8, seen_dy = cast(itself, (_rows(dy),), amax=most_dy)
    da_MF = exact(dy_fp8.q_MK, down.q_MK, dy_fp8.scale * down.scale, h_MF.dtype)
    da_MF = _pinned(constrain, da_MF, dy)
    d_down = exact(a_fp8.q_KM, dy_fp8.q_KM, a_fp8.scale * dy_fp8.scale, like_down.dtype)
    dh_fp8, seen_dh = cast(relu2_grad, (da_MF, h_MF), amax=most_dh)
    dx_MD = exact(dh_fp8.q_MK, up.q_MK, dh_fp8.scale * up.scale, dy.dtype)
    d_up = exact(x_fp8.q_KM, dh_fp8.q_KM, x_fp8.scale * dh_fp8.scale, like_up.dtype)
    maxima_22 = None
    if amax_22 is not None:
        maxima_22 = jnp.stack([jnp.stack([seen[0], seen_dh]), jnp.stack([seen[1], seen_dy])])
    return dx_MD.reshape(dy.shape), (d_up, d_down), None, maxima_22


_network.defvjp(_forward, _backward)


def _root(a_fp8: Fp8, dtype: DTypeLike) -> Array:
    """relu(h) of the float8 copy of relu(h)^2."""
    return jnp.sqrt(a_fp8.q_KM.T.astype(jnp.float32) * a_fp8.scale).astype(dtype)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _pinned(constrain: Callable[[Array], Array], h_MF: Array, like: Array) -> Array:
    return _rows(constrain(h_MF.reshape(*like.shape[:-1], -1)))
