"""Order of integer codes in which a warp reads operands of `mma` without rearranging them.

A slot is what a warp multiplies at once: two halves, each with 256 inputs (rows of a matrix) of 16
columns in int8, where 8 warps multiply, and 128 in int4, where 16 do. They have different inputs
where all of a product's inputs fit into the registers of a block's warps (K = 4,096), else
different columns. Slots of a panel of columns are adjacent: 16 columns, or 32.

A half has pieces of 32 inputs. Lane (g, t) of a warp, g < 8 and t < 4, has columns 2 g and
2 g + 1 of a piece's inputs 8 t .. 8 t + 7. int8: four 32-bit words; a word has the bytes of both
columns for one input, then those for the next. int4: a word for each column; from the lowest 4 bits
on it has inputs 0, 2, 4, 6, 1, 3, 5, 7 of the lane's. A lane's words of two pieces are adjacent. In
int4 the scales follow both halves: of each half, 16 in bfloat16 of each group of 128 inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

COLUMNS = 16
HALVES_INPUTS = 2048  # of a half of each warp
WARPS = {"int8": 8, "int4": 16}  # of a block, that multiply
PIECE = 32  # inputs
GROUP = 128  # inputs with one scale in int4
DEEP_INPUTS = 2 * HALVES_INPUTS  # of a product whose slots have different inputs in their halves


def half_inputs(form: str) -> int:
    return HALVES_INPUTS // WARPS[form]


def half_words(form: str) -> int:
    """32-bit words of a half's codes."""
    return half_inputs(form) * COLUMNS // {"int8": 4, "int4": 8}[form]


def scale_words(form: str) -> int:
    """32-bit words of a half's scales."""
    return 0 if form == "int8" else half_inputs(form) // GROUP * COLUMNS // 2


def slot_words(form: str) -> int:
    return 2 * (half_words(form) + scale_words(form))


def slots_across(K: int) -> int:
    """Halves of a slot that have different columns."""
    return 1 if K == DEEP_INPUTS else 2


def stream_shape(form: str, K: int, N: int) -> tuple[int, int, int]:
    """Shape of `to_stream` of a matrix."""
    across = slots_across(K)
    return N // COLUMNS // across, K // half_inputs(form) * across // 2, slot_words(form)


def to_stream(form: str, codes: jax.Array, scales_GN: Any = None) -> jax.Array:
    """Codes int8 [K, N], or uint8 [K / 2, N] of two inputs each with scales [K / 128, N] in
    bfloat16 -> int32 [panels, slots, words]."""
    N, K = codes.shape[1], codes.shape[0] * (1 if form == "int8" else 2)
    across, deep = slots_across(K), K // half_inputs(form)
    pieces = half_inputs(form) // PIECE
    panels, each, _ = stream_shape(form, K, N)
    slots = panels, each
    if form == "int8":
        a = codes.reshape(deep, pieces, 4, 4, 2, panels, across, 8, 2)
        a = a.transpose(5, 0, 6, 1, 7, 2, 3, 4, 8)  # .., piece, g, t, word, input, column
        return jax.lax.bitcast_convert_type(a.reshape(*slots, -1, 4), jnp.int32)
    # half, pair of pieces, piece, t, pair of inputs, panel, half across, g, column
    a = codes.reshape(deep, pieces // 2, 2, 4, 4, panels, across, 8, 2).astype(jnp.uint32)
    a = a.transpose(5, 0, 6, 1, 7, 3, 2, 8, 4)  # .., g, t, piece, column, pair of inputs
    shifts = jnp.expand_dims(4 * jnp.arange(4, dtype=jnp.uint32), range(a.ndim - 1))
    words = ((a & 15) << shifts) | ((a >> 4) << (shifts + 16))
    words = words.sum(-1, dtype=jnp.uint32).reshape(*slots, -1)
    s = scales_GN.astype(jnp.bfloat16).reshape(deep, pieces * PIECE // GROUP, panels, across, 8, 2)
    s = s.transpose(2, 0, 3, 1, 4, 5).reshape(*slots, -1, 2)
    both = (
        jax.lax.bitcast_convert_type(words, jnp.int32),
        jax.lax.bitcast_convert_type(s, jnp.int32),
    )
    return jnp.concatenate(both, axis=-1)


def from_stream(form: str, K: int, words: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Inverse of `to_stream` for a matrix of K inputs: codes, and int4's scales."""
    across, pieces = slots_across(K), half_inputs(form) // PIECE
    front = words.shape[0], K // half_inputs(form), across
    N = words.shape[0] * across * COLUMNS
    if form == "int8":
        a = jax.lax.bitcast_convert_type(words, jnp.int8)
        a = a.reshape(*front, pieces, 8, 4, 4, 2, 2)
        return a.transpose(1, 3, 5, 6, 7, 0, 2, 4, 8).reshape(-1, N), None
    count = 2 * half_words(form)
    codes, scales = words[..., :count], words[..., count:]
    a = codes.reshape(*front, pieces // 2, 8, 4, 2, 2, 1)
    shifts = jnp.expand_dims(4 * jnp.arange(4), range(a.ndim - 1))
    a = ((a >> shifts) & 15) | (((a >> (shifts + 16)) & 15) << 4)  # .., column, pair of inputs
    a = a.transpose(1, 3, 6, 5, 8, 0, 2, 4, 7).astype(jnp.uint8).reshape(-1, N)
    s = jax.lax.bitcast_convert_type(scales, jnp.bfloat16)
    s = s.reshape(*front, -1, COLUMNS).transpose(1, 3, 0, 2, 4)
    return a, s.reshape(-1, N)
