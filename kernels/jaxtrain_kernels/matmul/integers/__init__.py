"""Weight-only int8 and int4 matmuls (w8a16, w4a16): integer codes with scales.

A decode step spends its time reading the codes. `triton` reads each byte once; it is the default
for up to 32 rows, where the mesh has one device, and reads at the highest rate for up to 8 rows and
codes in the order of `to_fragments`. `reduce` serves one row: XLA multiplies and sums
in one pass, without a dequantized matrix in memory. `dot` is a matmul for which XLA dequantizes the
matrix; the many rows of a prompt amortize that.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Integer

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.integers import dot, reduce, reference, triton
from jaxtrain_kernels.matmul.integers.fragment_order import (
    COLUMNS,
    ROWS,
    from_fragments,
    to_fragments,
)

__all__ = ["from_fragments", "serves_fragments", "to_fragments", "w4a16_matmul", "w8a16_matmul"]

OPS = {"int4": "w4a16_matmul", "int8": "w8a16_matmul"}
# Fastest first: the first that can serve is the default.
BACKENDS = {"triton": triton, "reduce": reduce, "dot": dot, "reference": reference}


def w8a16_matmul(
    x: Float[Array, "*B K"],
    codes: Int[Array, "..."],
    scales_N: Float[Array, "*L N"],
    *,
    layer: int | Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B N"]:
    """x @ (codes x scales) in x's dtype, with one scale per column; accumulated in float32.

    codes: int8 [*L, K, N], or int32 in fragments (`to_fragments`).
    layer: index in a stack, which `triton` reads in place where a slice would be a copy.
    Each dequantized value is rounded to x's dtype first, as in training with fake quantization;
    `dot` in float32 and `triton` instead multiply by the scales after the sum. Raises ValueError
    for an unknown implementation, NotImplementedError for one that cannot serve.
    """
    return _matmul("int8", x, (codes, scales_N), layer, implementation)


def w4a16_matmul(
    x: Float[Array, "*B K"],
    codes: Integer[Array, "..."],
    scales_GN: Float[Array, "*L G N"],
    offsets_GN: Float[Array, "*L G N"] | None = None,
    *,
    layer: int | Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B N"]:
    """x @ ((codes - 8) x scales + offsets) in x's dtype; a scale per column and K / G inputs.

    codes: uint8 [*L, K / 2, N], the low half of a byte is the even input's code; or these bytes in
    fragments, int32.
    offsets_GN: float32, in units of the weights; they multiply the sum of a group's inputs in
    float32 and are not rounded. None: zeros.
    layer and errors as in `w8a16_matmul`. Each value is rounded to x's dtype first, except by
    `triton` with codes in fragments, which multiplies by the scales after the sum.
    """
    arrays = (codes, scales_GN) if offsets_GN is None else (codes, scales_GN, offsets_GN)
    return _matmul("int4", x, arrays, layer, implementation)


def serves_fragments(form: str, rows: int, dtype: DTypeLike, codes: Array, scales: Array) -> bool:
    """Whether the device has a kernel for products of so many rows in `dtype` with codes [.., R, N]
    that `to_fragments` has put in order. form: int4 or int8."""
    *L, R, N = codes.shape
    if R % ROWS or N % COLUMNS:
        return False
    shape = jax.ShapeDtypeStruct
    x_MK = shape((rows, R if form == "int8" else 2 * R), dtype)
    arranged = shape((*L, N // COLUMNS, R // ROWS, ROWS * COLUMNS // 4), jnp.int32)
    return triton.supports(target(), form, x_MK, arranged, scales) is None


def _matmul(
    form: str,
    x: Float[Array, "*B K"],
    arrays: tuple[Array, ...],
    layer: int | Int[Array, ""] | None,
    implementation: str | None,
) -> Float[Array, "*B N"]:
    """Call a backend. arrays: codes, scales, and offsets if there are any."""
    x_MK, (codes, scales, *_) = x.reshape(-1, x.shape[-1]), arrays
    device = target()
    reasons = {
        name: module.supports(device, form, x_MK, codes, scales)
        for name, module in BACKENDS.items()
    }
    op = OPS[form]
    signature = f"{x_MK.dtype}{list(x_MK.shape)} codes={codes.dtype}{list(codes.shape)}"
    backend = BACKENDS[choose_backend(op, reasons, implementation, signature)]
    if backend is triton:
        out_MN = getattr(triton, op)(x_MK, *arrays, layer=layer)
    else:
        codes, *others = arrays if layer is None else [array[layer] for array in arrays]
        if codes.dtype == jnp.int32:
            codes = from_fragments(codes, form)
        out_MN = getattr(backend, op)(x_MK, codes, *others)
    return out_MN.reshape(*x.shape[:-1], -1)
