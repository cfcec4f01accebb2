"""One row padded to eight, because XLA gives such a matmul to cuBLAS."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.few_rows import xla

ROWS = 8


def supports(target: Target, x_MK, *matrices, transposed=False) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    if target.platform not in ("cuda", "rocm"):
        return f"needs a GPU, this is {target.platform}"
    return None if len(x_MK) == 1 else f"needs one row, got {len(x_MK)}"


def few_rows_matmul(x_MK, *matrices, transposed=False):
    """Backend of the public function."""
    x_8K = jnp.pad(x_MK, ((0, ROWS - len(x_MK)), (0, 0)))
    # The barrier keeps XLA from moving the slice from the result to x.
    each = jax.lax.optimization_barrier(xla.few_rows_matmul(x_8K, *matrices, transposed=transposed))
    return tuple(y_8N[: len(x_MK)] for y_8N in each)
