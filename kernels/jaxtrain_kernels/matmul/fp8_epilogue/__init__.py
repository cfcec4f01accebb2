"""Float8 matmul whose epilogue casts the result to float8, in both layouts.

With delayed scaling the scale is known before the matmul. So its epilogue can apply a function (the
squared ReLU, or its gradient), round, and write both layouts: the result is never read again in 16
bits. Values equal those of `fp8_product` and a cast after it: they are rounded to 16 bits first.
"""

from typing import NamedTuple

from jaxtyping import Array, DTypeLike, Float

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.fp8 import Fp8, given_scale, known_amax
from jaxtrain_kernels.matmul.fp8.functions import Function
from jaxtrain_kernels.matmul.fp8_epilogue import hopper, reference, xla

# The first that can serve is the default. `mosaic` only by name, until it is timed on a GPU.
BACKENDS = {"xla": xla, "mosaic": hopper, "reference": reference}


class QuantizedProduct(NamedTuple):
    """fp8: function(product) in both layouts. seen: amaxes of its parts, in any shape. product_MN:
    the matmul's result before the function, if requested.
    """

    fp8: Fp8
    seen: Array
    product_MN: Array | None


def fp8_product_quantized(
    a_MK: Float[Array, "M K"],
    b_NK: Float[Array, "N K"],
    scale: Float[Array, ""],
    function: Function,
    dtype: DTypeLike,
    amax: Float[Array, "*P"],
    *,
    product_dtype: DTypeLike,
    other_MN: Float[Array, "M N"] | None = None,
    keep: bool = False,
    exact: bool = False,
    implementation: str | None = None,
) -> QuantizedProduct:
    """function(a b^T scale), or function(a b^T scale, other), in float8.

    a, b: in float8. scale: a power of two. function: of `fp8.functions`. amax: amax of earlier
    steps, to scale by (in slots: `fp8.amax_in_slots`); larger values saturate, and 0 means a scale
    of 1. product_dtype: dtype that
    the product is rounded to. keep: return the product as well. exact: accumulate in float32, as in
    `fp8_product`. Raises NotImplementedError where a named backend cannot serve.
    """
    operands = (a_MK, b_NK) if other_MN is None else (a_MK, b_NK, other_MN)
    options = reference.ProductOptions(function, dtype, product_dtype, keep, exact)
    backend = BACKENDS[_choose(implementation, options, *operands)]
    cast_scale = given_scale(known_amax(amax), dtype)
    q_MN, q_NM, seen, product_MN = backend.product_quantized(
        options, operands, scale, 1 / cast_scale
    )
    return QuantizedProduct(Fp8(q_MN, q_NM, cast_scale), seen, product_MN)


def _choose(implementation: str | None, options: reference.ProductOptions, *arrays: Array) -> str:
    reasons = {name: b.supports(target(), options, *arrays) for name, b in BACKENDS.items()}
    signature = " ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
    return choose_backend("fp8_product_quantized", reasons, implementation, signature)
