"""Reference implementation in plain jnp: any dtype, all logits in memory."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target


def supports(target: Target, x_ND, w_DV) -> None:
    return None


def linear_cross_entropy(
    x_ND, w_DV, labels_N, weights_N, *, softcap, z_loss, valid_vocab, chunk=None
):
    """Backend of the public function; `chunk` is ignored."""
    nll_N, lse_N = _nll_and_lse(x_ND, w_DV, labels_N, softcap, valid_vocab)
    weights_N = jax.lax.stop_gradient(weights_N).astype(lse_N.dtype)
    return jnp.sum(weights_N * (nll_N + z_loss * lse_N**2))


def per_token(x_ND, w_DV, labels_N, softcap, valid_vocab, chunk=None):
    """Backend of the public `linear_cross_entropy_per_token`; `chunk` is ignored."""
    return _nll_and_lse(x_ND, w_DV, labels_N, softcap, valid_vocab)[0]


def _nll_and_lse(x_ND, w_DV, labels_N, softcap, valid_vocab):
    V = w_DV.shape[1]
    wide = jnp.promote_types(x_ND.dtype, jnp.float32)
    logits_NV = jnp.matmul(x_ND, w_DV, preferred_element_type=wide)
    if softcap is not None:
        logits_NV = softcap * jnp.tanh(logits_NV / softcap)
    if valid_vocab is not None:
        logits_NV = jnp.where((jnp.arange(V) < valid_vocab)[None], logits_NV, -jnp.inf)
    lse_N = jax.nn.logsumexp(logits_NV, axis=-1)
    label_N1 = jnp.clip(labels_N, 0, V - 1)[:, None]
    return lse_N - jnp.take_along_axis(logits_NV, label_N1, axis=1)[:, 0], lse_N
