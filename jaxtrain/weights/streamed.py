"""Matrices with integer codes whose products one kernel computes, one after the other.

In a decode step a layer's output projection, its feed-forward network, and the next layer's
queries, keys and values follow each other without anything between them that another kernel
computes. So the first of them return a `PendingProduct`, and the last one runs the kernel.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtrain_kernels.matmul.few_rows import (
    GATED,
    InputNorm,
    Operations,
    are_fused,
    composed,
)
from jaxtrain_kernels.matmul.streamed import (
    StreamedMatrix,
    StreamPhase,
    from_stream,
    has_stream_kernel,
    streamed_products,
    to_stream,
)
from jaxtyping import Array, DTypeLike, Float, Int

from jaxtrain.weights.contract import PendingProduct, Weight, computed
from jaxtrain.weights.int4 import GROUP, Int4Weight
from jaxtrain.weights.joined import JoinedWeight, columns_of_parts, joined_matrix
from jaxtrain.weights.quantized import Int8Weight, IntegerWeight


class ProductChain:
    """Products that one kernel will compute when a result is needed outside of it.

    x: the first one's input [.., K]. stream: the residual stream, the last one that was given.
    results: of each product, once computed.
    """

    def __init__(self, form: str, x: Array):
        self.form, self.x = form, x
        self.start: Array | None = None  # the stream before the first product
        self.stream: Array | PendingProduct | None = None
        self.matrices: list[StreamedMatrix] = []
        self.results: list[Array] | None = None

    def takes(self, x: Array | PendingProduct, residual: Array | PendingProduct | None) -> bool:
        """Whether a product of x, to which that stream is added, can follow."""
        last = len(self.matrices) - 1
        reads = isinstance(x, StreamedResult) and x.chain is self and x.index == last
        known = residual is None or self.stream is None or residual is self.stream
        return self.results is None and reads and known

    def add(
        self, matrix: StreamedMatrix, residual: Array | PendingProduct | None
    ) -> "StreamedResult":
        if residual is not None and self.stream is None:
            self.start = computed(residual)
        self.matrices.append(matrix)
        shape = *self.x.shape[:-1], matrix.phase.outputs[0]
        result = StreamedResult(self, len(self.matrices) - 1, shape, self.x.dtype)
        self.stream = self.stream if residual is None else result
        return result

    def run(self) -> list[Array]:
        if self.results is None:
            start = self.x if self.start is None else self.start
            x_MK, stream_MD = (y.reshape(-1, y.shape[-1]) for y in (self.x, start))
            self.results = streamed_products(self.form, x_MK, stream_MD, self.matrices)
        return self.results


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedResult(PendingProduct):
    """The result of a chain's product."""

    chain: ProductChain
    index: int
    shape: tuple[int, ...]
    dtype: Any

    def array(self) -> Array:
        return self.chain.run()[self.index].reshape(self.shape)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "scales"],
    meta_fields=["form", "inputs", "dtype", "sizes", "part", "alternating"],
)
@dataclasses.dataclass(frozen=True)
class StreamedWeight(Weight):
    """A part of the columns of a matrix whose codes are in the order of `to_stream`.

    words: with the scales in int4. scales: of the columns in int8, else None. form: int4 or int8.
    inputs: of the matrix, K.
    sizes, part, alternating: as in `JoinedWeight`; a matrix alone has one part.
    """

    words: Any
    scales: Any
    form: str
    inputs: int
    dtype: str
    sizes: tuple[int, ...]
    part: int
    alternating: bool

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        return self.products(x)[self.part]

    def matmul_each(
        self, x: Float[Array, "*B K"], others: Sequence[Array | Weight]
    ) -> tuple[Float[Array, "*B _"], ...] | None:
        return self.products(x) if self.is_whole(others) else None

    def products(self, x: Float[Array, "*B K"]) -> tuple[Float[Array, "*B _"], ...]:
        """x times each part of the matrix: by the kernel for a few rows, else as a prompt's."""
        if self.has_kernel(math.prod(x.shape[:-1]), x.dtype):
            x_MK = x.reshape(-1, x.shape[-1])
            ys = streamed_products(self.form, x_MK, x_MK, [self.matrix()])
            ys = self.parts_of(ys[0]) if self.alternating else ys
            return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)
        return self.parts_of(self.restored().matrix.matmul(x))

    def has_kernel(self, rows: int, dtype: DTypeLike) -> bool:
        return are_fused() and has_stream_kernel(rows, dtype, [self.matrix().phase])

    def takes_operations(
        self, rows: int, dtype: jnp.dtype, others: Sequence[Array | Weight]
    ) -> bool:
        return self.is_whole(others) and self.has_kernel(rows, dtype)

    def matmul_pending(
        self,
        x: Float[Array, "*B K"] | PendingProduct,
        others: Sequence[Array | Weight],
        operations: Operations,
        residual: Array | PendingProduct | None,
    ) -> tuple[Array | PendingProduct, ...]:
        norm, biases, activation, _ = operations
        gated = activation in GATED and self.alternating
        if biases is not None or (activation is not None and not gated):
            return self.one_by_one(x, others, operations, residual)
        chain = x.chain if isinstance(x, StreamedResult) else None
        if chain is None or not chain.takes(x, residual):
            chain = ProductChain(self.form, computed(x))
        matrix = self.matrix(norm, activation, residual is not None)
        result = chain.add(matrix, residual)
        if gated or residual is not None:
            return (result,)
        if self.alternating:
            return self.parts_of(result.array())
        ys = chain.run()[-len(self.sizes) :]
        return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)

    def one_by_one(
        self,
        x: Float[Array, "*B K"] | PendingProduct,
        others: Sequence[Array | Weight],
        operations: Operations,
        residual: Array | PendingProduct | None,
    ) -> tuple[Array, ...]:
        """The products by the kernel, and what follows them by XLA."""
        parts = self.matmul_pending(x, others, Operations(operations.norm), None)
        flat = [computed(y).reshape(-1, y.shape[-1]) for y in parts]
        added = None if residual is None else computed(residual).reshape(len(flat[0]), -1)
        after = operations._replace(norm=None, residual_MN=added)
        ys = composed(lambda *_: tuple(flat), flat[0], operations=after)
        return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)

    def dequantize(self) -> Float[Array, "K N"]:
        return self.restored().dequantize()

    def matrix(
        self, norm: InputNorm | None = None, activation: str | None = None, residual: bool = False
    ) -> StreamedMatrix:
        parts = self.sizes if len(self.sizes) > 1 and not self.alternating else ()
        arrays = self.words, self.scales
        return StreamedMatrix(self.inputs, *arrays, norm, activation, residual, parts)

    def restored(self) -> JoinedWeight:
        """The same matrix with its codes in rows, for the many rows of a prompt."""
        codes, scales = from_stream(self.form, self.inputs, self.words)
        arrays = (codes, scales) if self.form == "int4" else (codes, self.scales)
        kind = Int4Weight if self.form == "int4" else Int8Weight
        matrix = kind(*arrays, dtype=self.dtype)
        return JoinedWeight(matrix, self.sizes, self.part, self.alternating)

    def is_whole(self, others: Sequence[Array | Weight]) -> bool:
        """Whether this part and the others, in order, are all parts of one matrix."""
        parts = [self, *(w for w in others if isinstance(w, StreamedWeight))]
        every = [(w.sizes, w.part) for w in parts]
        wanted = [(self.sizes, part) for part in range(len(self.sizes))]
        return len(parts) == 1 + len(others) and every == wanted

    def parts_of(self, y: Float[Array, "*B N"]) -> tuple[Float[Array, "*B _"], ...]:
        return columns_of_parts(y, self.sizes, self.alternating)


def streamed_layers(
    stacks: Sequence[IntegerWeight], alternating: bool
) -> list[tuple[StreamedWeight, ...]]:
    """The parts of each layer's matrix, of all these stacks together."""
    sizes, first = tuple(w.codes.shape[-1] for w in stacks), stacks[0]
    layers = []
    for i in range(len(first.codes)):
        words, scales = arranged(stacks, i, alternating)
        given = words, scales, first.FORM, inputs_of(first), first.dtype, sizes
        part = functools.partial(StreamedWeight, *given, alternating=alternating)
        layers.append(tuple(part(part=n) for n in range(len(sizes))))
    return layers


@functools.partial(jax.jit, static_argnames="alternating")
def arranged(
    stacks: Sequence[IntegerWeight], layer: int | Int[Array, ""], alternating: bool
) -> tuple[Array, Array | None]:
    """Words, and int8's scales, of a layer's matrices as one."""
    w = joined_matrix(stacks, layer, alternating)
    return to_stream(w.FORM, w.codes, w.scales), w.scales if w.FORM == "int8" else None


def inputs_of(stack: IntegerWeight) -> int:
    """Number of inputs of each of a stack's matrices, whose codes are in rows."""
    return stack.codes.shape[-2] * (2 if stack.FORM == "int4" else 1)


def may_stream(groups: Sequence[Sequence[IntegerWeight]], rows: int) -> bool:
    """Whether one kernel multiplies so many rows by all these matrices, those of a group as one."""
    every = [w for group in groups for w in group]
    first = every[0]
    if not isinstance(first, Int4Weight | Int8Weight) or {type(w) for w in every} != {type(first)}:
        return False
    if any(w.dtype != first.dtype or w.codes.ndim != 3 or w.are_fragments() for w in every):
        return False
    if first.FORM == "int4" and any(w.scales.shape[-2] * GROUP != inputs_of(w) for w in every):
        return False
    sizes = [(inputs_of(group[0]), sum(w.codes.shape[-1] for w in group)) for group in groups]
    return has_stream_kernel(rows, first.dtype, [StreamPhase(*size) for size in sizes])
