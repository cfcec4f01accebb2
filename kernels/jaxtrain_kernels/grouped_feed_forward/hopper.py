"""Hopper backend: ReLU^2, the rows' weights and their gradients in the epilogues of the matmuls.

Only h = relu(u)^2 s is saved of the hidden layer: with it the gradient of u is 2 sqrt(h s) times
that of h / s, and a row's weight has the gradient sum(dh h) / s. The root halves h's relative
error, see `feed_forward`.
"""

import functools

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.grouped_matmul import hopper as matmul
from jaxtrain_kernels.grouped_matmul.hopper.rows import Epilogue, rows_matmul, rows_matmul_with
from jaxtrain_kernels.grouped_matmul.hopper.weights import weights_matmul
from jaxtrain_kernels.hopper import Interpret
from jaxtrain_kernels.matmul.hopper.gemm import GemmTiling


def supports(target: Target, x_MD, up_EDF, down_EFD) -> str | None:
    if x_MD.dtype != jnp.bfloat16:
        return f"needs bfloat16, of which a small weight's results are not 0, got {x_MD.dtype}"
    reasons = (matmul.supports(target, x_MD, w) for w in (up_EDF, down_EFD))
    return next((reason for reason in reasons if reason), None)


def grouped_feed_forward_relu2(
    x_MD,
    up_EDF,
    down_EFD,
    weights_M1,
    sizes_E,
    *,
    tiling: GemmTiling | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Backend of the public function. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    return _network(tiling, interpret, x_MD, up_EDF, down_EFD, weights_M1, sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _network(tiling, interpret, *operands):
    return _forward(tiling, interpret, *operands)[0]


def _forward(tiling, interpret, x_MD, up_EDF, down_EFD, weights_M1, sizes_E):
    how = dict(tiling=tiling, interpret=interpret)
    (h_MF,) = rows_matmul_with(
        x_MD, up_EDF, sizes_E, weights_M1[:, 0], None, epilogue=Epilogue(weighted_relu2), **how
    )
    y_MD = rows_matmul(h_MF, down_EFD, sizes_E, **how)
    return y_MD, (x_MD, h_MF, up_EDF, down_EFD, weights_M1, sizes_E)


def _backward(tiling, interpret, saved, dy_MD):
    x_MD, h_MF, up_EDF, down_EFD, weights_M1, sizes_E = saved
    how = dict(tiling=tiling, interpret=interpret)
    du_MF, sums_M = rows_matmul_with(
        dy_MD, down_EFD, sizes_E, weights_M1[:, 0], h_MF, b_is_NK=True,
        epilogue=Epilogue(weighted_relu2_grad, sums=True), **how,
    )  # fmt: skip
    dweights_M1 = jnp.where(weights_M1 > 0, sums_M[:, None] / weights_M1, 0)
    dx_MD = rows_matmul(du_MF, up_EDF, sizes_E, b_is_NK=True, **how)
    dup_EDF = weights_matmul(x_MD, du_MF, sizes_E, **how)
    ddown_EFD = weights_matmul(h_MF, dy_MD, sizes_E, **how)
    return dx_MD, dup_EDF, ddown_EFD, dweights_M1.astype(weights_M1.dtype), None


_network.defvjp(_forward, _backward)


def weighted_relu2(u, weights):
    return jnp.square(jnp.maximum(u, 0.0)) * weights


def weighted_relu2_grad(dh, weights, h):
    """The gradient of u, and terms of the weight's times the weight."""
    return dh * (2 * jnp.sqrt(h * weights)), dh * h
