"""Two grouped matmuls by their own default, and XLA's activation between them."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.grouped_matmul import grouped_matmul


def supports(target: Target, x_MD, up_EDF, down_EFD) -> None:
    return None


def grouped_feed_forward_relu2(x_MD, up_EDF, down_EFD, weights_M1, sizes_E):
    """Backend of the public function."""
    h_MF = jnp.square(jax.nn.relu(grouped_matmul(x_MD, up_EDF, sizes_E)))
    return grouped_matmul((h_MF * weights_M1).astype(x_MD.dtype), down_EFD, sizes_E)
