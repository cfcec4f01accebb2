"""FlashAttention 4 (Zadouri et al. 2026), through the package fa4-jax: Ampere and newer.

Packed documents run as sequences of different lengths (FlashAttention's varlen interface), so that
no block between two documents is visited. The package is imported by the first call.
"""

import importlib
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxtrain_kernels.attention.call import Call
from jaxtrain_kernels.dispatch import Target

INSTALL = "pip install 'fa4-jax[cu13]'"
KERNELS = "cute"  # of the package's two implementations; the other is plain JAX, "reference"
GENERATIONS = (8, 9, 10, 12)  # major compute capabilities: Ampere and Ada, Hopper, Blackwell
MEAN_LENGTH = 64  # tokens of a document, on average over the batch, for which there are sequences


def supports(target: Target, q_BTNH, call: Call) -> str | None:
    H, cc = q_BTNH.shape[-1], target.compute_capability
    if target.platform != "cuda":
        return f"needs an NVIDIA GPU, this is {target.platform}"
    if cc is None or cc[0] not in GENERATIONS:
        return f"needs compute capability 8, 9, 10 or 12 (Ampere to Blackwell), this is {cc}"
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {q_BTNH.dtype}"
    largest = 128 if cc[0] == 10 else 256
    if H % 8 or largest < H:
        return f"needs a head dim that is a multiple of 8, at most {largest}, got {H}"
    if call.softcap is not None:
        return "has no softcap"
    if call.key_segment_ids_BS is not None:
        return "takes one array of segment ids for queries and keys"
    if call.return_lse:
        return "does not differentiate its LSE"
    if call.deterministic:
        return "sums its gradients in any order"
    if isinstance(call.scale, Tracer):
        return "needs a scale that is known when it is compiled"
    try:
        version = importlib.metadata.version("fa4-jax")
    except importlib.metadata.PackageNotFoundError:
        return f"needs fa4-jax 0.1: {INSTALL}"
    if not version.startswith("0.1."):
        return f"needs fa4-jax 0.1, this is {version}: {INSTALL}"
    return None


def attention(q_BTNH, k_BSKH, v_BSKH, call: Call):
    """Backend of the public function, without LSE: returns (out_BTNH, None).

    tiling: {"sequences": S}, the largest number of documents and paddings in the whole batch;
    default `default_sequences`. If there are more, all outputs are NaN.
    """
    package: Any = importlib.import_module("fa4_jax")
    options: dict[str, Any] = {"causal": call.causal, "scale": call.scale, "backend": KERNELS}
    if call.window is not None:
        options["window_size"] = (call.window, 0)
    if call.segment_ids_BT is None:
        return package.flash_attn(q_BTNH, k_BSKH, v_BSKH, **options), None
    B, T = q_BTNH.shape[:2]
    count = (call.tiling or {}).get("sequences", default_sequences(B, T))
    offsets_S, fits = sequence_offsets(call.segment_ids_BT, count)
    # Values of 0 at padding make its outputs 0, and so the gradients of its queries and keys.
    real_BT11 = (call.segment_ids_BT != 0)[..., None, None]
    v_BSKH = jnp.where(real_BT11, v_BSKH, 0) + jnp.where(fits, 0, jnp.nan).astype(v_BSKH.dtype)
    packed = (x.reshape(B * T, *x.shape[2:]) for x in (q_BTNH, k_BSKH, v_BSKH))
    out = package.flash_attn_varlen(*packed, offsets_S, offsets_S, **options)
    return out.reshape(q_BTNH.shape), None


def default_sequences(B: int, T: int) -> int:
    """Number of sequences: documents of MEAN_LENGTH tokens, and a padding in each row."""
    return B + -(-B * T // MEAN_LENGTH)


def sequence_offsets(segment_ids_BT: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """(offsets [count + 1] of the runs of equal ids in the concatenated rows, whether all fit).

    int32; the sequences that are left over have length 0, at the end. If there are more than
    `count` runs, the last sequence holds the rest.
    """
    B, T = segment_ids_BT.shape
    first_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    first_BT = jnp.pad(first_BT, ((0, 0), (1, 0)), constant_values=True)
    ordinal_t = jnp.cumsum(first_BT.reshape(-1), dtype=jnp.int32)
    # A comparison of all pairs is one fused reduction; a binary search would be a loop.
    starts_S = jnp.searchsorted(ordinal_t, jnp.arange(1, count + 1), method="compare_all")
    offsets_S = jnp.append(starts_S, B * T).astype(jnp.int32)
    return offsets_S, ordinal_t[-1] <= count
