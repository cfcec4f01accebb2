"""Linear + cross-entropy in chunks of tokens: three matmuls, any device.

The loss is a sum with known weights, so a chunk's logits determine its gradient up to one scalar.
The VJP's forward computes the gradient chunk by chunk; the backward only multiplies it by the
cotangent. This avoids recomputing the logits (3 matmuls instead of 4, as in Liger and QuACK).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.dispatch import Target, target

# Limits of a chunk. CPU: logits that fit in the cache. GPU: rows that fill the matmuls, and a cap
# on the logits, since that many rows of a large vocabulary would take gigabytes.
CPU_LOGITS_BYTES = 4 * 2**20
GPU_ROWS, GPU_LOGITS = 8192, 2**29
# float16 underflows below 6e-8, where most of a softmax lies. So the logit gradients are multiplied
# by this (over the largest weight) before the cast, and the products are divided after the matmuls.
FLOAT16_SCALE = 1024.0
# Up to this, the softcap replaces the row maximum: exp(-2 * softcap) does not underflow.
SOFTCAP_AS_MAXIMUM = 30.0


class CrossEntropyOptions(NamedTuple):
    """Static options. row_pass: a kernel that replaces `row_pass` below; None = `row_pass`.
    logits_of: (prepare(w), run once; multiply(x, prepared), a chunk's logits); None = x @ w.
    """

    softcap: float | None
    z_loss: float
    valid_vocab: int | None
    chunk: int
    row_pass: Callable[..., Any] | None = None
    logits_of: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def product(self, w_DV: Any) -> Callable[[Any], Any]:
        """Return the function that maps a chunk's x to its logits."""
        if self.logits_of is None:
            return lambda x_CD: x_CD @ w_DV
        prepare, multiply = self.logits_of
        prepared = prepare(w_DV)
        return lambda x_CD: multiply(x_CD, prepared)


def supports(target: Target, x_ND, w_DV) -> None:
    return None


def linear_cross_entropy(
    x_ND, w_DV, labels_N, weights_N, *, softcap, z_loss, valid_vocab, chunk, row_pass=None,
    logits_of=None,
):  # fmt: skip
    """Backend of the public function. row_pass: a kernel such as `hopper.rows.loss_rows`."""
    chunk = chunk or default_chunk(len(x_ND), len(w_DV.T))
    options = CrossEntropyOptions(softcap, z_loss, valid_vocab, chunk, row_pass, logits_of)
    return _loss(options, *_vary_alike(x_ND, w_DV, labels_N, weights_N))


def per_token(x_ND, w_DV, labels_N, softcap, valid_vocab, chunk):
    """Backend of the public `linear_cross_entropy_per_token`."""
    options = CrossEntropyOptions(
        softcap, 0.0, valid_vocab, chunk or default_chunk(len(x_ND), len(w_DV.T))
    )
    return _nll(options, *_vary_alike(x_ND, w_DV, labels_N))


def default_chunk(n_tokens: int, n_vocab: int) -> int:
    """Chunk size near the fastest on the device; chunks are equal, so that padding is small.

    On a GPU it is a multiple of 64, even with fewer tokens: XLA pads a matmul whose number of rows
    is no multiple of 8, and a kernel that overwrites a slice of that result in place, as Hopper's
    pass over the logits does, loses its writes (dynamic-slice fusions, jaxlib 0.11.2).
    """
    rows = min(GPU_ROWS, GPU_LOGITS // n_vocab)
    if target().platform == "cpu":
        rows = max(64, CPU_LOGITS_BYTES // (4 * n_vocab))
    n_chunks = -(-n_tokens // rows)
    chunk = -(-n_tokens // n_chunks // 64) * 64
    return min(n_tokens, chunk) if target().platform == "cpu" else chunk


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options, x_ND, w_DV, labels_N, weights_N):
    logits_of = options.product(w_DV)

    def add(total, chunk):
        x, labels, weights = chunk
        nll, lse = _row_losses(options, logits_of(x), labels)
        return total + _weighted_sum(options, nll, lse, weights), None

    chunks = _split(options.chunk, x_ND, labels_N, weights_N)
    total, _ = lax.scan(add, _wide_zeros(w_DV[0, 0]), chunks)
    return total


def _loss_fwd(options, x_ND, w_DV, labels_N, weights_N):
    scale = 1.0
    if x_ND.dtype == jnp.float16:
        largest = jnp.abs(weights_N).max()
        scale = FLOAT16_SCALE / jnp.where(largest > 0, largest, 1)

    logits_of = options.product(w_DV)

    def add(carry, chunk):
        total, dw_DV = carry
        x, labels, weights = chunk
        nll, lse, dlogits = (options.row_pass or row_pass)(
            logits_of(x),
            labels,
            weights * scale,
            softcap=options.softcap,
            z_loss=options.z_loss,
            valid_vocab=options.valid_vocab,
        )
        total += _weighted_sum(options, nll, lse, weights)
        dot = functools.partial(jnp.matmul, preferred_element_type=dw_DV.dtype)
        dx = dot(dlogits, w_DV.T)
        # dx in float16 would underflow here: the cotangent (with the loss scale) comes only later.
        dx = dx / scale if x.dtype == jnp.float16 else dx.astype(x.dtype)
        return (total, dw_DV + dot(x.T, dlogits)), dx

    chunks = _split(options.chunk, x_ND, labels_N, weights_N)
    start = _wide_zeros(w_DV[0, 0]), _wide_zeros(w_DV)
    (total, dw_DV), dx = lax.scan(add, start, chunks)
    dx_ND = dx.reshape(-1, x_ND.shape[1])[: len(x_ND)]
    # Empty arrays carry the dtypes of the inputs to the backward.
    return total, (dx_ND, dw_DV / scale, x_ND[:0], w_DV[:0], weights_N)


def _loss_bwd(options, residuals, cotangent):
    dx_ND, dw_DV, like_x, like_w, weights_N = residuals
    dx_ND = (dx_ND * cotangent).astype(like_x.dtype)
    return dx_ND, (dw_DV * cotangent).astype(like_w.dtype), None, jnp.zeros_like(weights_N)


_loss.defvjp(_loss_fwd, _loss_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(options, x_ND, w_DV, labels_N):
    chunks = _split(options.chunk, x_ND, labels_N)
    nll = lax.map(lambda xy: _row_losses(options, xy[0] @ w_DV, xy[1])[0], chunks)
    return nll.reshape(-1)[: len(x_ND)]


def _nll_fwd(options, x_ND, w_DV, labels_N):
    return _nll(options, x_ND, w_DV, labels_N), (x_ND, w_DV, labels_N)


def _nll_bwd(options, residuals, cotangent_N):
    """Gradient of the sum of the losses, each weighted by its cotangent."""
    x_ND, w_DV, labels_N = residuals
    dx_ND, dw_DV, *_ = _loss_fwd(options, x_ND, w_DV, labels_N, cotangent_N)[1]
    return dx_ND.astype(x_ND.dtype), dw_DV.astype(w_DV.dtype), None


_nll.defvjp(_nll_fwd, _nll_bwd)


def row_pass(logits_CV, labels_C, weights_C, *, softcap, z_loss, valid_vocab):
    """Return (nll_C, lse_C, d loss / d logits_CV in the logits' dtype) of one chunk.

    The logits are those before the softcap. They have the inputs' dtype, as from a plain linear
    layer: the two passes over them are memory-bound.
    """
    options = CrossEntropyOptions(softcap, z_loss, valid_vocab, len(labels_C))
    nll_C, lse_C = _row_losses(options, logits_CV, labels_C)
    # Without the barrier XLA would keep the capped logits in memory, in float32, for this pass.
    logits_CV, lse_C = lax.optimization_barrier((logits_CV, lse_C))
    dlogits_CV = _logit_gradients(options, logits_CV, lse_C, labels_C, weights_C)
    return nll_C, lse_C, dlogits_CV.astype(logits_CV.dtype)


def _row_losses(options, logits_CV, labels_C):
    """(nll_C, lse_C) of one chunk's logits before the softcap; statistics in float32."""
    wide = jnp.promote_types(logits_CV.dtype, jnp.float32)
    seen_CV = _hide_padding(options, _cap(options, logits_CV.astype(wide)))
    if options.softcap is not None and options.softcap <= SOFTCAP_AS_MAXIMUM:
        peak_C = jnp.full(labels_C.shape, options.softcap, wide)  # saves a pass over the logits
    else:
        peak_C = seen_CV.max(-1)
    lse_C = peak_C + jnp.log(jnp.exp(seen_CV - peak_C[:, None]).sum(-1))
    # Gathered before the softcap, so that the capped logits need not be in memory.
    label_C1 = jnp.clip(labels_C, 0, logits_CV.shape[1] - 1)[:, None]
    label_logit_C = jnp.take_along_axis(logits_CV, label_C1, axis=1)[:, 0].astype(wide)
    label_logit_C = _cap(options, label_logit_C)
    return lse_C - label_logit_C, lse_C


def _logit_gradients(options, logits_CV, lse_C, labels_C, weights_C):
    """d loss / d (x w), in float32."""
    logits_CV = logits_CV.astype(lse_C.dtype)
    capped_CV = _cap(options, logits_CV)
    p_CV = jnp.exp(_hide_padding(options, capped_CV) - lse_C[:, None])
    is_label_CV = jnp.arange(logits_CV.shape[1])[None] == labels_C[:, None]
    weights_C = weights_C.astype(p_CV.dtype)
    d_CV = p_CV * (weights_C * (1 + 2 * options.z_loss * lse_C))[:, None]
    d_CV = d_CV - jnp.where(is_label_CV, weights_C[:, None], 0)
    if options.softcap is not None:
        below_CV = _share_below(options, logits_CV)
        d_CV = d_CV * (4 * below_CV * (1 - below_CV))
    return d_CV


def _cap(options, logits):
    """softcap * tanh(logits / softcap)."""
    if options.softcap is None:
        return logits
    return options.softcap - (2 * options.softcap) * _share_below(options, logits)


def _share_below(options, logits):
    """r = (1 - tanh(logits / softcap)) / 2; the softcap's derivative is 4 r (1 - r).

    On a GPU a tanh or a division takes some 20 instructions, so that the passes over the logits
    would be bound by arithmetic; an exponential and a reciprocal square root take a few.
    """
    if target().platform == "cpu":
        return 0.5 - 0.5 * jnp.tanh(logits / options.softcap)
    return jnp.square(lax.rsqrt(1 + jnp.exp(logits * (2 / options.softcap))))


def _weighted_sum(options, nll_C, lse_C, weights_C):
    return jnp.sum(weights_C.astype(lse_C.dtype) * (nll_C + options.z_loss * lse_C**2))


def _hide_padding(options, logits_CV):
    if options.valid_vocab is None or options.valid_vocab >= logits_CV.shape[-1]:
        return logits_CV
    columns = jnp.arange(logits_CV.shape[1])[None]
    return jnp.where(columns < options.valid_vocab, logits_CV, -jnp.inf)


def _split(chunk, *arrays):
    """[N, ...] -> [chunks, chunk, ...], padded with zeros (so with weight 0)."""

    def split(x):
        x = jnp.pad(x, [(0, -len(x) % chunk)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunk, *x.shape[1:])

    return tuple(split(x) for x in arrays)


def _wide_zeros(x):
    return jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32))


def _vary_alike(*arrays):
    """Inside shard_map, make all arrays vary over the mesh axes that any of them varies over.

    The scan carries need this, and the transpose of the cast sums w's gradient over the devices.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    axes = frozenset().union(*varying)
    return tuple(
        lax.pcast(x, tuple(axes - own), to="varying") if axes - own else x
        for x, own in zip(arrays, varying)
    )
