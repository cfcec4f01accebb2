"""Fused operations on activations between the matmuls: one read and one write of each array.

Residual addition with RMS norm, RoPE with QK norm, and squared ReLU. All statistics are in float32;
results have the inputs' dtype.
"""

from typing import Any

from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.rows import hopper, reference, triton, xla

# The first that can serve is the default. `triton`, only by name, is for a decode step's few rows.
BACKENDS = {"mosaic": hopper, "xla": xla, "triton": triton, "reference": reference}


def residual_norm(
    x_BTD: Float[Array, "B T D"],
    y_BTD: Float[Array, "B T D"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Return (s, s / rms(s)) for s = x + y. Raises ValueError for an unknown implementation."""
    backend = _backend("residual_norm", implementation, x_BTD)
    return backend.residual_norm(x_BTD, y_BTD, eps=eps)


def mixed_norm(
    x_BTD: Float[Array, "B T D"],
    y_BTD: Float[Array, "B T D"] | None,
    x0_BTD: Float[Array, "B T D"],
    a: Float[Array, ""],
    b: Float[Array, ""],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Return (s, s / rms(s), x0) for s = a (x + y) + b x0; y None = 0.

    If each layer takes x0 from the previous layer's results, its gradient is summed in the same
    passes: each layer adds its own gradient to the next layer's.
    """
    backend = _backend("mixed_norm", implementation, x_BTD)
    return backend.mixed_norm(x_BTD, y_BTD, x0_BTD, a, b, eps=eps)


def rope_norm(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    cos_BTH: Float[Array, "b T H"],
    sin_BTH: Float[Array, "b T H"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Rotate the pairs (i, i + H/2) of queries and keys, and divide by the RMS of each head.

    cos, sin: repeated in both halves, sin negated in the first; b is B or 1.
    """
    backend = _backend("rope_norm", implementation, q_BTNH, k_BTKH)
    return backend.rope_norm(q_BTNH, k_BTKH, cos_BTH, sin_BTH, eps=eps)


def relu2(
    x_BTF: Float[Array, "B T F"], *, implementation: str | None = None
) -> Float[Array, "B T F"]:
    """max(x, 0)^2."""
    return _backend("relu2", implementation, x_BTF).relu2(x_BTF)


def has_hopper_kernel(op: str, *arrays: Any) -> bool:
    """Whether the Hopper kernel, not only XLA's fusion, supports these shapes on this device."""
    return hopper.supports(target(), op, *arrays) is None


def _backend(op: str, implementation: str | None, *arrays: Any) -> Any:
    reasons = {name: b.supports(target(), op, *arrays) for name, b in BACKENDS.items()}
    signature = " ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
    return BACKENDS[choose_backend(op, reasons, implementation, signature)]
