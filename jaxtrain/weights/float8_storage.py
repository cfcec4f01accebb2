"""Storage in float8 e4m3, one scale per column (Micikevicius et al. 2022, arXiv:2209.05433).

This is a storage format; `float8.py` has the float8 matmuls of training.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.weights.quantized import QuantizedWeight

LARGEST = 448.0  # of e4m3


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["dtype"]
)
@dataclasses.dataclass(frozen=True)
class StoredFloat8Weight(QuantizedWeight):
    """codes float8_e4m3fn [.., K, N], scales float32 [.., N]: a column's largest code is 448."""

    ALONG: ClassVar[Mapping[str, str]] = {"codes": "KN", "scales": "N"}
    codes: Any
    scales: Any

    def dequantize(self) -> Float[Array, "*E K N"]:
        codes = self.codes.astype(jnp.float32)
        return (codes * jnp.expand_dims(self.scales, -2)).astype(self.dtype)


def quantize_e4m3(w_KN: Float[Array, "K N"]) -> StoredFloat8Weight:
    """Quantize one matrix, with one scale per column."""
    w_KN, dtype = w_KN.astype(jnp.float32), w_KN.dtype.name
    scales = jnp.max(jnp.abs(w_KN), axis=0) / LARGEST
    scaled = w_KN / jnp.where(scales > 0, scales, 1.0)[None]
    codes = jnp.clip(scaled, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return StoredFloat8Weight(codes, scales, dtype=dtype)
