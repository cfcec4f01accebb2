"""Matmuls of a few rows with small matrices, as in a decode step of a few sequences.

On a GPU, XLA compiles a matmul of one row and fewer than ten million weights to a multiplication
and a reduction, which read at 14% of a copy's rate (gpt_d12 on an H200). `padded` gives cuBLAS
eight rows. `triton` reads each weight once, in one launch for all matrices of the same input.
gpt_d12 with one row: 1,447 tokens/s with XLA, 1,704 padded, 1,809 with Triton, and 2,049 with
Triton kernels for the operations between the matmuls as well (LOG.md).
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator

from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.few_rows import padded, reference, triton, xla

MANY = 8  # from this number of rows on, XLA is the default

# The first backend that can serve the call is the default.
BACKENDS = {"triton": triton, "padded": padded, "xla": xla, "reference": reference}

# Triton kernels for the matmuls and for the operations between them (`rows`, `paged_append`).
FUSED = "fused"

_preferred: contextvars.ContextVar[str | None] = contextvars.ContextVar("few_rows", default=None)


@contextlib.contextmanager
def preferring(name: str | None) -> Iterator[None]:
    """Traces made inside use this backend where it serves (None = default). For measurements."""
    if name not in (None, FUSED, *BACKENDS):
        raise ValueError(f"few_rows_matmul has no backend {name!r}; it has {', '.join(BACKENDS)}")
    token = _preferred.set(name)
    try:
        yield
    finally:
        _preferred.reset(token)


def are_fused() -> bool:
    """Whether kernels also do the operations between matmuls of a few rows."""
    return _preferred.get() in (None, FUSED)


def few_rows_matmul(
    x: Float[Array, "*B K"],
    *matrices: Float[Array, "K _"],
    relu2: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B _"], ...]:
    """x times each matrix, accumulated in float32, in x's dtype. relu2: max(y, 0)^2 of each y.

    Raises ValueError for an unknown implementation, NotImplementedError for one that cannot serve.
    """
    M, K = math.prod(x.shape[:-1]), x.shape[-1]
    if implementation is None and M >= MANY:
        return xla.few_rows_matmul(x, *matrices, relu2=relu2)
    x_MK, on = x.reshape(M, K), target()
    first = "triton" if are_fused() else _preferred.get()
    names = [first, *(name for name in BACKENDS if name != first)]
    reasons = {name: BACKENDS[name].supports(on, x_MK, *matrices) for name in names}
    signature = f"{x.dtype}[{M}, {K}] x {', '.join(str(w.shape[1]) for w in matrices)}"
    backend = BACKENDS[choose_backend("few_rows_matmul", reasons, implementation, signature)]
    found = backend.few_rows_matmul(x_MK, *matrices, relu2=relu2)
    return tuple(y_MN.reshape(*x.shape[:-1], -1) for y_MN in found)
