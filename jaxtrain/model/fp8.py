"""Linear layers in float8: which matrices, their copies made once a step, and the product.

A training step puts `Fp8Weight` in the place of the matrices that it computes in float8; who
evaluates or generates passes the plain arrays, and `dense` multiplies those as they are.
"""

from typing import Any, NamedTuple

import jax
import jaxtrain_kernels as kernels
from flax import nnx
from jaxtyping import Array, Float

from jaxtrain.model.adapted import Adapted, adapted_dense
from jaxtrain.model.packed import product
from jaxtrain.model.params import ParamSpec
from jaxtrain.settings import UserError

# Smaller products take longer to quantise than they save (nanochat's bound); and cuBLASLt's
# float8 needs multiples of 16.
SMALLEST, MULTIPLE = 128, 16


class Fp8Weight(NamedTuple):
    """A matrix, or a stack of them: the array that receives the gradient, and its float8 copy."""

    w_KN: Array
    fp8: kernels.Fp8


def dense(x: Float[Array, "*B K"], weight: nnx.Param) -> Float[Array, "*B N"]:
    """x w; in float8, unpacked, or with a change beside it where the step has given w so."""
    w = weight.get_value()
    if isinstance(w, Adapted):
        return adapted_dense(x, w)
    if not isinstance(w, Fp8Weight):
        return product(x, w)
    y_MN = kernels.fp8_matmul(x.reshape(-1, x.shape[-1]), w.w_KN, w_fp8=w.fp8)
    return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])


def in_fp8(spec: ParamSpec) -> bool:
    """Whether float8 pays for this parameter: the large matrices of the blocks."""
    sides = spec.shape[-2:]
    large = min(sides, default=0) >= SMALLEST and not any(side % MULTIPLE for side in sides)
    return spec.role == spec.group == "matrix" and large  # not routers, not experts


def fp8_weights(params: Any, specs: Any) -> Any:
    """Float8 copies of the matrices, each layer with its own scale; None where there is none.

    Raises UserError on a device without float8, as `check_fp8` does.
    """
    check_fp8()
    quantize = lambda p, s: jax.vmap(kernels.fp8_quantize)(p) if in_fp8(s) else None
    return jax.tree.map(quantize, params, specs)


def with_fp8(params: Any, copies: Any) -> Any:
    """The parameters with Fp8Weight in place of those that have a copy."""
    return jax.tree.map(lambda p, q: p if q is None else Fp8Weight(p, q), params, copies)


def check_fp8() -> None:
    """Raise UserError if the device has no float8 matmuls."""
    if reason := kernels.fp8_unsupported():
        raise UserError(f"model.fp8: {reason}; leave it out to train in 16 bits")
