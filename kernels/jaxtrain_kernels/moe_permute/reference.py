"""Reference implementation in plain jnp: a sort, and gathers. Any dtype."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, op: str, *given) -> None:
    return None


def row_id_map(chosen_Nk, experts):
    """Backend of the public function."""
    expert_M = chosen_Nk.reshape(-1)
    sizes_E = jnp.sum(expert_M[:, None] == jnp.arange(experts)[None], axis=0, dtype=jnp.int32)
    row_M = inverse(jnp.argsort(expert_M, stable=True))
    return row_M.reshape(chosen_Nk.shape), sizes_E


def moe_permute(x_ND, weights_Nk, row_Nk):
    """Backend of the public function."""
    N, k = row_Nk.shape
    row_M = row_Nk.reshape(-1)
    # In float32, so that the gradient is summed in it.
    wide_ND = x_ND.astype(jnp.promote_types(x_ND.dtype, jnp.float32))
    copies_NkD = jnp.broadcast_to(wide_ND[:, None], (N, k, x_ND.shape[1])).astype(x_ND.dtype)
    order_M = inverse(row_M)
    rows = lambda copies: permute(copies, order_M, row_M)
    return rows(copies_NkD.reshape(N * k, -1)), rows(weights_Nk.reshape(-1, 1))


def moe_unpermute(y_MD, row_Nk):
    """Backend of the public function."""
    row_M = row_Nk.reshape(-1)
    copies_MD = permute(y_MD, row_M, inverse(row_M))
    # jnp.sum accumulates 16-bit values in float32.
    return jnp.sum(copies_MD.reshape(*row_Nk.shape, -1), axis=1).astype(y_MD.dtype)


def gather_rows(x_ND, row_S):
    """Backend of the public function. A negative index would count from the end."""
    row_S = jnp.where(row_S < 0, len(x_ND), row_S)
    return x_ND.at[row_S].get(mode="fill", fill_value=0)


def sum_rows(y_MD, row_Nk, added_SD=None, first=0):
    """Backend of the public function."""
    wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
    copies_NkD = wide(gather_rows(y_MD, row_Nk.reshape(-1))).reshape(*row_Nk.shape, -1)
    sum_ND = jnp.sum(copies_NkD, axis=1)
    if added_SD is not None:
        sum_ND += wide(jax.lax.dynamic_slice_in_dim(added_SD, first, len(row_Nk)))
    return sum_ND.astype(y_MD.dtype)


def scatter_rows(into_ND, rows_SD, row_S):
    """Backend of the public function."""
    row_S = jnp.where(row_S < 0, len(into_ND), row_S)
    return into_ND.at[row_S].set(rows_SD, mode="drop", unique_indices=True)


def inverse(order_M: jax.Array) -> jax.Array:
    each_M = jnp.arange(len(order_M), dtype=jnp.int32)
    return jnp.zeros_like(each_M).at[order_M].set(each_M, unique_indices=True)


@jax.custom_vjp
def permute(x_MD: jax.Array, order_M: jax.Array, back_M: jax.Array) -> jax.Array:
    """x[order]; the gradient is a gather by the inverse permutation, not a scatter."""
    return x_MD[order_M]


permute.defvjp(
    lambda x_MD, order_M, back_M: (x_MD[order_M], (order_M, back_M)),
    lambda saved, g_MD: (g_MD[saved[1]], None, None),
)
