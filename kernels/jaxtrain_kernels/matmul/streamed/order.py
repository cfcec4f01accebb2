"""Order of integer codes in which a warp reads operands of `mma` without rearranging them.

A slot is what a warp multiplies at once: two halves, each with 256 inputs (rows of a matrix) of 16
columns. They have different inputs where all of a product's inputs fit into the registers of a
block's 8 warps (K = 4,096), else different columns. Slots of a panel of columns are adjacent: 16
columns, or 32.

A half has 8 pieces of 32 inputs. Lane (g, t) of a warp, g < 8 and t < 4, has columns 2 g and
2 g + 1 of a piece's inputs 8 t .. 8 t + 7. int8: four 32-bit words; a word has the bytes of both
columns for one input, then those for the next. int4: two words, each of four inputs k: from the
lowest 4 bits on, both columns for k 0, both for k 2, both for k 1, both for k 3; a lane's words of
two pieces are adjacent. In int4 the scales follow both halves: of each half, of each of its two
groups of 128 inputs, 16 in bfloat16.
"""

from typing import Any

import jax
import jax.numpy as jnp

HALF_INPUTS, COLUMNS = 256, 16
PIECE = 32  # inputs
PIECES = HALF_INPUTS // PIECE
GROUP = 128  # inputs with one scale in int4
DEEP_INPUTS = 4096  # of a product whose slots have 512 inputs
HALF_WORDS = {"int8": HALF_INPUTS * COLUMNS // 4, "int4": HALF_INPUTS * COLUMNS // 8}
SCALE_WORDS = {"int8": 0, "int4": HALF_INPUTS // GROUP * COLUMNS // 2}  # of a half


def slot_words(form: str) -> int:
    return 2 * (HALF_WORDS[form] + SCALE_WORDS[form])


def slots_across(K: int) -> int:
    """Halves of a slot that have different columns."""
    return 1 if K == DEEP_INPUTS else 2


def stream_shape(form: str, K: int, N: int) -> tuple[int, int, int]:
    """Shape of `to_stream` of a matrix."""
    across = slots_across(K)
    return N // COLUMNS // across, K // HALF_INPUTS * across // 2, slot_words(form)


def to_stream(form: str, codes: jax.Array, scales_GN: Any = None) -> jax.Array:
    """Codes int8 [K, N], or uint8 [K / 2, N] of two inputs each with scales [K / 128, N] in
    bfloat16 -> int32 [panels, slots, words]."""
    N, K = codes.shape[1], codes.shape[0] * (1 if form == "int8" else 2)
    across, deep = slots_across(K), K // HALF_INPUTS
    panels, each, _ = stream_shape(form, K, N)
    slots = panels, each
    if form == "int8":
        a = codes.reshape(deep, PIECES, 4, 4, 2, panels, across, 8, 2)
        a = a.transpose(5, 0, 6, 1, 7, 2, 3, 4, 8)  # .., piece, g, t, word, input, column
        return jax.lax.bitcast_convert_type(a.reshape(*slots, -1, 4), jnp.int32)
    # half, pair of pieces, piece, t, word, pair of inputs, panel, half across, g, column
    a = codes.reshape(deep, PIECES // 2, 2, 4, 2, 2, panels, across, 8, 2).astype(jnp.uint32)
    a = a.transpose(6, 0, 7, 1, 8, 3, 2, 4, 5, 9)  # .., g, t, piece, word, pair of inputs, column
    shifts = _shifts(a.ndim).astype(jnp.uint32)
    words = ((a & 15) << shifts) | ((a >> 4) << (shifts + 16))
    words = words.sum((-2, -1), dtype=jnp.uint32).reshape(*slots, -1)
    s = scales_GN.astype(jnp.bfloat16).reshape(deep, 2, panels, across, 8, 2)
    s = s.transpose(2, 0, 3, 1, 4, 5).reshape(*slots, -1, 2)
    both = (
        jax.lax.bitcast_convert_type(words, jnp.int32),
        jax.lax.bitcast_convert_type(s, jnp.int32),
    )
    return jnp.concatenate(both, axis=-1)


def from_stream(form: str, K: int, words: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Inverse of `to_stream` for a matrix of K inputs: codes, and int4's scales."""
    across = slots_across(K)
    front = words.shape[0], K // HALF_INPUTS, across
    N = words.shape[0] * across * COLUMNS
    if form == "int8":
        a = jax.lax.bitcast_convert_type(words, jnp.int8)
        a = a.reshape(*front, PIECES, 8, 4, 4, 2, 2)
        return a.transpose(1, 3, 5, 6, 7, 0, 2, 4, 8).reshape(-1, N), None
    count = 2 * HALF_WORDS[form]
    codes, scales = words[..., :count], words[..., count:]
    a = codes.reshape(*front, PIECES // 2, 8, 4, 2, 2, 1, 1)
    shifts = _shifts(a.ndim)
    a = ((a >> shifts) & 15) | (((a >> (shifts + 16)) & 15) << 4)  # .., pair of inputs, column
    a = a.transpose(1, 3, 6, 5, 7, 8, 0, 2, 4, 9).astype(jnp.uint8).reshape(-1, N)
    s = jax.lax.bitcast_convert_type(scales, jnp.bfloat16)
    s = s.reshape(*front, 2, COLUMNS).transpose(1, 3, 0, 2, 4)
    return a, s.reshape(-1, N)


def _shifts(rank: int) -> jax.Array:
    """First bit of int4's codes in a word, by pair of inputs and column, in the last two dims."""
    shifts = jnp.arange(2)[:, None] * 8 + jnp.arange(2)[None] * 4
    return jnp.expand_dims(shifts, range(rank - 2))
