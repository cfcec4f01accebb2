"""LoftQ (Li et al. 2023, arXiv:2310.08659): adapters that begin at what quantization lost.

In turn the base is W - s A B in few bits, and s A B the best product of that rank of what is left
of W. So training begins near the model before quantization, where QLoRA begins at the quantized
one.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.model import AdaptedWeight
from jaxtrain.weights import WEIGHTS
from jaxtrain.weights.contract import Weight, dequantize

OVERSAMPLING, POWERS = 8, 4  # columns beyond the rank, products with R R^T


def low_rank(
    r_KN: Float[Array, "K N"], rank: int
) -> tuple[Float[Array, "K r"], Float[Array, "r N"]]:
    """a b close to the best product of that rank, the singular values divided evenly.

    A randomized SVD (Halko et al. 2011, arXiv:0909.4061), always with the same draw.
    """
    K, N = r_KN.shape
    columns = min(rank + OVERSAMPLING, K, N)
    y = r_KN @ jax.random.normal(jax.random.key(0), (N, columns))
    for _ in range(POWERS):
        q = jnp.linalg.qr(y)[0]
        y = r_KN @ (r_KN.T @ q)
    q = jnp.linalg.qr(y)[0]
    u, s, v = jnp.linalg.svd(q.T @ r_KN, full_matrices=False)
    root = jnp.sqrt(s[:rank])
    return (q @ u[:, :rank]) * root[None], root[:, None] * v[:rank]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def loftq(
    w_LKN: Float[Array, "L K N"], form: str, rank: int, scale: float, iterations: int
) -> AdaptedWeight:
    """The base in a form of storage, with the factors a and b to begin with, float32."""
    dtype = w_LKN.dtype

    def quantized(w: Array) -> Array | Weight:
        return WEIGHTS[form].encode(w.astype(dtype))

    def factors(w_LKN: Array, base: Array | Weight) -> tuple[Array, Array]:
        one = lambda pair: low_rank(pair[0] - dequantize(pair[1]).astype(jnp.float32), rank)
        return jax.lax.map(one, (w_LKN, base))

    w_LKN = w_LKN.astype(jnp.float32)
    base = quantized(w_LKN)
    a, b = factors(w_LKN, base)
    for _ in range(iterations - 1):
        base = quantized(w_LKN - a @ b)
        a, b = factors(w_LKN, base)
    root = scale**0.5
    return AdaptedWeight(base, a / root, b / root, scale=scale)
