"""XLA's matmul on any device, then a separate kernel for the cast."""

from jaxtrain_kernels.dispatch import Target, choose_backend, target
from jaxtrain_kernels.matmul import fp8


def supports(target: Target, options, *arrays) -> str | None:
    return fp8.fp8_unsupported(target)


def product_quantized(options, operands, scale, multiplier):
    """Backend like `reference`."""
    a_MK, b_NK, *others = operands
    product_MN = fp8.fp8_product(a_MK, b_NK, scale, options.product_dtype, options.exact)
    arrays = (product_MN, *others)
    reasons = {name: b.supports(target(), *arrays) for name, b in fp8.BACKENDS.items()}
    signature = " ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
    cast = fp8.BACKENDS[choose_backend("fp8_quantize", reasons, None, signature)]
    quantized = cast.cast_measured(arrays, multiplier, options.dtype, options.function)
    return *quantized, product_MN if options.keep else None
