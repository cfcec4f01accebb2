"""Linear + cross-entropy in chunks of tokens, with all three matmuls in float8.

As in `xla`, the forward computes the gradients. The token weights bound the logits' gradient, so
its scale is known in advance, and the row pass writes the gradient directly in float8.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.cross_entropy import xla
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.fp8 import (
    E4M3,
    E5M2,
    fp8_amax,
    fp8_product,
    fp8_quantize,
    fp8_unsupported,
    given_scale,
)

# Upper bound of a logit's gradient, relative to max |weight|: above 1 to leave room for the z-loss.
HEADROOM = 2.0


class Passes(NamedTuple):
    """Functions of one call. rows: like `row_pass` below, gives (nll_C, lse_C, d_CV, d_VC) of a
    chunk's logits. cast: backend of `fp8_quantize`; None = the fastest.
    """

    rows: Callable[..., Any]
    cast: str | None


def supports(target: Target, x_ND, w_DV) -> str | None:
    if reason := fp8_unsupported(target):
        return reason
    if x_ND.dtype == jnp.float16:
        return "needs bfloat16 or float32: float16 has no room for gradients without a loss scale"
    if any(size % 16 for size in w_DV.shape):
        return f"needs a width and a vocabulary in multiples of 16, got {list(w_DV.shape)}"
    return None


def linear_cross_entropy(x_ND, w_DV, labels_N, weights_N, *, softcap, z_loss, valid_vocab, chunk):
    """Backend of the public function; x, w and the logits' gradient are rounded to float8."""
    chunk = chunk or xla.default_chunk(len(x_ND), len(w_DV.T))
    options = xla.CrossEntropyOptions(softcap, z_loss, valid_vocab, chunk)
    return with_passes(Passes(row_pass, "xla"), options, x_ND, w_DV, labels_N, weights_N)


def with_passes(passes: Passes, options: xla.CrossEntropyOptions, *arrays: Any) -> Any:
    return _loss(passes, options, *xla._vary_alike(*arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(passes, options, x_ND, w_DV, labels_N, weights_N):
    return _loss_fwd(passes, options, x_ND, w_DV, labels_N, weights_N)[0]


def _loss_fwd(passes, options, x_ND, w_DV, labels_N, weights_N):
    quantize = functools.partial(fp8_quantize, dtype=E4M3, implementation=passes.cast)
    w_fp8, x_amax = quantize(w_DV), fp8_amax(x_ND)
    x_scale = given_scale(x_amax, E4M3)
    # Without the z-loss, no logit's gradient exceeds its token's weight. So e5m2's range suffices
    # for a softmax: values below about 2^-31 of the largest weight become 0.
    most = HEADROOM * jnp.max(jnp.abs(weights_N)).astype(jnp.float32)
    d_scale = given_scale(most, E5M2)
    # Computed once here: the loop would compute them again for each chunk.
    logits_scale, dx_scale, dw_scale = (
        x_scale * w_fp8.scale,
        d_scale * w_fp8.scale,
        d_scale * x_scale,
    )

    def add(carry, chunk):
        total, dw_DV = carry
        x_CD, labels_C, scaled_C = chunk
        x_fp8 = quantize(x_CD, amax=x_amax)
        logits_CV = fp8_product(x_fp8.q_MK, w_fp8.q_KM, logits_scale, x_CD.dtype)
        nll_C, lse_C, d_CV, d_VC = passes.rows(
            logits_CV, labels_C, scaled_C, softcap=options.softcap, z_loss=options.z_loss,
            valid_vocab=options.valid_vocab,
        )  # fmt: skip
        dx_CD = fp8_product(d_CV, w_fp8.q_MK, dx_scale, x_CD.dtype, exact=True)
        dw_DV += fp8_product(x_fp8.q_KM, d_VC, dw_scale, dw_DV.dtype, exact=True)
        return (total + xla._weighted_sum(options, nll_C, lse_C, scaled_C), dw_DV), dx_CD

    chunks = xla._split(options.chunk, x_ND, labels_N, weights_N.astype(jnp.float32) / d_scale)
    start = xla._wide_zeros(w_DV[0, 0]), xla._wide_zeros(w_DV)
    (total, dw_DV), dx = lax.scan(add, start, chunks)
    dx_ND = dx.reshape(-1, x_ND.shape[1])[: len(x_ND)]
    return total * d_scale, (dx_ND, dw_DV, w_DV[:0], weights_N)


def _loss_bwd(passes, options, saved, cotangent):
    dx_ND, dw_DV, like_w, weights_N = saved
    dx_ND = (dx_ND * cotangent).astype(dx_ND.dtype)
    return dx_ND, (dw_DV * cotangent).astype(like_w.dtype), None, jnp.zeros_like(weights_N)


_loss.defvjp(_loss_fwd, _loss_bwd)


def row_pass(logits_CV, labels_C, weights_C, *, softcap, z_loss, valid_vocab):
    """Return (nll_C, lse_C, d_CV, d_VC): d is d loss / d logits before the softcap, in e5m2."""
    options = xla.CrossEntropyOptions(softcap, z_loss, valid_vocab, len(labels_C))
    nll_C, lse_C = _row_losses(options, logits_CV, labels_C)
    # As in xla.py: without the barrier XLA would keep the capped logits in float32.
    logits_CV, lse_C = lax.optimization_barrier((logits_CV, lse_C))
    d_CV = xla._logit_gradients(options, logits_CV, lse_C, labels_C, weights_C)
    largest = float(jnp.finfo(E5M2).max)
    d_CV = jnp.clip(d_CV, -largest, largest).astype(E5M2)
    return nll_C, lse_C, d_CV, d_CV.T


def _row_losses(options, logits_CV, labels_C):
    """(nll_C, lse_C) of a chunk's logits before the softcap, in float32."""
    wide = jnp.promote_types(logits_CV.dtype, jnp.float32)
    seen_CV = xla._hide_padding(options, xla._cap(options, logits_CV.astype(wide)))
    if options.softcap is not None and options.softcap <= xla.SOFTCAP_AS_MAXIMUM:
        peak_C = jnp.full(labels_C.shape, options.softcap, wide)
    else:
        peak_C = seen_CV.max(-1)
    lse_C = peak_C + jnp.log(jnp.exp(seen_CV - peak_C[:, None]).sum(-1))
    label_C1 = jnp.clip(labels_C, 0, logits_CV.shape[1] - 1)[:, None]
    label_logit_C = jnp.take_along_axis(logits_CV, label_C1, axis=1)[:, 0].astype(wide)
    return lse_C - xla._cap(options, label_logit_C), lse_C
