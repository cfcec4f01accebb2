"""Q4_K, llama.cpp's format of 4.5 bits per weight.

A super-block is 256 weights of a row, in 8 sub-blocks of 32. A weight is d * s * q - m * o: q has 4
bits, the sub-block's scale s and offset o have 6 bits each, the super-block's d and m are float16.
A super-block's bytes: d, m, 12 bytes of scales and offsets, 128 bytes of q.
Layout: `block_q4_K` of https://github.com/ggml-org/llama.cpp (ggml/src/ggml-common.h)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8

SUPER, SUB = 256, 32  # weights per super-block and per sub-block
BYTES = 144  # per super-block
CHUNK = 2048  # super-blocks encoded at a time
MOST_Q, MOST_SCALE = 15, 63
STRETCHES = tuple(x / 10 for x in range(-10, 11))  # candidates: a span of 15 + x steps


def quantize_q4_k(x: Float32[np.ndarray, "rows K"]) -> UInt8[np.ndarray, "rows b"]:
    """The bytes of a matrix, 144 per 256 weights. K must be a multiple of 256."""
    blocks = x.reshape(-1, SUPER // SUB, SUB)
    out = np.empty((len(blocks), BYTES), np.uint8)
    for i in range(0, len(blocks), CHUNK):
        part = blocks[i : i + CHUNK]
        padded = np.pad(part, ((0, CHUNK - len(part)), (0, 0), (0, 0)))  # compiled for one shape
        out[i : i + CHUNK] = packed(*map(np.asarray, q4_k_parts(padded)))[: len(part)]
    return out.reshape(len(x), -1)


@jax.jit
def q4_k_parts(x_bsk: Float[Array, "b s k"]) -> tuple[Array, Array, Array, Array, Array]:
    """(d [b] float16, m [b] float16, s [b s], o [b s], q [b s k]) of super-blocks.

    Each sub-block tries 21 placements of its 16 levels, fits scale and offset by least squares, and
    keeps the one with the smallest squared error. After scale and offset are rounded, the levels
    are chosen again.
    """
    scale_bs, offset_bs = scale_and_offset(x_bsk)
    d_b, m_b = (
        (jnp.max(y, axis=1) / MOST_SCALE).astype(jnp.float16) for y in (scale_bs, offset_bs)
    )
    wide_d, wide_m = d_b.astype(jnp.float32)[:, None], m_b.astype(jnp.float32)[:, None]
    s_bs = nearest_levels(scale_bs, wide_d, MOST_SCALE)
    o_bs = nearest_levels(offset_bs, wide_m, MOST_SCALE)
    lifted_bsk = x_bsk + (wide_m * o_bs)[..., None]
    return d_b, m_b, s_bs, o_bs, nearest_levels(lifted_bsk, (wide_d * s_bs)[..., None], MOST_Q)


def scale_and_offset(
    x_bsk: Float[Array, "b s k"],
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """The scale and the offset (both >= 0) of each sub-block, before rounding."""
    low = jnp.minimum(jnp.min(x_bsk, axis=-1), 0.0)
    span = jnp.max(x_bsk, axis=-1) - low
    best_scale, best_offset = jnp.zeros_like(low), jnp.zeros_like(low)
    error = jnp.sum(x_bsk**2, axis=-1)  # the error of scale 0 and offset 0
    for stretch in STRETCHES:
        q = nearest_levels(x_bsk - low[..., None], (span / (MOST_Q + stretch))[..., None], MOST_Q)
        scale, offset = least_squares(x_bsk, q)
        found = jnp.sum((scale[..., None] * q - offset[..., None] - x_bsk) ** 2, axis=-1)
        better = found < error
        best_scale = jnp.where(better, scale, best_scale)
        best_offset = jnp.where(better, offset, best_offset)
        error = jnp.where(better, found, error)
    return best_scale, best_offset


def least_squares(
    x_bsk: Float[Array, "b s k"], q_bsk: Float[Array, "b s k"]
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """The scale and offset, both >= 0, that minimize the sum of (scale q - offset - x)^2."""
    count = x_bsk.shape[-1]
    q, qq = jnp.sum(q_bsk, axis=-1), jnp.sum(q_bsk**2, axis=-1)
    x, xq = jnp.sum(x_bsk, axis=-1), jnp.sum(x_bsk * q_bsk, axis=-1)
    spread = count * qq - q**2
    scale = (count * xq - x * q) / jnp.where(spread > 0, spread, 1)
    offset = (scale * q - x) / count
    alike = spread <= 0  # all q are equal: fit a line through zero, or only an offset
    through_zero = (offset < 0) | (alike & (x >= 0))
    scale = jnp.where(through_zero, xq / jnp.where(qq > 0, qq, 1), scale)
    return jnp.maximum(scale, 0.0), jnp.where(through_zero, 0.0, offset)


def nearest_levels(x: Array, step: Array, most: int) -> Array:
    """x / step, rounded and clipped to 0..most; 0 where the step is 0."""
    return jnp.clip(jnp.round(x / jnp.where(step > 0, step, 1)), 0, most) * (step > 0)


def packed(
    d_b: np.ndarray, m_b: np.ndarray, s_bs: np.ndarray, o_bs: np.ndarray, q_bsk: np.ndarray
) -> UInt8[np.ndarray, "b 144"]:
    """Pack super-blocks into bytes.

    The upper two bits of the last four scales and offsets share bytes with the first four (6 bits
    each); their lower four bits have separate bytes.
    """
    s, o, q = (y.astype(np.uint8) for y in (s_bs, o_bs, q_bsk))
    tops = [y[:, :4] | (y[:, 4:] >> 4) << 6 for y in (s, o)]
    lows = (s[:, 4:] & 15) | (o[:, 4:] & 15) << 4
    pairs = q[:, 0::2] | q[:, 1::2] << 4  # two sub-blocks share 32 bytes
    halves = [y.astype("<f2")[:, None].view(np.uint8) for y in (d_b, m_b)]
    return np.concatenate([*halves, *tops, lows, pairs.reshape(len(q), -1)], axis=1)
