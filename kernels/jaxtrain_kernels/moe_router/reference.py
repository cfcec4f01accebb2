"""Reference implementation in plain jnp. Any dtype."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.moe_permute import reference as permute


def supports(target: Target, x_BTD, router_DE) -> None:
    return None


def supports_permute(target: Target, x_BTD, router_DE, top_k: int) -> None:
    return None


def moe_router(x_BTD, router_DE, bias_E, *, top_k, score_function):
    """Backend of the public function; a part is a sequence."""
    logits_BTE = router_logits(x_BTD, router_DE)
    score = jax.nn.sigmoid if score_function == "sigmoid" else jax.nn.softmax
    scores_BTE = score(logits_BTE)
    ranked_BTE = jax.lax.stop_gradient(
        scores_BTE if bias_E is None else scores_BTE + bias_E[None, None]
    )
    chosen_BTk = jax.lax.top_k(ranked_BTE, top_k)[1]
    picked_BTk = jnp.take_along_axis(scores_BTE, chosen_BTk, axis=-1)
    weights_BTk = picked_BTk / jnp.sum(picked_BTk, axis=-1, keepdims=True)
    each_E = jnp.arange(scores_BTE.shape[-1])
    hits_BE = jnp.sum(chosen_BTk[..., None] == each_E[None, None, None], axis=(1, 2))
    shares_BTE = scores_BTE / jnp.sum(scores_BTE, axis=-1, keepdims=True)
    squares_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
    total = lambda a: jnp.sum(a, axis=1, keepdims=True)
    hits_B1E = hits_BE[:, None].astype(jnp.float32)
    return x_BTD, chosen_BTk, weights_BTk, hits_B1E, total(shares_BTE), total(squares_BT)


def moe_router_permute(x_BTD, router_DE, bias_E, *, top_k, score_function):
    """Backend of the public function; a part is a sequence."""
    how = dict(top_k=top_k, score_function=score_function)
    x_BTD, chosen_BTk, weights_BTk, *sums = moe_router(x_BTD, router_DE, bias_E, **how)
    B, T, _ = x_BTD.shape
    flat = lambda a: a.reshape(B * T, -1)
    row_Nk, _ = permute.row_id_map(flat(chosen_BTk), router_DE.shape[1])
    rows = permute.moe_permute(flat(x_BTD), flat(weights_BTk), row_Nk)
    by_sequence = lambda a, length: a.reshape(B, length, -1)
    return *(by_sequence(a, T * top_k) for a in rows), by_sequence(row_Nk, T), *sums


@jax.checkpoint  # otherwise the float32 states would be saved besides the 16-bit ones
def router_logits(x_BTD: jax.Array, router_DE: jax.Array) -> jax.Array:
    """Router logits in float32, whatever the states' dtype."""
    return jnp.matmul(x_BTD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST)
