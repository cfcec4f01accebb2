"""XLA backend for any device, which computes the whole results."""

import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, x_LMK) -> None:
    return None


def gram(x_LMK):
    """Backend of the public function."""
    return x_LMK @ x_LMK.mT


def square_polynomial(a_LMM, coefficients):
    """Backend of the public function, with one elementwise pass after the matmul."""
    c0, c1, c2 = of_matrices(coefficients)
    # The identity is broadcast before it is scaled, which costs no extra pass.
    identity = jnp.broadcast_to(jnp.eye(a_LMM.shape[-1], dtype=a_LMM.dtype), a_LMM.shape)
    return (c2 * (a_LMM @ a_LMM) + c1 * a_LMM + c0 * identity).astype(a_LMM.dtype)


def of_matrices(coefficients):
    """Return the coefficients as three floats, or as three arrays [L, 1, 1]."""
    if isinstance(coefficients, tuple):
        return coefficients
    return tuple(coefficients[:, n, None, None] for n in range(3))


def symmetric_product(a_LMM, b_LMM):
    """Backend of the public function."""
    return a_LMM @ b_LMM
