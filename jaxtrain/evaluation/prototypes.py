"""k-means over unit vectors, by cosine: distance of a document from a corpus's typical content.

Sorscher et al. 2022 (arXiv:2206.14486) prune by the cosine distance to the nearest centroid.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

ROUNDS = 25
TRIES = 8  # greedy k-means++: candidates per seed


def find_prototypes(
    x_ND: Float[np.ndarray, "N D"], count: int, seed: int = 0
) -> Float[np.ndarray, "C D"]:
    """Unit centroids of `count` < N clusters: Lloyd's iterations from k-means++ seeds."""
    return np.asarray(_clustered(jnp.asarray(x_ND), jax.random.key(seed), count))


@jax.jit
def distances(x_ND: Float[Array, "N D"], prototypes_CD: Float[Array, "C D"]) -> Float[Array, "N"]:
    """1 - cosine to the nearest prototype."""
    return 1.0 - jnp.max(_cosines(x_ND, prototypes_CD), axis=1)


def _cosines(x_ND: Array, y_CD: Array) -> Array:
    return jnp.matmul(x_ND, y_CD.T, precision="highest")


@functools.partial(jax.jit, static_argnums=2)
def _clustered(x_ND: Array, key: Array, count: int) -> Array:
    keys = jax.random.split(key, count)
    N, D = x_ND.shape

    def seed(i, found):
        """Of candidates drawn by distance to the nearest seed, add the one with the least total."""
        seeds_CD, far_N = found
        drawn_A = jax.random.categorical(keys[i], jnp.log(far_N), shape=(TRIES,))
        near_NA = jnp.maximum(1.0 - _cosines(x_ND, x_ND[drawn_A]), 0.0)
        near_NA = jnp.minimum(far_N[:, None], near_NA)
        best = jnp.argmin(jnp.sum(near_NA, axis=0))
        return seeds_CD.at[i].set(x_ND[drawn_A[best]]), near_NA[:, best]

    def move(_, centers_CD):
        nearest_N = jnp.argmax(_cosines(x_ND, centers_CD), axis=1)
        sums_CD = jax.ops.segment_sum(x_ND, nearest_N, count)
        length_C1 = jnp.linalg.norm(sums_CD, axis=1, keepdims=True)
        # A center without any nearest text is unchanged.
        return jnp.where(length_C1 > 0, sums_CD / jnp.maximum(length_C1, 1e-30), centers_CD)

    begin = jnp.zeros((count, D)), jnp.ones(N)
    return jax.lax.fori_loop(0, ROUNDS, move, jax.lax.fori_loop(0, count, seed, begin)[0])
