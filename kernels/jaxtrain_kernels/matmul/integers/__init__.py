"""Weight-only int8 and int4 matmuls (w8a16, w4a16): integer codes with scales.

A decode step spends its time reading the codes. `triton` reads each byte once; it is the default
for up to 32 rows, where the mesh has one device. `reduce` serves one row: XLA multiplies and sums
in one pass, without a dequantized matrix in memory. `dot` is a matmul for which XLA dequantizes the
matrix; the many rows of a prompt amortize that.
"""

from jaxtyping import Array, Float, Int, Integer

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.integers import dot, reduce, reference, triton

# Fastest first: the first that can serve is the default.
BACKENDS = {"triton": triton, "reduce": reduce, "dot": dot, "reference": reference}


def w8a16_matmul(
    x: Float[Array, "*B K"],
    codes_KN: Int[Array, "*L K N"],
    scales_N: Float[Array, "*L N"],
    *,
    layer: int | Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B N"]:
    """x @ (codes x scales) in x's dtype, with one scale per column; accumulated in float32.

    layer: index in a stack [L, K, N], which `triton` reads in place where a slice would be a copy.
    Each dequantized value is rounded to x's dtype first, as in training with fake quantization;
    `dot` in float32 and `triton` instead multiply by the scales after the sum. Raises ValueError
    for an unknown implementation, NotImplementedError for one that cannot serve.
    """
    return _matmul("w8a16_matmul", x, (codes_KN, scales_N), layer, implementation)


def w4a16_matmul(
    x: Float[Array, "*B K"],
    codes_HN: Integer[Array, "*L H N"],
    scales_GN: Float[Array, "*L G N"],
    offsets_GN: Float[Array, "*L G N"] | None = None,
    *,
    layer: int | Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B N"]:
    """x @ ((codes - 8) x scales + offsets) in x's dtype; a scale per column and K / G inputs.

    codes_HN: uint8, H = K / 2; the low half of a byte is the even input's code.
    offsets_GN: float32, in units of the weights; they multiply the sum of a group's inputs in
    float32 and are not rounded. None: zeros.
    layer and errors as in `w8a16_matmul`. Each value is rounded to x's dtype first, except by
    `triton` for up to 8 rows, which multiplies by the scales after the sum.
    """
    arrays = (codes_HN, scales_GN) if offsets_GN is None else (codes_HN, scales_GN, offsets_GN)
    return _matmul("w4a16_matmul", x, arrays, layer, implementation)


def _matmul(
    op: str,
    x: Float[Array, "*B K"],
    arrays: tuple[Array, ...],
    layer: int | Int[Array, ""] | None,
    implementation: str | None,
) -> Float[Array, "*B N"]:
    """Call a backend. arrays: codes, scales, and offsets if there are any."""
    x_MK, (codes, scales, *_) = x.reshape(-1, x.shape[-1]), arrays
    device = target()
    reasons = {
        name: module.supports(device, x_MK, codes, scales) for name, module in BACKENDS.items()
    }
    signature = f"{x_MK.dtype}{list(x_MK.shape)} codes={codes.dtype}{list(codes.shape)}"
    backend = BACKENDS[choose_backend(op, reasons, implementation, signature)]
    if backend is triton:
        out_MN = getattr(triton, op)(x_MK, *arrays, layer=layer)
    else:
        matrix = arrays if layer is None else [array[layer] for array in arrays]
        out_MN = getattr(backend, op)(x_MK, *matrix)
    return out_MN.reshape(*x.shape[:-1], -1)
