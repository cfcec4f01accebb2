"""The feed-forward network with the squared ReLU: y = relu(x W_up)^2 W_down.

Its gradient needs only the activation: with h = relu(u)^2, dh/du = 2 relu(u) = 2 sqrt(h). The root
halves h's relative error, so rounding h to bfloat16 adds at most 2^-10 to the relative error of u.
In a fused kernel u is in float32; elsewhere u itself has been rounded, to 2^-9. (In float16, h and
the gradient underflow to 0 where u is below 2^-12.)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.feed_forward import hopper, reference, xla

# The first backend that can serve the call is the default.
BACKENDS = {"mosaic": hopper, "xla": xla, "reference": reference}


def _same(x: Array) -> Array:
    return x


class Placement(NamedTuple):
    """What a mesh does to the arrays of `feed_forward_relu2`, forward and backward.

    gather: collects the rows of the input, and of the output's gradient. constrain: is applied to
    the hidden layer and its gradient. matmul: of these and a matrix [F, D]; sums over the shards.
    """

    gather: Callable[[Array], Array] = _same
    constrain: Callable[[Array], Array] = _same
    matmul: Callable[[Array, Array], Array] = jnp.matmul


def relu2_matmul(
    x: Float[Array, "*M K"], w_KN: Float[Array, "K N"], *, implementation: str | None = None
) -> Float[Array, "*M N"]:
    """relu(x w)^2 in x's dtype. It defines no gradient: see `feed_forward_relu2`."""
    backend = BACKENDS[_choose("relu2_matmul", implementation, x, w_KN)]
    return backend.relu2_matmul(x, w_KN)


def matmul_relu2_grad(
    dy: Float[Array, "*M K"],
    w_NK: Float[Array, "N K"],
    h: Float[Array, "*M N"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*M N"]:
    """(dy w^T) 2 sqrt(h) in h's dtype: the gradient of u, for h = relu(u)^2 and y = h w."""
    backend = BACKENDS[_choose("matmul_relu2_grad", implementation, dy, w_NK, h)]
    return backend.matmul_relu2_grad(dy, w_NK, h)


def feed_forward_relu2(
    x: Float[Array, "*M D"],
    w_up_DF: Float[Array, "D F"],
    w_down_FD: Float[Array, "F D"],
    *,
    placement: Placement | None = None,
    implementation: str | None = None,
) -> Float[Array, "*M D"]:
    """relu(x W_up)^2 W_down. For the backward it saves only x, the activation and the weights.

    placement: what a mesh does. Raises ValueError for an unknown implementation.
    """
    dtype = jnp.result_type(x, w_up_DF, w_down_FD)
    operands = x.astype(dtype), w_up_DF.astype(dtype), w_down_FD.astype(dtype)
    backend = BACKENDS[_choose("feed_forward_relu2", implementation, *operands)]
    return _network(backend, placement or Placement(), *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _network(backend, placement, x, w_up_DF, w_down_FD):
    return _forward(backend, placement, x, w_up_DF, w_down_FD)[0]


def _forward(backend, placement, x, w_up_DF, w_down_FD):
    x = placement.gather(x)
    h = placement.constrain(backend.relu2_matmul(x, w_up_DF))
    return placement.matmul(h, w_down_FD), (x, h, w_up_DF, w_down_FD)


def _backward(backend, placement, saved, dy):
    (x, h, w_up_DF, w_down_FD), dy = saved, placement.gather(dy)
    du = placement.constrain(backend.matmul_relu2_grad(dy, w_down_FD, h))
    dx = placement.matmul(du, w_up_DF.T)
    return dx, _weight_gradient(x, du), _weight_gradient(h, dy)


_network.defvjp(_forward, _backward)


def _weight_gradient(x: Array, dy: Array) -> Array:
    """x^T dy over all rows."""
    rows = list(range(x.ndim - 1))
    return jax.lax.dot_general(x, dy, ((rows, rows), ([], [])))


def _choose(op: str, implementation: str | None, *arrays: Any) -> str:
    reasons = {name: b.supports(target(), *arrays) for name, b in BACKENDS.items()}
    signature = " ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
    return choose_backend(op, reasons, implementation, signature)
