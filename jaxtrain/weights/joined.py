"""Integer codes of matrices that read the same input, joined to one matrix for a decode step.

Queries, keys and values are one product, and so are a gate and up, whose columns alternate: a
program then has both products of a hidden unit, and multiplies them. A layer has fewer kernels, and
they read their codes at a higher rate.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtrain_kernels.matmul.few_rows import GATED, Operations, composed
from jaxtrain_kernels.matmul.integers import columns_by_size, joined_integer_matmul, to_fragments
from jaxtyping import Array, Float, Int

from jaxtrain.weights.contract import Weight
from jaxtrain.weights.int4 import Int4Weight
from jaxtrain.weights.quantized import Int8Weight, IntegerWeight


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["matrix"],
    meta_fields=["sizes", "part", "alternating"],
)
@dataclasses.dataclass(frozen=True)
class JoinedWeight(Weight):
    """A part of the columns of a joined matrix. Every part holds the whole, as the same arrays.

    sizes: columns of each part. part: index of this one. alternating: column i of part p is column
    i * len(sizes) + p of the matrix; else a part's columns are together.
    """

    matrix: Any
    sizes: tuple[int, ...]
    part: int
    alternating: bool

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        return self.parts_of(self.matrix.matmul(x))[self.part]

    def matmul_each(
        self, x: Float[Array, "*B K"], others: Sequence[Array | Weight]
    ) -> tuple[Float[Array, "*B _"], ...] | None:
        if (order := self.order(others)) is None:
            return None
        parts = self.parts_of(self.matrix.matmul(x))
        return tuple(parts[i] for i in order)

    def takes_operations(
        self, rows: int, dtype: jnp.dtype, others: Sequence[Array | Weight]
    ) -> bool:
        whole = self.order(others) == list(range(len(self.sizes)))
        return whole and self.matrix.takes_operations(rows, dtype, ())

    def matmul_fused(
        self,
        x_MK: Float[Array, "M K"],
        others: Sequence[Array | Weight],
        operations: Operations,
    ) -> tuple[Float[Array, "M _"], ...]:
        if operations.biases is None and self.alternating and operations.activation in GATED:
            return (self.matrix.product(x_MK, operations),)
        norm, m = Operations(operations.norm), self.matrix
        if self.alternating:
            parts = self.parts_of(m.product(x_MK, norm))
        else:
            arrays = m.codes, m.scales
            parts = joined_integer_matmul(m.FORM, x_MK, *arrays, self.sizes, operations=norm)
        return composed(lambda *_: parts, x_MK, operations=operations._replace(norm=None))

    def dequantize(self) -> Float[Array, "K N"]:
        return self.parts_of(self.matrix.dequantize())[self.part]

    def order(self, others: Sequence[Array | Weight]) -> list[int] | None:
        """Indices of this part and the others, if they are all parts of one matrix, else None."""
        parts = [self, *(w for w in others if isinstance(w, JoinedWeight))]
        order = [w.part for w in parts]
        same = len(order) == 1 + len(others) and {w.sizes for w in parts} == {self.sizes}
        return order if same and sorted(order) == list(range(len(self.sizes))) else None

    def parts_of(self, y: Float[Array, "*B N"]) -> tuple[Float[Array, "*B _"], ...]:
        return columns_of_parts(y, self.sizes, self.alternating)


def columns_of_parts(
    y: Float[Array, "*B N"], sizes: tuple[int, ...], alternating: bool
) -> tuple[Float[Array, "*B _"], ...]:
    """The columns of each part of a joined matrix, from a product with it."""
    if alternating:
        return tuple(y[..., i :: len(sizes)] for i in range(len(sizes)))
    return tuple(columns_by_size(y, sizes))


def may_join(stacks: Sequence[IntegerWeight], alternating: bool) -> bool:
    """Whether these stacks of matrices can be one: the same form and groups, and as many columns if
    they alternate."""
    kinds = {(type(w), w.dtype, w.codes.shape[:-1], w.scales.shape[:-1]) for w in stacks}
    columns = {w.codes.shape[-1] for w in stacks}
    known = isinstance(stacks[0], Int4Weight | Int8Weight)
    return known and len(kinds) == 1 and (len(columns) == 1 or not alternating)


def joined_layers(
    stacks: Sequence[IntegerWeight], alternating: bool
) -> list[tuple[JoinedWeight, ...]]:
    """The parts of each layer's joined matrix, whose codes are in fragments."""
    sizes = tuple(w.codes.shape[-1] for w in stacks)
    matrices = [fragments_of(stacks, i, alternating) for i in range(len(stacks[0].codes))]
    return [
        tuple(JoinedWeight(matrix, sizes, part, alternating) for part in range(len(sizes)))
        for matrix in matrices
    ]


@functools.partial(jax.jit, static_argnames="alternating")
def fragments_of(
    stacks: Sequence[IntegerWeight], layer: int | Int[Array, ""], alternating: bool = False
) -> IntegerWeight:
    """The matrices of a layer of these stacks as one, its codes in fragments."""
    matrix = joined_matrix(stacks, layer, alternating)
    return dataclasses.replace(matrix, codes=to_fragments(matrix.codes))


def joined_matrix(
    stacks: Sequence[IntegerWeight], layer: int | Int[Array, ""], alternating: bool
) -> IntegerWeight:
    """The matrices of a layer of these stacks as one."""

    def join(*stacked: Array) -> Array:
        arrays = [array[layer] for array in stacked]
        if alternating:
            return jnp.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)
        return jnp.concatenate(arrays, axis=-1)

    return jax.tree.map(join, *stacks)
