"""LoftQ (Li et al. 2023, arXiv:2310.08659): adapters initialized to the quantization error.

Two steps alternate: the base becomes the quantized W - s A B, and s A B the best approximation of
W - base at that rank. Training thus starts near the unquantized model; QLoRA starts at the
quantized one.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.model import AdaptedWeight
from jaxtrain.weights import WEIGHTS
from jaxtrain.weights.contract import Weight, dequantize

OVERSAMPLING, POWERS = 8, 4  # columns beyond the rank, power iterations with R R^T


def low_rank(
    r_KN: Float[Array, "K N"], rank: int
) -> tuple[Float[Array, "K r"], Float[Array, "r N"]]:
    """Return a and b, whose product approximates r_KN at that rank; each takes sqrt(s).

    Randomized SVD (Halko et al. 2011, arXiv:0909.4061) with a fixed seed.
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
    """Quantize a stack to the storage `form`, with the initial factors a and b in float32."""
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
