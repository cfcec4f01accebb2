"""Reference implementation in plain jnp: any dtype."""

import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, x_MK, *matrices, transposed=False) -> None:
    return None


def few_rows_matmul(x_MK, *matrices, transposed=False):
    """Backend of the public function."""
    wide = jnp.promote_types(x_MK.dtype, jnp.float32)
    matrices = [w.T if transposed else w for w in matrices]
    return tuple((x_MK.astype(wide) @ w.astype(wide)).astype(x_MK.dtype) for w in matrices)
