"""Hopper backend: the activation and its gradient in the epilogue of the matmul before it."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.hopper import Interpret
from jaxtrain_kernels.matmul.hopper import gemm
from jaxtrain_kernels.matmul.hopper.gemm import GemmTiling


def supports(target: Target, *arrays) -> str | None:
    return gemm.supports(target, *arrays)


def relu2_matmul(
    x, w_KN, *, tiling: GemmTiling | None = None, interpret: Interpret = False
) -> jax.Array:
    """Backend of the public function. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    h_MN = gemm.matmul(
        x.reshape(-1, x.shape[-1]), w_KN, epilogue=squared_relu, tiling=tiling, interpret=interpret
    )
    return h_MN.reshape(*x.shape[:-1], -1)


def matmul_relu2_grad(
    dy, w_NK, h, *, tiling: GemmTiling | None = None, interpret: Interpret = False
) -> jax.Array:
    """Backend of the public function."""
    rows = lambda x: x.reshape(-1, x.shape[-1])
    du_MN = gemm.matmul(
        rows(dy), w_NK, rows(h), epilogue=squared_relu_grad, b_is_NK=True, tiling=tiling,
        interpret=interpret,
    )  # fmt: skip
    return du_MN.reshape(h.shape)


def squared_relu(u):
    return jnp.square(jnp.maximum(u, 0.0))


def squared_relu_grad(dh, h):
    return dh * (2 * jnp.sqrt(h))
