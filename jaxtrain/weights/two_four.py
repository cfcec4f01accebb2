"""2:4 weights: of each four inputs in a row, an output has two (Mishra et al. 2021, 2104.08378).

The forward pass uses the two largest. The gradient is that of all four (straight-through estimator,
Zhou et al. 2021, arXiv:2102.04010), so that a weight may come back. The wrapper `sr_ste` is the
rest of that method.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxtrain.settings import UserError


def two_four_mask(w: Float[Array, "*L K N"]) -> Bool[Array, "*L K N"]:
    """True for the two largest of each four along K; of equal ones for the first.

    UserError for a K that four does not divide.
    """
    *front, K, N = w.shape
    if K % 4:
        raise UserError(
            f"model.weight_form=sparse_2_4: a matrix has {K} inputs, no multiple of 4; change "
            "model.width, model.hidden or model.head_dim"
        )
    one = jnp.abs(w).reshape(*front, K // 4, 4, 1, N)
    other = one.swapaxes(-3, -2)
    place = jax.lax.broadcasted_iota(jnp.int32, (*front, K // 4, 4, 4, N), len(front) + 1)
    before = place > place.swapaxes(-3, -2)  # the other comes first
    ahead = (other > one) | ((other == one) & before)
    return (jnp.sum(ahead, axis=-2) < 2).reshape(w.shape)


@jax.custom_jvp
def sparse_2_4(w: Float[Array, "*L K N"]) -> Float[Array, "*L K N"]:
    """w with exact zeros; the gradient is that of w."""
    return jnp.where(two_four_mask(w), w, 0)


sparse_2_4.defjvp(lambda primals, tangents: (sparse_2_4(*primals), tangents[0]))
