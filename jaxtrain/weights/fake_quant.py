"""Fake quantization (QAT): each forward pass rounds matrices as `jaxtrain quantize` stores them.

Jacob et al. 2018 (arXiv:1712.05877), LLM-QAT (arXiv:2305.17888): the values in the matmul are bit
for bit those of the dequantized stored form, in the compute dtype. The gradient passes through the
rounding (straight-through estimator, Bengio et al. 2013), so the stored weights train in full
precision. Inputs of a matrix may be rounded as well, with one scale per token.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
from jaxtyping import Array, Float

from jaxtrain.weights.contract import Weight
from jaxtrain.weights.int4 import GROUP, int4_codes, int4_scales, int4_values
from jaxtrain.weights.quantized import int8_codes, int8_values

FIELD = "model.weight_form.group_size"
Activations = Literal["int8"] | None


@jax.custom_jvp
def straight_through(x: Float[Array, "*B"], rounded: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Return `rounded`; its gradient goes to x unchanged."""
    return rounded


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Int8ActivationsWeight(Weight):
    """A rounded matrix whose inputs are rounded to int8, with one scale per token (absmax)."""

    w: Any

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        rounded = int8_values(*int8_codes(jax.lax.stop_gradient(x), -1), -1).astype(x.dtype)
        return straight_through(x, rounded) @ self.w

    def dequantize(self) -> Float[Array, "K N"]:
        return self.w


def int8(w: Float[Array, "*L K N"], *, activations: Activations = None) -> Array | Weight:
    """w rounded as `quantize_int8` stores it."""
    rounded = int8_values(*int8_codes(jax.lax.stop_gradient(w)))
    return with_activations(straight_through(w, rounded.astype(w.dtype)), activations)


def int4(
    w: Float[Array, "*L K N"], *, group_size: int = GROUP, activations: Activations = None
) -> Array | Weight:
    """w rounded as `quantize_int4` stores it. Raises UserError if groups do not divide K."""
    fixed = jax.lax.stop_gradient(w)
    scales = int4_scales(fixed, group_size, FIELD)
    rounded = int4_values(int4_codes(fixed, scales), scales)
    return with_activations(straight_through(w, rounded.astype(w.dtype)), activations)


def with_activations(w: Float[Array, "*L K N"], activations: Activations) -> Array | Weight:
    """The matrix, which also rounds its inputs if `activations` is set."""
    return w if activations is None else Int8ActivationsWeight(w)
