"""Order of integer codes in which a warp reads operands of `mma` as 512 adjacent bytes.

A block has 16 rows of codes and 32 columns. Lane (c, q) of a warp, c < 8 and q < 4, multiplies its
rows 4 q .. 4 q + 3 and columns 4 c .. 4 c + 3: four adjacent 32-bit words, one a row. All blocks of
32 columns are adjacent, so a program that multiplies them reads one contiguous piece of memory.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Integer

ROWS, COLUMNS = 16, 32  # of a block
WORDS = ROWS * COLUMNS // 4  # of 4 codes, in a block
STORED = {"int4": jnp.uint8, "int8": jnp.int8}  # a byte of codes in rows


def to_fragments(codes: Integer[Array, "*L R N"]) -> Int32[Array, "*L N/32 R/16 128"]:
    """Arrange codes (a byte each) of matrices. R is a multiple of 16, N of 32."""
    *L, R, N = codes.shape
    a = codes.reshape(*L, R // ROWS, 4, 4, N // COLUMNS, 8, 4)
    n = len(L)  # axes from n on: block of rows, q, its row, block of columns, c, its column
    a = a.transpose(*range(n), n + 3, n, n + 4, n + 1, n + 2, n + 5)
    words = jax.lax.bitcast_convert_type(a, jnp.int32)
    return words.reshape(*L, N // COLUMNS, R // ROWS, WORDS)


def from_fragments(words: Int32[Array, "*L P B 128"], form: str) -> Integer[Array, "*L R N"]:
    """Inverse of `to_fragments`. form: int4 or int8."""
    *L, P, B, _ = words.shape
    a = jax.lax.bitcast_convert_type(words.reshape(*L, P, B, 8, 4, 4), STORED[form])
    n = len(L)
    a = a.transpose(*range(n), n + 1, n + 3, n + 4, n, n + 2, n + 5)
    return a.reshape(*L, B * ROWS, P * COLUMNS)
