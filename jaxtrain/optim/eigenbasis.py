"""Eigenvectors that track a slowly changing factor, by rotations made of matmuls only, for SOAP.

QR decompositions of many matrices run one after the other on a GPU. Here every pair of columns of
the basis Q is rotated by its Jacobi angle to first order, all pairs at once, and Newton-Schulz
iterations make the result orthogonal: with A = Q^T P Q and its diagonal d,

    K_ij = A_ij (d_j - d_i) / ((d_j - d_i)^2 + 4 A_ij^2),  Q <- Q orthogonal(I + K)

K is skew-symmetric and none of its entries is above 1/4, so I + K has no singular value below 1.
Columns keep their order, so statistics in the basis need not be permuted.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.optim.orthogonalize import POLAR_EXPRESS, normalize, orthogonalize

POLISH = 3  # cubic Newton-Schulz iterations in float32, after the 16-bit ones


def rotate_basis(
    factor: Float[Array, "*L n n"], basis: Float[Array, "*L n n"]
) -> Float[Array, "*L n n"]:
    """Rotate `basis` towards the eigenvectors of `factor`, one round. 48 n^3 FLOPs."""
    seen = basis.mT @ (factor @ basis)
    d = jnp.diagonal(seen, axis1=-2, axis2=-1)
    apart = d[..., None, :] - d[..., None]
    bottom = jnp.square(apart) + 4 * jnp.square(seen)
    turn = jnp.where(apart == 0, 0.0, seen * apart / jnp.where(bottom > 0, bottom, 1.0))
    # 16-bit rounding of I + K is relative to each entry, so small angles stay accurate enough.
    turned = jnp.broadcast_to(jnp.eye(d.shape[-1]), turn.shape) + turn
    rotation = orthogonalize(normalize(turned), POLAR_EXPRESS, gram=False)
    basis = basis @ rotation.astype(basis.dtype)
    for _ in range(POLISH):
        basis = 1.5 * basis - 0.5 * basis @ (basis.mT @ basis)
    return basis
