"""The passes over activations between the matmuls, each one read and one write of its arrays.

Residual additions with the RMS norm after them, rotary positions with the norm of queries and keys,
and the squared ReLU. All statistics in float32; results in the inputs' dtype.
"""

from typing import Any

from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.rows import hopper, reference, triton, xla

# The first that can serve is the default. `triton`, by name, is for the few rows of a decode step.
BACKENDS = {"mosaic": hopper, "xla": xla, "triton": triton, "reference": reference}


def residual_norm(
    x_BTD: Float[Array, "B T D"],
    y_BTD: Float[Array, "B T D"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """(s, s / rms(s)) of s = x + y. Raises ValueError for an unknown implementation."""
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
    """(s, s / rms(s), x0) of s = a (x + y) + b x0; y None = 0.

    Layers that take x0 from each other's results, not all from the first, sum its gradient in the
    same passes: each adds its own to what the next one gave.
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
    """Queries and keys with the pairs (i, i + H/2) rotated, over the root mean square of x.

    cos, sin: in both halves, sin negative in the first; b is B or 1.
    """
    backend = _backend("rope_norm", implementation, q_BTNH, k_BTKH)
    return backend.rope_norm(q_BTNH, k_BTKH, cos_BTH, sin_BTH, eps=eps)


def relu2(
    x_BTF: Float[Array, "B T F"], *, implementation: str | None = None
) -> Float[Array, "B T F"]:
    """max(x, 0)^2."""
    return _backend("relu2", implementation, x_BTF).relu2(x_BTF)


def serves(op: str, *arrays: Any) -> bool:
    """Whether there is more than XLA's own fusion for arrays of these shapes on this device."""
    return hopper.supports(target(), op, *arrays) is None


def _backend(op: str, implementation: str | None, *arrays: Any) -> Any:
    reasons = {name: b.supports(target(), op, *arrays) for name, b in BACKENDS.items()}
    signature = " ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
    return BACKENDS[choose_backend(op, reasons, implementation, signature)]
