"""Order of integer codes in which a warp reads operands of `mma` without rearranging them.

A slot has 256 inputs (rows of a matrix) of 16 columns, in 8 pieces of 32 inputs. Lane (g, t) of a
warp, g < 8 and t < 4, has columns 2 g and 2 g + 1 of a piece's inputs 8 t .. 8 t + 7.

int8: four 32-bit words a piece. A word has the bytes of both columns for one input, then those for
the next. int4: two words a piece, each of four inputs k: from the lowest 4 bits on, both columns
for k 0, both for k 2, both for k 1, both for k 3. A lane's words of two pieces are adjacent. The
scales of the slot's two groups of 128 inputs follow, 16 columns each.

The slots of a panel of columns are adjacent. A panel has 16 columns, or 32 where the product has
many inputs; its two slots of the same inputs are adjacent then.
"""

from typing import Any

import jax
import jax.numpy as jnp

SLOT_INPUTS, COLUMNS = 256, 16
PIECE = 32  # inputs
PIECES = SLOT_INPUTS // PIECE
GROUP = 128  # inputs with one scale in int4
RESIDENT_INPUTS = 4096  # most inputs of a product that warps keep in registers
SLOT_WORDS = {"int8": SLOT_INPUTS * COLUMNS // 4, "int4": SLOT_INPUTS * COLUMNS // 8 + COLUMNS}


def slots_across(K: int) -> int:
    """Slots of the same inputs in a panel."""
    return 1 if K <= RESIDENT_INPUTS else 2


def to_stream(form: str, codes: jax.Array, scales_GN: Any = None) -> jax.Array:
    """Codes int8 [K, N], or uint8 [K / 2, N] of two inputs each with scales [K / 128, N] in
    bfloat16 -> int32 [panels, K / 256, slots across, words]."""
    if form == "int8":
        (K, N), across = codes.shape, slots_across(codes.shape[0])
        a = codes.reshape(K // 256, PIECES, 4, 4, 2, N // 16 // across, across, 8, 2)
        a = a.transpose(5, 0, 6, 1, 7, 2, 3, 4, 8)  # .., piece, g, t, word, input, column
        words = jax.lax.bitcast_convert_type(a.reshape(*a.shape[:7], 4), jnp.int32)
        return words.reshape(N // 16 // across, K // 256, across, SLOT_WORDS[form])
    H, N = codes.shape
    across = slots_across(2 * H)
    panels, deep = N // 16 // across, 2 * H // 256
    # slot, pair of pieces, piece, t, word, pair of inputs, panel, slot across, g, column
    a = codes.reshape(deep, PIECES // 2, 2, 4, 2, 2, panels, across, 8, 2).astype(jnp.uint32)
    a = a.transpose(6, 0, 7, 1, 8, 3, 2, 4, 5, 9)  # .., g, t, piece, word, pair of inputs, column
    first, second = a & 15, a >> 4
    shifts = _shifts(a.ndim).astype(jnp.uint32)
    words = ((first << shifts) | (second << (shifts + 16))).sum((-2, -1), dtype=jnp.uint32)
    words = jax.lax.bitcast_convert_type(words, jnp.int32).reshape(panels, deep, across, -1)
    s = scales_GN.astype(jnp.bfloat16).reshape(deep, 2, panels, across, 8, 2)
    s = jax.lax.bitcast_convert_type(s.transpose(2, 0, 3, 1, 4, 5), jnp.int32)
    return jnp.concatenate([words, s.reshape(panels, deep, across, COLUMNS)], axis=-1)


def from_stream(form: str, words: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Inverse of `to_stream`: codes, and int4's scales."""
    panels, deep, across, _ = words.shape
    N = columns_of(words)
    if form == "int8":
        a = jax.lax.bitcast_convert_type(words, jnp.int8)
        a = a.reshape(panels, deep, across, PIECES, 8, 4, 4, 2, 2)
        return a.transpose(1, 3, 5, 6, 7, 0, 2, 4, 8).reshape(-1, N), None
    count = SLOT_WORDS[form] - COLUMNS
    codes, scales = words[..., :count], words[..., count:]
    a = codes.reshape(panels, deep, across, PIECES // 2, 8, 4, 2, 2, 1, 1)
    shifts = _shifts(a.ndim)
    a = ((a >> shifts) & 15) | (((a >> (shifts + 16)) & 15) << 4)  # .., pair of inputs, column
    a = a.transpose(1, 3, 6, 5, 7, 8, 0, 2, 4, 9).astype(jnp.uint8).reshape(-1, N)
    s = jax.lax.bitcast_convert_type(scales, jnp.bfloat16)
    s = s.reshape(panels, deep, across, 2, COLUMNS).transpose(1, 3, 0, 2, 4)
    return a, s.reshape(-1, N)


def inputs_of(words: jax.Array) -> int:
    """Number of a matrix's inputs."""
    return words.shape[1] * SLOT_INPUTS


def columns_of(words: jax.Array) -> int:
    return words.shape[0] * words.shape[2] * COLUMNS


def _shifts(rank: int) -> jax.Array:
    """First bit of int4's codes in a word, by pair of inputs and column, in the last two dims."""
    shifts = jnp.arange(2)[:, None] * 8 + jnp.arange(2)[None] * 4
    return jnp.expand_dims(shifts, range(rank - 2))
