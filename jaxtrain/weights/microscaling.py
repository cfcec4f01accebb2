"""Training in emulated MXFP8, MXFP6, MXFP4 and NVFP4: the operands of every matmul of a matrix are
rounded to block-scaled low-bit formats, and multiplied in the compute dtype.

MX (OCP Microscaling specification 1.0; scaling of Rouhani et al. 2023, arXiv:2310.10537): blocks of
32 along the contracted dim, each with a power-of-two scale. NVFP4 (NVIDIA 2025, arXiv:2509.25149):
blocks of 16 with an e4m3 scale, and a float32 scale per tensor. Blocks of weights are 16 x 16, so
that forward and backward pass use the same matrix. Gradients are rounded stochastically. The inputs
of the weight gradient go through a 16-wide random Hadamard transform along the tokens.

The values are those of hardware with such matmuls (Blackwell); the speed is not.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxtrain.weights import formats
from jaxtrain.weights.contract import Weight
from jaxtrain.weights.formats import E2M1, Format

HADAMARD = 16  # tokens that are transformed together
# One random sign vector for all matrices and steps, as in the paper.
SIGNS = np.random.default_rng(2509).choice(np.array([-1.0, 1.0], np.float32), HADAMARD)
SYLVESTER = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]], np.float32)] * 4)
TRANSFORM = SYLVESTER * SIGNS / HADAMARD**0.5


class BlockScaling(NamedTuple):
    """operand: format of inputs and weights. gradient: format of output gradients. block: number
    of values that share a scale. square: weights have blocks of block x block."""

    operand: Format
    gradient: Format
    block: int = 32
    tensor_scale: bool = False
    square: bool = False
    stochastic_rounding: bool = False
    hadamard: bool = False


class Operand(NamedTuple):
    """Operand of a matmul: values in the compute dtype, times a float32 scale."""

    values: Array
    scale: Array | float


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w_KN", "key"], meta_fields=["scaling"]
)
@dataclasses.dataclass(frozen=True)
class BlockScaledWeight(Weight):
    """A matrix, or a stack of them, whose matmuls round their operands. key: for stochastic
    rounding."""

    w_KN: Any
    key: Any
    scaling: BlockScaling

    def matmul(self, x: Float[Array, "*B T K"]) -> Float[Array, "*B T N"]:
        return rounded_matmul(self.scaling, x, self.w_KN, self.key)

    def dequantize(self) -> Float[Array, "K N"]:
        """The array itself: the low-bit form is its matmul format, not its storage format."""
        return self.w_KN


def mx(
    w_KN: Float[Array, "*L K N"],
    key: Array | None = None,
    *,
    operand: Format,
    gradient: Format,
    stochastic_rounding: bool = False,
    hadamard: bool = False,
) -> BlockScaledWeight:
    """MX: blocks of 32 values share a power-of-two scale. Rounds to nearest by default."""
    scaling = BlockScaling(operand, gradient)
    options = {"stochastic_rounding": stochastic_rounding, "hadamard": hadamard}
    return BlockScaledWeight(w_KN, key, scaling._replace(**options))


def nvfp4(
    w_KN: Float[Array, "*L K N"],
    key: Array | None = None,
    *,
    stochastic_rounding: bool = True,
    hadamard: bool = True,
) -> BlockScaledWeight:
    """NVFP4: blocks of 16 with two levels of scales; stochastic rounding of gradients and Hadamard
    transform by default."""
    scaling = BlockScaling(E2M1, E2M1, 16, True, True, stochastic_rounding, hadamard)
    return BlockScaledWeight(w_KN, key, scaling)


def round_operand(
    x: Float[Array, "*S M N"],
    r: BlockScaling,
    form: Format,
    tile: tuple[int, int],
    key: Array | None,
) -> Operand:
    """Round an operand in blocks of `tile`; key: for stochastic rounding; None: to nearest."""
    tiles = formats.to_tiles(x, *tile)
    if r.tensor_scale:
        scale = formats.nvfp4_tensor_scale(x)
        values = formats.round_nvfp4(tiles, scale, key)
    else:
        scale, values = 1.0, formats.round_mx(tiles, form, key)
    return Operand(formats.from_tiles(values, x.shape).astype(x.dtype), scale)


def product(a: Operand, b: Operand, dims: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """Contract a and b over dims, accumulated in float32, in the dtype of a."""
    summed = jax.lax.dot_general(
        a.values, b.values, (dims, ((), ())), preferred_element_type=jnp.float32
    )
    return (summed * (a.scale * b.scale)).astype(a.values.dtype)


def transformed(x: Float[Array, "*B T K"]) -> Float[Array, "*B t K"]:
    """Hadamard transform of each 16 tokens, zero-padded at the end. It cancels in x^T dy."""
    tiles = formats.to_tiles(x, HADAMARD, 1)
    *lead, t, _, n, _ = tiles.shape
    mixed = jnp.einsum("ij,...tjnc->...tinc", jnp.asarray(TRANSFORM), tiles)
    return formats.from_tiles(mixed, (*lead, t * HADAMARD, n)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_matmul(
    r: BlockScaling, x: Float[Array, "*B T K"], w_KN: Float[Array, "K N"], key: Array | None
) -> Float[Array, "*B T N"]:
    """x w with both in blocks along K. Backward matmuls have blocks along their contracted dim."""
    return _forward(r, x, w_KN, key)[0]


def _forward(r: BlockScaling, x: Array, w_KN: Array, key: Array | None) -> tuple[Array, Any]:
    sides = (r.block, r.block) if r.square else (r.block, 1)
    left = round_operand(x, r, r.operand, (1, r.block), None)
    right = round_operand(w_KN, r, r.operand, sides, None)
    return product(left, right, ((x.ndim - 1,), (0,))), (x, w_KN, key)


def _backward(
    r: BlockScaling, saved: tuple[Array, Array, Array | None], dy: Array
) -> tuple[Array, Array, None]:
    x, w_KN, key = saved
    keys = (None, None)
    if r.stochastic_rounding and key is not None:
        keys = jax.random.split(key)
    sides = (r.block, r.block) if r.square else (1, r.block)
    upper = round_operand(dy, r, r.gradient, (1, r.block), keys[0])
    dx = product(upper, round_operand(w_KN, r, r.operand, sides, None), ((dy.ndim - 1,), (1,)))
    if r.hadamard:
        x, dy = transformed(x), transformed(dy)
    left = round_operand(x, r, r.operand, (r.block, 1), None)
    right = round_operand(dy, r, r.gradient, (r.block, 1), keys[1])
    tokens = tuple(range(x.ndim - 1))
    return dx, product(left, right, (tokens, tokens)).astype(w_KN.dtype), None


rounded_matmul.defvjp(_forward, _backward)
