"""Hopper backend: persistent matmuls in Pallas Mosaic GPU over tiles of one group's rows each."""

import functools

import jax

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.grouped_matmul.hopper.rows import rows_matmul
from jaxtrain_kernels.grouped_matmul.hopper.weights import weights_matmul
from jaxtrain_kernels.hopper import Interpret
from jaxtrain_kernels.matmul.hopper.gemm import GemmTiling

FEWEST = 128  # rows; below, a tile of rows would be wider than the array
STEP = 64


def supports(target: Target, x_MK, w_EKN) -> str | None:
    if reason := hopper.unsupported_reason(target, x_MK, w_EKN):
        return reason
    if x_MK.dtype != w_EKN.dtype:
        return f"needs one dtype, got {x_MK.dtype} and {w_EKN.dtype}"
    # Mosaic drops the index of a dim that one part fills, and stores parts outside it there.
    if any(n % STEP or n <= STEP for n in w_EKN.shape[1:]):
        return f"needs matrices in multiples of {STEP} above it, got {list(w_EKN.shape[1:])}"
    if x_MK.shape[0] % 8 or x_MK.shape[0] <= FEWEST:
        return f"needs rows in multiples of 8 above {FEWEST}, got {x_MK.shape[0]}"
    return None


def grouped_matmul(
    x_MK,
    w_EKN,
    sizes_E,
    *,
    tiling: GemmTiling | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Backend of the public function. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    return _matmul(tiling, interpret, x_MK, w_EKN, sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(tiling, interpret, x_MK, w_EKN, sizes_E):
    return rows_matmul(x_MK, w_EKN, sizes_E, tiling=tiling, interpret=interpret)


def _forward(tiling, interpret, x_MK, w_EKN, sizes_E):
    return _matmul(tiling, interpret, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(tiling, interpret, saved, dy_MN):
    x_MK, w_EKN, sizes_E = saved
    how = dict(tiling=tiling, interpret=interpret)
    dx_MK = rows_matmul(dy_MN, w_EKN, sizes_E, b_is_NK=True, **how)
    return dx_MK, weights_matmul(x_MK, dy_MN, sizes_E, **how), None


_matmul.defvjp(_forward, _backward)
