"""Inputs of `decode_layers`: the shape of a model's layers, and their packed weights."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ROWS = 8  # outputs of a tile of a matrix


class LayersShape(NamedTuple):
    """Sizes of a stack of equal layers, and the constants of its formulas.

    windows: number of keys before the new token that each layer sees. middle: index of the layer
    whose result is also returned. scale: factor of the scores q k.
    """

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    middle: int
    eps: float
    scale: float

    @property
    def depth(self) -> int:
        return len(self.windows)

    @property
    def gate_rows(self) -> int:
        """Rows of the value gates, padded to whole tiles."""
        return -(-self.kv_heads // ROWS) * ROWS

    @property
    def qkv_rows(self) -> int:
        """Outputs of the first matmul: queries, keys, values and gates."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim + self.gate_rows


class PackedLayers(NamedTuple):
    """Transposed matrices of all layers, and the scales of the residual stream.

    An int32 holds two weights of an output: of input i in the lower 16 bits, of input
    i + (inputs / 2) in the upper ones. So a kernel loads whole words and has two halves of inputs.
    """

    qkv_LRd: Int[Array, "L R d"]  # rows of q, k, v and of the gates; d = width / 2
    out_LDn: Int[Array, "L D n"]  # n = heads * head_dim / 2
    up_LFd: Int[Array, "L F d"]
    down_LDf: Int[Array, "L D f"]  # f = hidden / 2
    scales_L2: Float[Array, "L 2"]  # of the stream and of x0, before each layer


class StreamedLayers(NamedTuple):
    """Matrices of all layers in the order of `hopper.order`, and the scales of the residual stream.

    A matrix has units of 4 outputs, a unit has slots, and a slot has words of two weights.
    """

    qkv_LUSW: Int[Array, "L U S W"]
    out_LUSW: Int[Array, "L V T W"]
    up_LUSW: Int[Array, "L X S W"]
    down_LUSW: Int[Array, "L V Y W"]
    scales_L2: Float[Array, "L 2"]


LayersWeights = PackedLayers | StreamedLayers


def pack_weights(matrices: Sequence[Float[Array, "I O"]]) -> Int[Array, "L O i"]:
    """Pack matrices of equal shape, one per layer, in bfloat16 as `PackedLayers` describes."""
    return jnp.stack([_pack_one(matrix) for matrix in matrices])


@jax.jit
def _pack_one(w_IO: Array) -> Array:
    bits_OI = jax.lax.bitcast_convert_type(w_IO.astype(jnp.bfloat16).T, jnp.uint16)
    low, high = (x.astype(jnp.uint32) for x in jnp.split(bits_OI, 2, axis=1))
    return jax.lax.bitcast_convert_type(low | (high << 16), jnp.int32)


def unpack_weights(packed_LOi: Int[Array, "*L O i"]) -> Float[Array, "*L O I"]:
    """Return the transposed matrices in bfloat16."""
    bits = jax.lax.bitcast_convert_type(packed_LOi, jnp.uint32)
    halves = [(bits & 0xFFFF), bits >> 16]
    both = jnp.concatenate([x.astype(jnp.uint16) for x in halves], axis=-1)
    return jax.lax.bitcast_convert_type(both, jnp.bfloat16)
