"""Weight-only int8 and int4 matmuls (w8a16, w4a16): integer codes with scales.

A decode step spends its time reading the codes. `reduce` serves one row: XLA multiplies and sums in
one pass, without a dequantized matrix in memory. `dot` is a matmul. XLA dequantizes the matrix for
it, which the many rows of a prompt pay for.
"""

from typing import Any

from jaxtyping import Array, Float, Int, Integer

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.integers import dot, reduce, reference

# Fastest first: the first that can serve is the default.
BACKENDS = {"reduce": reduce, "dot": dot, "reference": reference}


def w8a16_matmul(
    x: Float[Array, "*B K"],
    codes_KN: Int[Array, "K N"],
    scales_N: Float[Array, "N"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*B N"]:
    """x times codes x scales, in x's dtype; a scale a column. Accumulated in float32.

    Each value is rounded to x's dtype first, as training with fake quantization rounds it. Raises
    ValueError for an unknown implementation, NotImplementedError for one that cannot serve.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    backend = _backend("w8a16_matmul", x_MK, codes_KN, implementation)
    return backend.w8a16_matmul(x_MK, codes_KN, scales_N).reshape(*x.shape[:-1], -1)


def w4a16_matmul(
    x: Float[Array, "*B K"],
    codes_HN: Integer[Array, "H N"],
    scales_GN: Float[Array, "G N"],
    offsets_GN: Float[Array, "G N"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "*B N"]:
    """x times ((codes - 8) x scales + offsets), in x's dtype; a scale a column and K / G inputs.

    codes_HN: uint8, H = K / 2; the low half of a byte is the even input's.
    offsets_GN: float32, in units of the matrix; they multiply the sums of a group's inputs, in
    float32, and are not rounded. None: zeros.
    Raises as `w8a16_matmul`.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    backend = _backend("w4a16_matmul", x_MK, codes_HN, implementation)
    y_MN = backend.w4a16_matmul(x_MK, codes_HN, scales_GN, offsets_GN)
    return y_MN.reshape(*x.shape[:-1], -1)


def _backend(op: str, x_MK: Any, codes: Any, implementation: str | None) -> Any:
    reasons = {name: backend.supports(target(), x_MK) for name, backend in BACKENDS.items()}
    signature = f"{x_MK.dtype}{list(x_MK.shape)} codes={codes.dtype}{list(codes.shape)}"
    return BACKENDS[choose_backend(op, reasons, implementation, signature)]
