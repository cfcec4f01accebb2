"""XLA backend for any device with float8: its norm, then its cast."""

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul import fp8
from jaxtrain_kernels.matmul.fp8 import xla as casts
from jaxtrain_kernels.rows import xla as norms
from jaxtrain_kernels.rows.fp8.reference import norm_then_cast


def supports(target: Target, *arrays) -> str | None:
    return fp8.fp8_unsupported(target)


def norm_quantized(x_BTD, y_BTD, x0_BTD, scales, multiplier, *, eps):
    """Backend like `reference`."""
    return norm_then_cast(norms, casts, (x_BTD, y_BTD, x0_BTD), scales, multiplier, eps)
