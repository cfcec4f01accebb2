"""Kernels of jaxtrain: functions of arrays, each with a plain jnp reference and fast backends.

Imports only jax, numpy and jaxtyping. The contract is in `kernels/README.md`.
"""

from jaxtrain_kernels.attention import Quantized, attention, decode_attention, quantize
from jaxtrain_kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_per_token

__all__ = [
    "Quantized",
    "attention",
    "decode_attention",
    "linear_cross_entropy",
    "linear_cross_entropy_per_token",
    "quantize",
]
