"""Order of integer codes in which a warp reads operands of `mma` without rearranging them.

A block has 32 inputs (rows of a matrix) and 16 columns: 512 bytes of int8. Lane (g, t) of a warp,
g < 8 and t < 4, has columns 2 g and 2 g + 1 of inputs 8 t .. 8 t + 7, in four 32-bit words. A word
has the two columns of one input, then those of the next. All blocks of a panel of 16 columns are
adjacent, and a panel follows the other.
"""

import jax
import jax.numpy as jnp

INPUTS, COLUMNS = 32, 16  # of a block


def to_stream(codes_KN: jax.Array) -> jax.Array:
    """int8 codes [K, N] -> int32 [N/16, K/32, 128]. K is a multiple of 32, N of 16."""
    K, N = codes_KN.shape
    a = codes_KN.reshape(K // INPUTS, 4, 4, 2, N // COLUMNS, 8, 2)
    a = a.transpose(4, 0, 5, 1, 2, 3, 6)  # panel, block, g, t, word, input, column
    words = jax.lax.bitcast_convert_type(a.reshape(*a.shape[:5], 4), jnp.int32)
    return words.reshape(N // COLUMNS, K // INPUTS, 128)
