"""Operations around a product with integer codes: the norm of its input, and what follows it.

A gated activation (SwiGLU, GeGLU) reads the products of two matrices, gate and up. Here they are
one matrix whose columns alternate: column 2 n is the gate's column n, column 2 n + 1 that of up.
"""

import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain_kernels.matmul.few_rows.operations import GATED, Operations, composed


def with_operations(
    matmul: Callable[..., Array],
    x_MK: Float[Array, "M K"],
    arrays: Sequence[Array],
    operations: Operations,
) -> Float[Array, "M _"]:
    """`matmul` of x and the arrays of one matrix, with the operations around it one by one."""
    gated = operations.activation in GATED

    def products(x_MK: Array) -> tuple[Array, ...]:
        y_MN = matmul(x_MK, *arrays)
        return (y_MN[:, ::2], y_MN[:, 1::2]) if gated else (y_MN,)

    return composed(products, x_MK, operations=operations)[0]


def columns_by_size(y: Float[Array, "*B N"], sizes: Sequence[int]) -> list[Float[Array, "*B _"]]:
    """The columns of several matrices that are one."""
    return jnp.split(y, list(itertools.accumulate(sizes))[:-1], axis=-1)
