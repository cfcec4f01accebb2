"""Matrices stored transposed, [N, K]: a decode step of a few rows streams whole rows of them.

A kernel that multiplies a few rows by [K, N] reads a part of each row, which is narrow if every
multiprocessor has columns of its own. Rows of [N, K] are read as a whole, whatever their number.
cuBLAS multiplies many rows by either at the same rate.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtrain_kernels.matmul.few_rows import few_rows_matmul
from jaxtyping import Array, Float

from jaxtrain.weights.contract import Weight, has_few_rows


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w_NK"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TransposedWeight(Weight):
    """A matrix [K, N], or a stack of them, as the array [.., N, K]."""

    w_NK: Float[Array, "*L N K"]

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        if has_few_rows(x):
            return few_rows_matmul(x, self.w_NK, transposed=True)[0]
        return x @ self.w_NK.T

    def transposed(self) -> Float[Array, "N K"]:
        return self.w_NK

    def dequantize(self) -> Float[Array, "*L K N"]:
        return jnp.swapaxes(self.w_NK, -1, -2)
