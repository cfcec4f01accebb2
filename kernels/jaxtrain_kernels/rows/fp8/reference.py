"""Reference implementation in plain jnp: the norm, then the cast."""

from types import ModuleType

from jax import lax

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.fp8 import E4M3
from jaxtrain_kernels.matmul.fp8 import reference as casts
from jaxtrain_kernels.matmul.fp8.functions import itself
from jaxtrain_kernels.rows import reference as norms


def supports(target: Target, *arrays) -> None:
    return None


def norm_quantized(x_BTD, y_BTD, x0_BTD, scales, multiplier, *, eps):
    """Return (s, h, x0, q_MK, q_KM, amaxes of parts of h)."""
    return norm_then_cast(norms, casts, (x_BTD, y_BTD, x0_BTD), scales, multiplier, eps)


def norm_then_cast(norms: ModuleType, casts: ModuleType, arrays, scales, multiplier, eps):
    """By these modules' separate passes."""
    x_BTD, y_BTD, x0_BTD = arrays
    if scales is not None:
        s_BTD, h_BTD, x0_BTD = norms.mixed_norm(x_BTD, y_BTD, x0_BTD, *scales, eps=eps)
    else:
        s_BTD, h_BTD = norms.residual_norm(x_BTD, y_BTD, eps=eps)
    h_MK = lax.stop_gradient(h_BTD.reshape(-1, h_BTD.shape[-1]))
    return s_BTD, h_BTD, x0_BTD, *casts.cast_measured((h_MK,), multiplier, E4M3, itself)
