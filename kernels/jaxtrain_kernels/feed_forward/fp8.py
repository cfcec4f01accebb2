"""Feed-forward network with the squared ReLU in float8: the casts compute the activation.

One cast reads the hidden layer h and writes relu(h)^2 in e4m3, in both layouts. In the backward one
cast reads h and the activation's gradient and writes h's gradient in e5m2. Neither result is stored
in 16 bits. With delayed scaling the casts can be fused into the matmuls before them (`epilogue`).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxtrain_kernels.matmul.fp8 import (
    E4M3,
    E5M2,
    Fp8,
    Fp8Input,
    Implementation,
    amax_in_slots,
    fp8_input,
    fp8_product,
    fp8_quantize,
    fp8_quantize_function,
)
from jaxtrain_kernels.matmul.fp8.functions import itself, relu2, relu2_grad
from jaxtrain_kernels.matmul.fp8_epilogue import fp8_product_quantized


def fp8_feed_forward_relu2(
    x: Float[Array, "*M D"],
    w_up_DF: Float[Array, "D F"],
    w_down_FD: Float[Array, "F D"],
    *,
    copies: tuple[Fp8, Fp8] | None = None,
    amax_22: Float[Array, "2 2 *P"] | None = None,
    x_cast: Fp8Input | None = None,
    constrain: Callable[[Array], Array] = lambda h: h,
    keep_hidden: bool = True,
    epilogue: str | None = None,
    fast_accum: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "*M D"]:
    """relu(x W_up)^2 W_down in x's dtype, with all six matmuls in float8 as in `fp8_matmul`.

    copies: both matrices, already quantized to e4m3; the arguments themselves then only receive the
    gradient. amax_22: delayed scaling. For W_up and W_down, it holds the amax of the matmul's input
    and of its output's gradient in earlier steps; its cotangent is the amaxes of this call, in
    slots as of `fp8_matmul`.
    x_cast: as of `fp8_matmul`.
    constrain: sharding constraint on the hidden layer and the activation's gradient under a mesh.
    keep_hidden: save the hidden layer in x's dtype for the backward. Otherwise the backward takes
    the root of the activation's float8 copy, which is saved anyway: 2 bytes per hidden value less,
    and the gradient's factor is off by at most 1/32 (before its own cast, off by up to 1/8).
    epilogue: backend of `fp8_product_quantized`, which casts the hidden layer and its gradient in
    the matmul's epilogue. It needs amax_22. None: separate casts read both in x's dtype.
    fast_accum: of `fp8_matmul`; of the gradients of x and of the hidden layer.
    implementation: of `fp8_quantize`. Raises NotImplementedError on a device without float8, and
    where a named backend cannot serve; ValueError for an epilogue without amax_22.
    """
    if epilogue is not None and amax_22 is None:
        raise ValueError("an epilogue casts by scales that are known before: pass amax_22")
    if copies is None:
        quantize = functools.partial(fp8_quantize, implementation=implementation)
        weights = jax.lax.stop_gradient((w_up_DF, w_down_FD))
        copies = quantize(weights[0]), quantize(weights[1])
    options = NetworkOptions(implementation, constrain, keep_hidden, epilogue, fast_accum)
    return _network(options, x, (w_up_DF, w_down_FD), copies, amax_22, x_cast)


class NetworkOptions(NamedTuple):
    implementation: Implementation
    constrain: Callable[[Array], Array]
    keep_hidden: bool
    epilogue: str | None
    fast_accum: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _network(options, x, weights, copies, amax_22, x_cast):
    return _forward(options, x, weights, copies, amax_22, x_cast)[0]


def _forward(options, x, weights, copies, amax_22, x_cast):
    up, down = copies
    most_x, most_a = (None, None) if amax_22 is None else amax_22[:, 0]
    cast = functools.partial(fp8_input, implementation=options.implementation)
    x_fp8, seen_x = x_cast or cast(_rows(x), most_x)
    of_hidden = x_fp8.q_MK, up.q_KM, x_fp8.scale * up.scale
    if options.epilogue is None or most_a is None:
        h_MF = _pinned(options.constrain, fp8_product(*of_hidden, x.dtype), x)
        a_fp8, seen_a = cast(h_MF, most_a, function=relu2)
    else:
        a_fp8, seen_a, h_MF = fp8_product_quantized(
            *of_hidden, relu2, E4M3, most_a, product_dtype=x.dtype, keep=options.keep_hidden,
            implementation=options.epilogue,
        )  # fmt: skip
    y_MD = fp8_product(a_fp8.q_MK, down.q_KM, a_fp8.scale * down.scale, x.dtype)
    # The backward needs only the transposed activations and the weights that are not transposed.
    # Empty arrays carry the weights' dtypes.
    read = x_fp8._replace(q_MK=None), a_fp8._replace(q_MK=None)
    copies = up._replace(q_KM=None), down._replace(q_KM=None)
    like = weights[0][:0], weights[1][:0]
    h_MF = h_MF if options.keep_hidden else None
    return y_MD.reshape(x.shape), (read, h_MF, copies, like, amax_22, (seen_x, seen_a))


def _backward(options, saved, dy):
    (x_fp8, a_fp8), h_MF, (up, down), (like_up, like_down), amax_22, seen = saved
    if not options.keep_hidden:
        h_MF = _pinned(options.constrain, _root(a_fp8, dy.dtype), dy)
    most_dh, most_dy = (None, None) if amax_22 is None else amax_22[:, 1]
    cast = functools.partial(
        fp8_quantize_function, dtype=E5M2, implementation=options.implementation
    )
    exact = functools.partial(fp8_product, exact=True)
    of_input = functools.partial(fp8_product, exact=not options.fast_accum)
    dy_fp8, seen_dy = cast(itself, (_rows(dy),), amax=most_dy)
    of_activation = dy_fp8.q_MK, down.q_MK, dy_fp8.scale * down.scale
    if options.epilogue is None or most_dh is None:
        da_MF = _pinned(options.constrain, of_input(*of_activation, h_MF.dtype), dy)
        dh_fp8, seen_dh = cast(relu2_grad, (da_MF, h_MF), amax=most_dh)
    else:
        dh_fp8, seen_dh, _ = fp8_product_quantized(
            *of_activation, relu2_grad, E5M2, most_dh, product_dtype=h_MF.dtype, other_MN=h_MF,
            exact=not options.fast_accum, implementation=options.epilogue,
        )  # fmt: skip
    d_down = exact(a_fp8.q_KM, dy_fp8.q_KM, a_fp8.scale * dy_fp8.scale, like_down.dtype)
    dx_MD = of_input(dh_fp8.q_MK, up.q_MK, dh_fp8.scale * up.scale, dy.dtype)
    d_up = exact(x_fp8.q_KM, dh_fp8.q_KM, x_fp8.scale * dh_fp8.scale, like_up.dtype)
    maxima_22 = None
    if amax_22 is not None:
        in_slots = lambda *seen: jnp.stack([amax_in_slots(x, amax_22.shape[2:]) for x in seen])
        maxima_22 = jnp.stack([in_slots(seen[0], seen_dh), in_slots(seen[1], seen_dy)])
    return dx_MD.reshape(dy.shape), (d_up, d_down), None, maxima_22, None


_network.defvjp(_forward, _backward)


def _root(a_fp8: Fp8, dtype: DTypeLike) -> Array:
    """relu(h), computed from the float8 copy of relu(h)^2."""
    return jnp.sqrt(a_fp8.q_KM.T.astype(jnp.float32) * a_fp8.scale).astype(dtype)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _pinned(constrain: Callable[[Array], Array], h_MF: Array, like: Array) -> Array:
    return _rows(constrain(h_MF.reshape(*like.shape[:-1], -1)))
