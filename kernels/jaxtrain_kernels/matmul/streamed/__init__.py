"""Products of a few rows with integer codes, each of which reads the result of the one before.

Between two attentions a decode step has four products: the output's, gate with up, down, and the
next layer's queries, keys and values. One kernel for all of them reads codes without a pause.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.few_rows.operations import InputNorm
from jaxtrain_kernels.matmul.streamed import hopper, reference
from jaxtrain_kernels.matmul.streamed.order import (
    COLUMNS,
    from_stream,
    slots_across,
    to_stream,
)
from jaxtrain_kernels.matmul.streamed.plan import StreamPhase

# The first backend that can serve the call is the default.
BACKENDS = {"hopper": hopper, "reference": reference}

__all__ = [
    "BACKENDS",
    "StreamPhase",
    "StreamedMatrix",
    "from_stream",
    "has_stream_kernel",
    "streamed_products",
    "to_stream",
]


class StreamedMatrix(NamedTuple):
    """A matrix and the operations around its product.

    inputs: of the matrix, K. codes: in the order of `to_stream`; with their scales in int4.
    scales_N: of int8. norm: of the input. activation: swiglu or geglu, of column 2 n times column
    2 n + 1. residual: the residual stream is added, and the result is the stream from then on.
    parts: columns of each result, if the last product has several.
    """

    inputs: int
    codes: Int32[Array, "P S W"]
    scales_N: Float[Array, "N"] | None
    norm: InputNorm | None = None
    activation: str | None = None
    residual: bool = False
    parts: tuple[int, ...] = ()

    @property
    def phase(self) -> StreamPhase:
        """The product's sizes, and what surrounds it."""
        N = self.codes.shape[0] * slots_across(self.inputs) * COLUMNS
        return StreamPhase(
            self.inputs, N, self.norm is not None, self.activation, self.residual, self.parts
        )


def has_stream_kernel(rows: int, dtype: DTypeLike, phases: Sequence[StreamPhase]) -> bool:
    """Whether the device has a kernel for products of so many rows in `dtype`."""
    x = jax.ShapeDtypeStruct((rows, 0), dtype)
    return hopper.supports(target(), x, phases) is None


def streamed_products(
    form: str,
    x: Float[Array, "M _"],
    stream_MD: Float[Array, "M D"],
    matrices: Sequence[StreamedMatrix],
    *,
    implementation: str | None = None,
) -> list[Float[Array, "M _"]]:
    """Results of consecutive products, in x's dtype; x's first columns are the first one's input. A
    matrix with `parts` has several.

    Rounded after each product and each sum, as the products are one by one. form: int4 or int8.
    Raises ValueError for norms with different eps or an unknown implementation,
    NotImplementedError for one that cannot serve.
    """
    phases = tuple(m.phase for m in matrices)
    norms = [m.norm for m in matrices if m.norm is not None]
    if len({norm.eps for norm in norms}) > 1:
        raise ValueError("the norms of streamed products have one eps")
    reasons = {name: one.supports(target(), x, phases) for name, one in BACKENDS.items()}
    signature = f"{form} {x.dtype}{list(x.shape)} {[(p.K, p.N) for p in phases]}"
    name = choose_backend("streamed_products", reasons, implementation, signature)
    arrays = [(m.codes, m.scales_N, m.norm.gain_K if m.norm else None) for m in matrices]
    eps = norms[0].eps if norms else 0.0
    run = BACKENDS[name].streamed_products
    return run(form, x, stream_MD, phases, arrays, eps)
