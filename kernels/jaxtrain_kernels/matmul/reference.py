"""Reference implementation in plain jnp: any dtype, accumulated in float32 or wider."""

import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.xla import of_matrices


def supports(target: Target, x_LMK) -> None:
    return None


def gram(x_LMK):
    """Backend of the public function."""
    return symmetric_product(x_LMK, x_LMK.mT)


def square_polynomial(a_LMM, coefficients):
    """Backend of the public function."""
    c0, c1, c2 = of_matrices(coefficients)
    wide = jnp.promote_types(a_LMM.dtype, jnp.float32)
    square = jnp.matmul(a_LMM, a_LMM, preferred_element_type=wide)
    identity = jnp.eye(a_LMM.shape[-1], dtype=wide)[None]
    return (c2 * square + c1 * a_LMM.astype(wide) + c0 * identity).astype(a_LMM.dtype)


def symmetric_product(a_LMM, b_LMM):
    """Backend of the public function."""
    wide = jnp.promote_types(a_LMM.dtype, jnp.float32)
    return jnp.matmul(a_LMM, b_LMM, preferred_element_type=wide).astype(a_LMM.dtype)
