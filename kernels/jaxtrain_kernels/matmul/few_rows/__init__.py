"""Matmuls of a few rows, as in a decode step of a few sequences, and the operations around them.

On a GPU, XLA compiles a matmul of one row and fewer than ten million weights to a multiplication
and a reduction, which read at 14% of a copy's rate (gpt_d12 on an H200). `padded` gives cuBLAS
eight rows. `triton` reads each weight once, in one launch for all matrices of the same input.
gpt_d12 with one row: 1,447 tokens/s with XLA, 1,704 padded, 1,809 with Triton, and 2,049 with
Triton kernels for the operations between the matmuls as well (LOG.md).
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.few_rows import padded, reference, triton, xla
from jaxtrain_kernels.matmul.few_rows.operations import (
    GATED as GATED,
)
from jaxtrain_kernels.matmul.few_rows.operations import (
    InputNorm,
    Operations,
    composed,
)
from jaxtrain_kernels.matmul.few_rows.triton import LARGE as LARGE

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
    *matrices: Float[Array, "_ _"],
    transposed: bool = False,
    norm: InputNorm | None = None,
    biases: tuple[Array | None, ...] | None = None,
    activation: str | None = None,
    residual: Float[Array, "*B N"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B _"], ...]:
    """x times each matrix [K, N], accumulated in float32, in x's dtype.

    transposed: the matrices are [N, K]. norm: of x. biases: added to the products. activation:
    relu2 or gelu of each, or swiglu or geglu of the products of a gate and a matrix up, which
    become one. residual: added to the result.

    Raises ValueError for an unknown implementation or activation, or matrices that do not fit it,
    NotImplementedError for an implementation that cannot serve.
    """
    M, K = math.prod(x.shape[:-1]), x.shape[-1]
    residual_MN = None if residual is None else residual.reshape(M, -1)
    operations = Operations(norm, biases, activation, residual_MN)
    operations.check(matrices)
    x_MK = x.reshape(M, K)
    if implementation is None and M >= MANY:
        name = "xla"
    else:
        first = "triton" if are_fused() else _preferred.get()
        names = [first, *(name for name in BACKENDS if name != first)]
        why = lambda backend: backend.supports(target(), x_MK, *matrices, transposed=transposed)
        reasons = {name: why(BACKENDS[name]) for name in names}
        sizes = ", ".join(str(w.shape[1 - transposed]) for w in matrices)
        signature = f"{x.dtype}[{M}, {K}] x {sizes}{', transposed' * transposed}"
        name = choose_backend("few_rows_matmul", reasons, implementation, signature)
    run = functools.partial(BACKENDS[name].few_rows_matmul, transposed=transposed)
    if name != "triton":
        run = functools.partial(composed, run)
    found = run(x_MK, *matrices, operations=operations)
    return tuple(y_MN.reshape(*x.shape[:-1], -1) for y_MN in found)


def streams_rows(most: int, dtype: Any) -> bool:
    """Whether an engine of `most` rows stores large matrices as [N, K] (`transposed`): its programs
    of one row stream them, and cuBLAS multiplies more rows by them."""
    x_MK, w_NK = (jax.ShapeDtypeStruct((n, 64), dtype) for n in (1, 8))
    return most <= triton.MOST_ROWS and takes_operations(x_MK, w_NK, transposed=True)


def takes_operations(
    x: Array | jax.ShapeDtypeStruct,
    *matrices: Array | jax.ShapeDtypeStruct,
    transposed: bool = False,
) -> bool:
    """Whether one kernel computes the products and the operations around them. x: [*B, K]."""
    M, backend = math.prod(x.shape[:-1]), BACKENDS["triton"]
    x_MK = jax.ShapeDtypeStruct((M, x.shape[-1]), x.dtype)
    why = lambda: backend.supports(target(), x_MK, *matrices, transposed=transposed)
    return M < MANY and are_fused() and why() is None
