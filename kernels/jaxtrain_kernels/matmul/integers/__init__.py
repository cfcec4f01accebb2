"""Weight-only int8 and int4 matmuls (w8a16, w4a16): integer codes with scales.

A decode step spends its time reading the codes. `triton` reads each byte once; it is the default
for up to 32 rows, where the mesh has one device, and reads at the highest rate for up to 8 rows and
codes in the order of `to_fragments`. `reduce` serves one row: XLA multiplies and sums
in one pass, without a dequantized matrix in memory. `dot` is a matmul for which XLA dequantizes the
matrix; the many rows of a prompt amortize that.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Integer

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.few_rows.operations import NOTHING, Operations
from jaxtrain_kernels.matmul.integers import dot, reduce, reference, triton
from jaxtrain_kernels.matmul.integers.around import columns_by_size, with_operations
from jaxtrain_kernels.matmul.integers.fragment_order import (
    COLUMNS,
    ROWS,
    WORDS,
    from_fragments,
    to_fragments,
)

__all__ = [
    "columns_by_size",
    "from_fragments",
    "joined_integer_matmul",
    "serves_fragments",
    "to_fragments",
    "w4a16_matmul",
    "w8a16_matmul",
]

OPS = {"int4": "w4a16_matmul", "int8": "w8a16_matmul"}
# Fastest first: the first that can serve is the default.
BACKENDS = {"triton": triton, "reduce": reduce, "dot": dot, "reference": reference}


def w8a16_matmul(
    x: Float[Array, "*B K"],
    codes: Int[Array, "..."],
    scales_N: Float[Array, "*L N"],
    *,
    layer: int | Int[Array, ""] | None = None,
    operations: Operations = NOTHING,
    implementation: str | None = None,
) -> Float[Array, "*B _"]:
    """x @ (codes x scales) in x's dtype, with one scale per column; accumulated in float32.

    codes: int8 [*L, K, N], or int32 in fragments (`to_fragments`).
    layer: index in a stack, which `triton` reads in place where a slice would be a copy.
    operations: computed by the kernel of codes in fragments, else one by one; no biases. A
    gated activation needs a matrix whose columns alternate, gate and up, and returns N / 2 columns.
    Each dequantized value is rounded to x's dtype first, as in training with fake quantization;
    `dot` in float32 and `triton` instead multiply by the scales after the sum. Raises ValueError
    for an unknown implementation, NotImplementedError for one that cannot serve.
    """
    return _matmul("int8", x, (codes, scales_N), layer, operations, None, implementation)[0]


def w4a16_matmul(
    x: Float[Array, "*B K"],
    codes: Integer[Array, "..."],
    scales_GN: Float[Array, "*L G N"],
    offsets_GN: Float[Array, "*L G N"] | None = None,
    *,
    layer: int | Int[Array, ""] | None = None,
    operations: Operations = NOTHING,
    implementation: str | None = None,
) -> Float[Array, "*B _"]:
    """x @ ((codes - 8) x scales + offsets) in x's dtype; a scale per column and K / G inputs.

    codes: uint8 [*L, K / 2, N], the low half of a byte is the even input's code; or these bytes in
    fragments, int32.
    offsets_GN: float32, in units of the weights; they multiply the sum of a group's inputs in
    float32 and are not rounded. None: zeros.
    layer, operations and errors as in `w8a16_matmul`. Each value is rounded to x's dtype first,
    except by `triton` with codes in fragments, which multiplies by the scales after the sum.
    """
    arrays = (codes, scales_GN) if offsets_GN is None else (codes, scales_GN, offsets_GN)
    return _matmul("int4", x, arrays, layer, operations, None, implementation)[0]


def joined_integer_matmul(
    form: str,
    x: Float[Array, "*B K"],
    codes: Integer[Array, "..."],
    scales: Float[Array, "..."],
    sizes: tuple[int, ...],
    *,
    operations: Operations = NOTHING,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B _"], ...]:
    """The product of `w8a16_matmul` or `w4a16_matmul`, as arrays of `sizes` columns: of several
    matrices that are one. form: int4 or int8.

    Raises ValueError for operations with biases."""
    return _matmul(form, x, (codes, scales), None, operations, sizes, implementation)


def serves_fragments(form: str, rows: int, dtype: DTypeLike, codes: Array, scales: Array) -> bool:
    """Whether the device has a kernel for products of so many rows in `dtype` with codes [.., R, N]
    that `to_fragments` has put in order, or would. form: int4 or int8."""
    arranged = codes
    if codes.dtype != jnp.int32:
        *L, R, N = codes.shape
        if R % ROWS or N % COLUMNS:
            return False
        shape = *L, N // COLUMNS, R // ROWS, WORDS
        arranged = jax.ShapeDtypeStruct(shape, jnp.int32)
    R = arranged.shape[-2] * ROWS
    x_MK = jax.ShapeDtypeStruct((rows, R if form == "int8" else 2 * R), dtype)
    return triton.supports(target(), form, x_MK, arranged, scales) is None


def _matmul(
    form: str,
    x: Float[Array, "*B K"],
    arrays: tuple[Array, ...],
    layer: int | Int[Array, ""] | None,
    operations: Operations,
    sizes: tuple[int, ...] | None,
    implementation: str | None,
) -> tuple[Float[Array, "*B _"], ...]:
    """Call a backend. arrays: codes, scales, and offsets if there are any. sizes: columns of each
    result; None: there is one."""
    x_MK, (codes, scales, *_) = x.reshape(-1, x.shape[-1]), arrays
    if operations.biases is not None:
        raise ValueError("products with integer codes take no biases")
    if operations.residual_MN is not None:
        residual_MN = operations.residual_MN.reshape(len(x_MK), -1)
        operations = operations._replace(residual_MN=residual_MN)
    device = target()
    reasons = {
        name: module.supports(device, form, x_MK, codes, scales)
        for name, module in BACKENDS.items()
    }
    op = OPS[form]
    signature = f"{x_MK.dtype}{list(x_MK.shape)} codes={codes.dtype}{list(codes.shape)}"
    backend = BACKENDS[choose_backend(op, reasons, implementation, signature)]
    run = getattr(backend, op)
    if backend is triton:
        run = functools.partial(run, layer=layer)
    else:
        arrays = arrays if layer is None else tuple(array[layer] for array in arrays)
        if codes.dtype == jnp.int32:
            arrays = from_fragments(arrays[0], form), *arrays[1:]
    if backend is triton and codes.dtype == jnp.int32:
        outs = run(x_MK, *arrays, operations=operations, sizes=sizes)
    else:
        out_MN = with_operations(run, x_MK, arrays, operations)
        outs = (out_MN,) if sizes is None else columns_by_size(out_MN, sizes)
    return tuple(out_MN.reshape(*x.shape[:-1], -1) for out_MN in outs)
