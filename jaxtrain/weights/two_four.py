"""2:4 sparsity: two of each four adjacent inputs are nonzero (Mishra et al. 2021, 2104.08378).

The forward pass uses the two largest weights. The gradient goes to all four (straight-through
estimator, Zhou et al. 2021, arXiv:2102.04010), so a pruned weight may return. The wrapper `sr_ste`
is the rest of that method.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxtrain.settings import UserError


def two_four_mask(w: Float[Array, "*L K N"]) -> Bool[Array, "*L K N"]:
    """True for the two largest of each four along K; ties go to the first.

    Raises UserError if K is not a multiple of 4.
    """
    *front, K, N = w.shape
    if K % 4:
        raise UserError(
            f"model.weight_form=sparse_2_4: a matrix has {K} inputs, no multiple of 4; change "
            "model.width, model.hidden or model.head_dim"
        )
    one = jnp.abs(w).reshape(*front, K // 4, 4, 1, N)
    other = one.swapaxes(-3, -2)
    position = jax.lax.broadcasted_iota(jnp.int32, (*front, K // 4, 4, 4, N), len(front) + 1)
    before = position > position.swapaxes(-3, -2)  # whether `other` comes first
    ahead = (other > one) | ((other == one) & before)
    return (jnp.sum(ahead, axis=-2) < 2).reshape(w.shape)


@jax.custom_jvp
def sparse_2_4(w: Float[Array, "*L K N"]) -> Float[Array, "*L K N"]:
    """w with pruned weights exactly zero; the gradient goes to all of w."""
    return jnp.where(two_four_mask(w), w, 0)


sparse_2_4.defjvp(lambda primals, tangents: (sparse_2_4(*primals), tangents[0]))
