"""`jax.lax.ragged_dot`. On a GPU, XLA multiplies every row by every matrix and masks the others."""

import jax

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, x_MK, w_EKN) -> None:
    return None


def grouped_matmul(x_MK, w_EKN, sizes_E):
    """Backend of the public function."""
    return jax.lax.ragged_dot(x_MK, w_EKN, sizes_E)
