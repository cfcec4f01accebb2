"""Matmuls with a symmetric result, of which only half needs to be computed (for Muon)."""

from typing import Any

from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul import reference, xla
from jaxtrain_kernels.matmul.hopper import symmetric

# Fastest first: the first that can serve is the default.
BACKENDS = {"mosaic": symmetric, "xla": xla, "reference": reference}


def gram(
    x_LMK: Float[Array, "L M K"], *, implementation: str | None = None
) -> Float[Array, "L M M"]:
    """x x^T of each matrix, in x's dtype. Raises ValueError for an unknown implementation.

    The matmuls of this module accumulate in float32 and have no gradient: an optimizer uses them.
    """
    return _backend("gram", x_LMK, implementation).gram(x_LMK)


def square_polynomial(
    a_LMM: Float[Array, "L M M"],
    coefficients: tuple[float, float, float] | Float[Array, "L 3"],
    *,
    implementation: str | None = None,
) -> Float[Array, "L M M"]:
    """c0 I + c1 a + c2 a^2 of each symmetric a, in a's dtype.

    coefficients: (c0, c1, c2) for all matrices, or for each one, in float32.
    """
    backend = _backend("square_polynomial", a_LMM, implementation)
    return backend.square_polynomial(a_LMM, coefficients)


def symmetric_product(
    a_LMM: Float[Array, "L M M"],
    b_LMM: Float[Array, "L M M"],
    *,
    implementation: str | None = None,
) -> Float[Array, "L M M"]:
    """a b of symmetric matrices that commute (as two polynomials of one do), in their dtype."""
    return _backend("symmetric_product", a_LMM, implementation).symmetric_product(a_LMM, b_LMM)


def _backend(op: str, x_LMK: Any, implementation: str | None) -> Any:
    reasons = {name: backend.supports(target(), x_LMK) for name, backend in BACKENDS.items()}
    signature = f"{x_LMK.dtype}{list(x_LMK.shape)}"
    return BACKENDS[choose_backend(op, reasons, implementation, signature)]
