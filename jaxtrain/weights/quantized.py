"""Frozen matrices in 4 or 8 bits (Dettmers et al. 2023), dequantized just before the matmul.

Every array of a stack has a leading layer dim, so stacks are sliced like any other. The 4-bit form
is that of bitsandbytes: blocks of 64 along a column's inputs; the first of two values is in the
high half of a byte; the blocks' maxima have 8 bits, with one mean per matrix and one float32 step
per 256 of them.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, override

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels.matmul.few_rows import Operations, are_fused, composed
from jaxtrain_kernels.matmul.few_rows.operations import NOTHING
from jaxtrain_kernels.matmul.integers import (
    from_fragments,
    serves_fragments,
    w8a16_matmul,
)
from jaxtyping import Array, DTypeLike, Float, Int

from jaxtrain.parallel.axes import gather_fsdp
from jaxtrain.weights.contract import Weight

BLOCK, SCALES = 64, 256
# fmt: off
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)
# fmt: on


def dynamic_values() -> np.ndarray:
    """The 256 values of the 8-bit dynamic type (Dettmers 2015): 7 decades, finer in larger ones."""
    values = [np.array([0.0, 1.0], np.float32)]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2**decade + 1, dtype=np.float32)
        means = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [means, -means]
    return np.sort(np.concatenate(values).astype(np.float32))


DYNAMIC = dynamic_values()


@dataclasses.dataclass(frozen=True)
class QuantizedWeight(Weight):
    """A matrix [K, N] stored in few bits, with its compute dtype.

    ALONG: for each array, the matrix dims (K, N) that its last dims correspond to, after those of a
    stack. A mesh shards them like those dims (`weights.stored.packed_shardings`).
    """

    ALONG: ClassVar[Mapping[str, str]]
    dtype: str = dataclasses.field(kw_only=True)

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        return frozen_matmul(x, self)

    def product(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """Forward computation of `matmul`, which defines the gradient."""
        return x @ self.dequantize()

    def astype(self, dtype: DTypeLike) -> "QuantizedWeight":
        """The same bits with another compute dtype."""
        return dataclasses.replace(self, dtype=jnp.dtype(dtype).name)


@dataclasses.dataclass(frozen=True)
class IntegerWeight(QuantizedWeight):
    """Integer codes with scales; their kernels read a layer of a stack in place.

    layer: if set, the arrays are a whole stack, and this is the matrix of that layer. codes: int32
    if they are in the order of kernels for a few rows (`to_fragments`).
    """

    FORM: ClassVar[str]  # int4 or int8
    codes: Any
    scales: Any
    layer: int | None = dataclasses.field(default=None, kw_only=True)

    @abc.abstractmethod
    def values(self) -> Float[Array, "*E K N"]:
        """Dequantized values, for a matrix without `layer`."""

    @abc.abstractmethod
    def product(
        self, x: Float[Array, "*B K"], operations: Operations = NOTHING
    ) -> Float[Array, "*B N"]:
        """Forward computation of `matmul`, and of the operations around it, without biases."""

    def takes_operations(
        self, rows: int, dtype: jnp.dtype, others: Sequence[Array | Weight]
    ) -> bool:
        if others or not self.are_fragments() or not are_fused():
            return False
        return serves_fragments(self.FORM, rows, dtype, self.codes, self.scales)

    def matmul_fused(
        self,
        x_MK: Float[Array, "M K"],
        others: Sequence[Array | Weight],
        operations: Operations,
    ) -> tuple[Float[Array, "M _"], ...]:
        if operations.biases is None:
            return (self.product(x_MK, operations),)
        y_MN = self.product(x_MK, Operations(operations.norm))
        return composed(lambda *_: (y_MN,), x_MK, operations=operations._replace(norm=None))

    def dequantize(self) -> Float[Array, "*E K N"]:
        return self.alone().values()

    def alone(self) -> "IntegerWeight":
        """The same matrix with its own arrays, sliced from the stack."""
        w = self
        if self.layer is not None:
            w = dataclasses.replace(jax.tree.map(lambda s: s[self.layer], self), layer=None)
        if not w.are_fragments():
            return w
        return dataclasses.replace(w, codes=from_fragments(w.codes, self.FORM))

    def serves_fragments(self, rows: int) -> bool:
        """Whether kernels for so many rows multiply codes [.., R, N] of one matrix a layer in the
        order of `to_fragments`. Other products restore the order first."""
        args = self.FORM, rows, jnp.dtype(self.dtype), self.codes, self.scales
        return not self.are_fragments() and self.codes.ndim == 3 and serves_fragments(*args)

    def are_fragments(self) -> bool:
        return self.codes.dtype == jnp.int32

    def layers(self, count: int) -> "list[IntegerWeight]":
        """The `count` matrices of a stack, without slicing it."""
        return [dataclasses.replace(self, layer=i) for i in range(count)]

    def is_experts(self) -> bool:
        """Whether there is one matrix per expert."""
        return not self.are_fragments() and self.codes.ndim > (2 if self.layer is None else 3)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "steps", "mean"],
    meta_fields=["shape", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class NF4Weight(QuantizedWeight):
    """codes uint8 [.., K N / 2], scales uint8 [.., blocks], steps float32 [.., blocks / 256],
    mean float32 [..]; shape is one matrix's (K, N). Codes are in column order, so that a shard of
    the codes is a shard of the columns."""

    ALONG: ClassVar[Mapping[str, str]] = {"codes": "N", "scales": "N", "steps": "", "mean": ""}
    codes: Any
    scales: Any
    steps: Any
    mean: Any
    shape: tuple[int, int]

    def dequantize(self) -> Float[Array, "*E K N"]:
        if self.codes.ndim > 1:  # experts
            return jax.vmap(NF4Weight.dequantize)(self)
        K, N = self.shape
        steps = jnp.repeat(self.steps, SCALES)[: self.scales.shape[0]]
        most = jnp.asarray(DYNAMIC)[self.scales] * steps + self.mean
        codes = jnp.stack([self.codes >> 4, self.codes & 15], axis=-1).reshape(-1, BLOCK)
        return (jnp.asarray(NF4)[codes] * most[:, None]).astype(self.dtype).reshape(N, K).T


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["dtype", "layer"],
)
@dataclasses.dataclass(frozen=True)
class Int8Weight(IntegerWeight):
    """codes int8 [.., K, N], scales float32 [.., N]: a column's largest code is 127."""

    ALONG: ClassVar[Mapping[str, str]] = {"codes": "KN", "scales": "N"}
    FORM: ClassVar[str] = "int8"
    codes: Any
    scales: Any

    @override
    def values(self) -> Float[Array, "*E K N"]:
        return int8_values(self.codes, self.scales).astype(self.dtype)

    @override
    def product(
        self, x: Float[Array, "*B K"], operations: Operations = NOTHING
    ) -> Float[Array, "*B N"]:
        if self.is_experts():
            return x @ self.dequantize()
        arrays = self.codes, self.scales
        return w8a16_matmul(x, *arrays, layer=self.layer, operations=operations)


def nearest(x: Array, values: np.ndarray) -> Array:
    """Index of the nearest of 2^n sorted values; ties go to the lower one.

    It finds one bit of the index at a time. For a sum of comparisons (a reduction) XLA may make a
    Triton kernel that compiles for minutes.
    """
    between = jnp.asarray((values[1:] + values[:-1]) / 2)
    index = jnp.zeros(x.shape, jnp.uint8)
    bit = len(values) // 2
    while bit:
        index += jnp.uint8(bit) * (x > between[index + jnp.uint8(bit - 1)])
        bit //= 2
    return index


def quantize_nf4(w_KN: Float[Array, "K N"]) -> NF4Weight:
    """Quantize one matrix to 4 bits; K N is a multiple of 64."""
    blocks = w_KN.T.astype(jnp.float32).reshape(-1, BLOCK)
    most = jnp.max(jnp.abs(blocks), axis=1)
    codes = nearest(blocks / jnp.where(most > 0, most, 1.0)[:, None], NF4).reshape(-1, 2)
    mean = jnp.mean(most)
    rest = jnp.pad(most - mean, (0, -len(most) % SCALES)).reshape(-1, SCALES)
    steps = jnp.max(jnp.abs(rest), axis=1)
    scales = nearest(rest / jnp.where(steps > 0, steps, 1.0)[:, None], DYNAMIC)
    packed = codes[:, 0] << 4 | codes[:, 1]
    K, N = w_KN.shape
    return NF4Weight(
        packed, scales.reshape(-1)[: len(most)], steps, mean, (K, N), dtype=w_KN.dtype.name
    )


def int8_codes(
    w: Float[Array, "*L K N"], axis: int = -2
) -> tuple[Float[Array, "*L K N"], Float[Array, "*S"]]:
    """(Nearest codes from -127 to 127 as float32, scales), with one scale along the axis."""
    w = w.astype(jnp.float32)
    scales = jnp.max(jnp.abs(w), axis=axis) / 127
    return jnp.round(w / jnp.expand_dims(jnp.where(scales > 0, scales, 1.0), axis)), scales


def int8_values(
    codes: Float[Array, "*L K N"] | Int[Array, "*L K N"], scales: Float[Array, "*S"], axis: int = -2
) -> Float[Array, "*L K N"]:
    """Dequantize codes to float32."""
    return codes.astype(jnp.float32) * jnp.expand_dims(scales, axis)


def quantize_int8(w_KN: Float[Array, "K N"]) -> Int8Weight:
    """Quantize one matrix to 8 bits, with one scale per column."""
    codes, scales = int8_codes(w_KN)
    return Int8Weight(codes.astype(jnp.int8), scales, dtype=w_KN.dtype.name)


QUANTIZERS = {"nf4": quantize_nf4, "int8": quantize_int8}


@functools.partial(jax.jit, static_argnums=1)
def quantize(w_LKN: Float[Array, "L K N"], kind: Literal["nf4", "int8"]) -> NF4Weight | Int8Weight:
    """Quantize a stack, one matrix at a time."""
    return jax.lax.map(QUANTIZERS[kind], w_LKN)


@jax.custom_vjp
def frozen_matmul(x: Array, w: QuantizedWeight) -> Array:
    """x w. The packed matrix is saved for the gradient: dequantized ones of all layers would stay
    in memory from the forward to the backward pass."""
    return _forward(x, w)[0]


def _forward(x: Array, packed: QuantizedWeight) -> tuple[Array, QuantizedWeight]:
    """The matmul is here, not in a call, in which `model.remat=dots` would not see and save it."""
    x, w = jax.lax.optimization_barrier((x, packed))  # dequantize when needed, not all at the start
    return gather_fsdp(w).product(x), packed


def frozen_backward(w: Weight, dy: Array) -> tuple[Array, None]:
    """Gradient of x alone, from the saved packed matrix."""
    w, dy = jax.lax.optimization_barrier((w, dy))  # else XLA would keep the dequantized forward one
    return dy @ gather_fsdp(w).dequantize().T, None


frozen_matmul.defvjp(_forward, frozen_backward)
