"""Order of bfloat16 weights in which a warp reads operands of `mma` without rearranging them.

A unit is 4 outputs (rows of the transposed matrix). A chunk is a unit's weights of 64 inputs: the
16 x 16 operand A of one `mma`, of which row 4 i + r has output r and inputs 16 i .. 16 i + 15.
Operand B has these inputs in column 2 i, so that the product has output r's four sums in rows
4 i + r and columns 2 i: in lanes of which none has two.

Lane (g, t) of a warp, g < 8 and t < 4, has four words of output g % 4: inputs 4 t and
4 t + 1 of the 16 inputs i = g // 4, the same of i = 2 + g // 4, and inputs 4 t + 2 and 4 t + 3 of
both.

A warp has adjacent inputs of each product. A slot is what is loaded at once: `chunks` chunks of
each warp. A unit has one slot or more.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain_kernels.decode_layers.packing import LayersShape

ROWS, INPUTS = 4, 64  # of a chunk
CHUNK_BYTES = ROWS * INPUTS * 2
MOST_WARPS = {1024: 12, 8192: 8}  # by largest width


class SlotShape(NamedTuple):
    """warps: that multiply. chunks: of a warp in a slot."""

    warps: int
    chunks: int

    @property
    def bytes(self) -> int:
        return self.warps * self.chunks * CHUNK_BYTES

    def slots(self, inputs: int) -> int:
        """Slots of a unit."""
        return inputs // (INPUTS * self.warps * self.chunks)


def slot_shape(s: LayersShape) -> SlotShape:
    """The most warps whose number divides the chunks of each product."""
    each = math.gcd(*(size // INPUTS for size in (s.width, s.heads * s.head_dim, s.hidden)))
    most = next(most for width, most in MOST_WARPS.items() if s.width <= width)
    warps = max(n for n in range(1, most + 1) if each % n == 0)
    return SlotShape(warps, each // warps)


def to_stream(slot: SlotShape, w_IO: Float[Array, "I O"]) -> Int[Array, "U S W"]:
    """The matrix in bfloat16: [units, slots of a unit, words]."""
    I, O = w_IO.shape
    units = O // ROWS, ROWS
    a = w_IO.astype(jnp.bfloat16).T
    a = a.reshape(*units, slot.warps, slot.slots(I), slot.chunks, 2, 2, 4, 2, 2)
    # unit, row, warp, slot, chunk, upper and lower bit of i, t, pair, input of the pair
    a = a.transpose(0, 3, 2, 4, 6, 1, 7, 8, 5, 9)
    return jax.lax.bitcast_convert_type(a.reshape(units[0], slot.slots(I), -1, 2), jnp.int32)


def from_stream(slot: SlotShape, words: Int[Array, "U S W"]) -> Float[Array, "O I"]:
    """Inverse of `to_stream`, transposed."""
    U, S, _ = words.shape
    a = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
    a = a.reshape(U, S, slot.warps, slot.chunks, 2, ROWS, 4, 2, 2, 2)
    return a.transpose(0, 5, 2, 1, 3, 8, 4, 6, 7, 9).reshape(U * ROWS, -1)
