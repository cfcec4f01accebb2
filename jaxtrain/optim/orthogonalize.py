"""The nearest orthogonal matrix by polynomial iterations, with matmuls only (for Muon).

A matrix is `[..., in, out]`; leading dims are a batch of matrices.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtrain_kernels import matmul
from jaxtrain_kernels.dispatch import target
from jaxtyping import Array, DTypeLike, Float

from jaxtrain.cluster.runtime import compute_dtype

# Amsel et al. 2025 (Polar Express): degree-5 odd polynomials for 5 iterations, safety 2e-2.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan et al. 2024
COEFFICIENTS = {
    "polar_express": POLAR_EXPRESS,
    "polar_express_4": POLAR_EXPRESS[1:],
    "newton_schulz": NEWTON_SCHULZ,
}
# Largest singular value that the first polynomial accepts. Matrices are first scaled to it, by a
# bound tighter than the Frobenius norm; this replaces the first iteration.
LARGEST = {"polar_express_4": 1.9}
GRAM_FROM = 2  # long side / short side from which the Gram iteration is cheaper
RESTART = 2  # iterations until the Gram matrix is recomputed


def matmul_dtype(wanted: DTypeLike = jnp.bfloat16) -> jnp.dtype:
    """The wanted 16-bit dtype if the matrix units support both, else the device's best dtype.

    A TPU has bfloat16 only, a GPU before Ampere float16 only; a CPU is faster and exact in float32.
    """
    best = compute_dtype("auto")
    both = best == jnp.bfloat16 and target().platform != "tpu"
    return jnp.dtype(wanted if both else best)


def normalize(
    x_in_out: Float[Array, "*L i o"], equilibrate: bool = False
) -> Float[Array, "*L i o"]:
    """Scale each matrix to a Frobenius norm just below 1, so that all singular values are below 1.

    equilibrate: first scale each column to the root mean square of all column norms (MuonEq). One
    pass sums the squares of the columns; all norms are computed from these sums.
    """
    squares = line_squares(x_in_out, -2)
    factor: Any = 1.0
    if equilibrate:
        mean = jnp.sqrt(jnp.mean(squares, axis=-1, keepdims=True))
        factor = mean / jnp.maximum(jnp.sqrt(squares), 1e-6)
        squares = squares * jnp.square(factor)
    norm = jnp.sqrt(jnp.sum(squares, axis=-1, keepdims=True))
    return x_in_out * (factor / (norm * 1.01 + 1e-6))


def line_squares(x_in_out: Float[Array, "*L i o"], axis: int) -> Float[Array, "*L #i #o"]:
    """Sums of squares over one axis, at least in float32.

    XLA would make a sum of these sums one over both axes, which is a further pass over the matrix.
    """
    wide = x_in_out.astype(jnp.promote_types(x_in_out.dtype, jnp.float32))
    squares = jnp.sum(jnp.square(wide), axis=axis, keepdims=True)
    return jax.lax.optimization_barrier(squares)


def orthogonalize(
    x_in_out: Float[Array, "*L i o"],
    coefficients: tuple[tuple[float, float, float], ...],
    gram: bool = True,
    symmetric: bool = True,
    largest: float | None = None,
) -> Float[Array, "*L i o"]:
    """Push all singular values of each matrix, initially at most 1, towards 1.

    X <- (aI + bA + cA^2) X with A = X X^T, on the shorter side. The result has the matmuls' dtype.
    `gram`: use `gram_newton_schulz` for long matrices, the same with fewer FLOPs. `symmetric`: use
    the fastest kernel for symmetric products, else XLA. `largest`: scale the matrices first, so
    that no singular value is above it and some are near it.
    """
    short, long = sorted(x_in_out.shape[-2:])
    # The Gram iteration rounds A separately from X, which needs float16's longer mantissa.
    fit = matmul_dtype(jnp.float16) != jnp.bfloat16
    by_gram = gram and fit and long >= GRAM_FROM * short
    x = x_in_out.astype(matmul_dtype(jnp.float16 if by_gram else jnp.bfloat16))
    x = x.reshape(-1, *x.shape[-2:])
    if x.shape[-2] > x.shape[-1]:
        # XLA's fusion of both layouts runs at a third of a copy's rate. Without the constraint it
        # transposes the momentum in float32, twice.
        x = jax.lax.optimization_barrier(with_layout_constraint(x, Layout((0, 1, 2)))).mT
    through = gram_newton_schulz if by_gram else newton_schulz
    x = through(x, coefficients, None if symmetric else "xla", largest)
    x = x.mT if x_in_out.shape[-2] > x_in_out.shape[-1] else x
    return x.reshape(x_in_out.shape)


Polynomial = tuple[float, float, float]


def scaled_polynomial(
    a: Float[Array, "L M M"], polynomial: Polynomial, largest: float
) -> Float[Array, "L 3"]:
    """Per matrix X, the coefficients [c0 c, c1 c^3, c2 c^5] of the polynomial applied to c X.

    The polynomial is (c0 I + c1 A + c2 A^2) X with A = X X^T. sqrt(||A||_F) is an upper bound of
    X's largest singular value; c scales the bound to `largest`.
    """
    squares_L = jnp.sum(jnp.square(a.astype(jnp.float32)), axis=(-2, -1))
    # X's Frobenius norm is just below 1, so ||A||_F of a nonzero X is not below this.
    smallest = 0.5 / a.shape[-1] ** 0.5
    c_L = largest * jax.lax.rsqrt(jnp.maximum(jnp.sqrt(squares_L), smallest))
    c0, c1, c2 = polynomial
    return jnp.stack([c0 * c_L, c1 * c_L**3, c2 * c_L**5], axis=-1)


def newton_schulz(
    x: jax.Array,
    coefficients: Sequence[Polynomial],
    implementation: str | None,
    largest: float | None = None,
) -> jax.Array:
    for n, polynomial in enumerate(coefficients):
        a = matmul.gram(x, implementation=implementation)
        if n == 0 and largest is not None:
            polynomial = scaled_polynomial(a, polynomial, largest)
        x = matmul.square_polynomial(a, polynomial, implementation=implementation) @ x
    return x


def gram_newton_schulz(
    x: jax.Array,
    coefficients: Sequence[Polynomial],
    implementation: str | None,
    largest: float | None = None,
) -> jax.Array:
    """The iteration on the small matrix A only: A <- PAP, Q <- PQ, and X <- QX at the end.

    Rounding errors give A negative eigenvalues, so it is recomputed from X after RESTART iterations
    (Gram Newton-Schulz, Dao-AILab 2026). A, P and Q are polynomials of one A, so they commute and
    are symmetric up to rounding. Only Q must keep its asymmetric part, or its errors double.
    """
    product = functools.partial(matmul.symmetric_product, implementation=implementation)
    for part in (coefficients[:RESTART], coefficients[RESTART:]):
        a, q = matmul.gram(x, implementation=implementation), None
        for left, polynomial in zip(reversed(range(len(part))), part):
            if largest is not None:
                polynomial, largest = scaled_polynomial(a, polynomial, largest), None
            p = matmul.square_polynomial(a, polynomial, implementation=implementation)
            q = p if q is None else p @ q
            if left:
                a = product(product(p, a), p)
        x = x if q is None else q @ x
    return x


def orthogonalize_flops(short: int, long: int, steps: int, gram: bool) -> int:
    """FLOPs of the matmuls of `orthogonalize` for one matrix."""
    if not (gram and long >= GRAM_FROM * short):
        return steps * (4 * short**2 * long + 2 * short**3)
    parts = [n for n in (min(steps, RESTART), steps - RESTART) if n > 0]
    small = sum(2 * n + 2 * (n - 1) + 4 * (n - 1) for n in parts)
    return len(parts) * 4 * short**2 * long + small * short**3
