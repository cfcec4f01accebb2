"""Kernels of jaxtrain: functions of arrays, each with a plain jnp reference and fast backends.

Imports only jax, numpy and jaxtyping. The contract is in `kernels/README.md`.
"""

from jaxtrain_kernels.attention import (
    Quantized,
    Rotation,
    attention,
    attention_gradients,
    decode_attention,
    paged_append,
    paged_attention,
    quantize,
    rope_append,
    supports_rope_append,
)
from jaxtrain_kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_per_token
from jaxtrain_kernels.embedding_grad import embedding_grad
from jaxtrain_kernels.feed_forward import feed_forward_relu2
from jaxtrain_kernels.feed_forward.fp8 import fp8_feed_forward_relu2
from jaxtrain_kernels.grouped_feed_forward import grouped_feed_forward_relu2
from jaxtrain_kernels.grouped_matmul import grouped_matmul
from jaxtrain_kernels.matmul.fp8 import (
    E4M3,
    E5M2,
    Fp8,
    Fp8Input,
    fp8_input,
    fp8_matmul,
    fp8_quantize,
    fp8_quantize_delayed,
    fp8_unsupported,
)
from jaxtrain_kernels.matmul.fp8.gradients import (
    GradientCast,
    cast_gradient,
    fp8_matmul_for_cast,
)
from jaxtrain_kernels.moe_permute import (
    gather_rows,
    moe_permute,
    moe_unpermute,
    row_id_map,
    scatter_rows,
    sum_rows,
)
from jaxtrain_kernels.moe_router import PermutedRouting, moe_router, moe_router_permute
from jaxtrain_kernels.rope_attention import rope_attention

__all__ = [
    "E4M3",
    "E5M2",
    "Fp8",
    "Fp8Input",
    "GradientCast",
    "PermutedRouting",
    "Quantized",
    "Rotation",
    "attention",
    "attention_gradients",
    "cast_gradient",
    "decode_attention",
    "embedding_grad",
    "feed_forward_relu2",
    "fp8_feed_forward_relu2",
    "fp8_input",
    "fp8_matmul",
    "fp8_matmul_for_cast",
    "fp8_quantize",
    "fp8_quantize_delayed",
    "fp8_unsupported",
    "gather_rows",
    "grouped_feed_forward_relu2",
    "grouped_matmul",
    "linear_cross_entropy",
    "linear_cross_entropy_per_token",
    "moe_permute",
    "moe_router",
    "moe_router_permute",
    "moe_unpermute",
    "paged_append",
    "paged_attention",
    "quantize",
    "rope_append",
    "rope_attention",
    "row_id_map",
    "scatter_rows",
    "sum_rows",
    "supports_rope_append",
]
