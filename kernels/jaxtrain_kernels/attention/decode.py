"""Attention of one new token per sequence over a KV cache in the inputs' dtype, int8 or float8.

Reading the cache is all the cost, so nothing may copy it, convert it in memory or read it twice.
In a cache [B, S, K, H] the heads K are not an outer dim, and a matmul per head would begin with a
transposed copy. `dot` instead multiplies whole positions, K*H values, with queries that are zero
outside their own head: K times the FLOPs, in a matmul that is memory-bound anyway. `reduce`
multiplies and adds without matmuls: K times fewer FLOPs, on slower units. `triton` is a kernel that
reads each head's vectors in place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from jaxtrain_kernels.attention import reference
from jaxtrain_kernels.dispatch import choose_backend, target

# Output tiles of a matmul: about as many as a GPU has multiprocessors keep it busy.
TILE_COLUMNS, TILES, SMALLEST_SPLIT = 128, 128, 128
# Lower bound of the maxima: a query without keys has p = exp(-inf - FLOOR) = 0 instead of NaN.
FLOOR = -1e30


class Quantized(NamedTuple):
    """Keys or values in 8 bits: values * scale, with one scale per sequence, position and head."""

    values_BSKH: Shaped[Array, "B S K H"]  # int8 or float8_e4m3fn
    scale_BSK: Float[Array, "B S K"]


Cache = Float[Array, "B S K H"] | Quantized


def quantize(x_BSKH: Float[Array, "B S K H"], dtype: DTypeLike = jnp.int8) -> Quantized:
    """Round to 255 int8 levels up to the largest magnitude of each head's vector; with dtype
    float8_e4m3fn, to the nearest float8, with that magnitude at 448."""
    wide_BSKH = x_BSKH.astype(jnp.float32)
    if dtype == jnp.float8_e4m3fn:
        scale_BSK = jnp.abs(wide_BSKH).max(-1) / 448
        values = wide_BSKH / jnp.where(scale_BSK == 0, 1, scale_BSK)[..., None]
        return Quantized(jnp.clip(values, -448, 448).astype(dtype), scale_BSK)
    scale_BSK = jnp.abs(wide_BSKH).max(-1) / 127
    levels_BSKH = wide_BSKH / jnp.where(scale_BSK == 0, 1, scale_BSK)[..., None]
    return Quantized(jnp.round(levels_BSKH).astype(jnp.int8), scale_BSK)


def decode_attention(
    q_BNH: Float[Array, "B N H"],
    k_BSKH: Cache,
    v_BSKH: Cache,
    lengths_B: Int[Array, "B"],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    splits: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B N H"]:
    """Attend with one query per sequence, at position lengths_B - 1, to cached keys [0, lengths_B).

    window, softcap and scale as in `attention`. A sequence of length 0 (an idle slot) gives 0.
    Cache entries from lengths_B on are masked, but must be finite. The time of `dot` and `reduce`
    depends on S, not on lengths_B.

    splits: number of parts of S that are processed in parallel, each with its own softmax, and
    joined by their log-sum-exp (flash-decoding); for `dot` and `reduce` it must divide S. By
    default as few as keep a GPU busy. implementation: `triton`, `dot`, `reduce` (see the module)
    or `reference`, which ignores splits; None = `triton` where it can serve, else `dot`.
    """
    values = k_BSKH.values_BSKH if isinstance(k_BSKH, Quantized) else k_BSKH
    (B, N, H), (S, K) = q_BNH.shape, values.shape[1:3]
    signature = f"{q_BNH.dtype}{list(q_BNH.shape)} cache={values.dtype}{list(values.shape)}"
    names: dict[str, str | None] = dict.fromkeys(["triton", *BACKENDS, "reference"])
    names["triton"] = paged_triton().supports(target(), q_BNH[:, None], values)
    name = choose_backend("decode_attention", names, implementation, signature)
    scale = H**-0.5 if scale is None else scale
    if name == "reference":
        k, v = _dequantized(k_BSKH), _dequantized(v_BSKH)
        return reference.decode_attention(
            q_BNH, k, v, lengths_B, window=window, softcap=softcap, scale=scale
        )
    if name == "triton":
        return paged_triton().decode_attention(
            q_BNH, k_BSKH, v_BSKH, lengths_B, window=window, softcap=softcap, scale=scale,
            splits=splits,
        )  # fmt: skip
    P = _default_splits(B, S, K * H) if splits is None else splits
    if S % P:
        raise ValueError(f"splits must divide the cache's length {S}, got {splits}")
    split = lambda x: jax.tree.map(lambda a: a.reshape(B, P, S // P, *a.shape[2:]), x)
    # From here on s indexes the keys within a split. Scores are [B, P, K, G, s].
    scores, weighted_sum = BACKENDS[name]
    q_BKGH = q_BNH.reshape(B, K, N // K, H)
    s_BPKGs = scores(q_BKGH, split(k_BSKH)) * scale
    if softcap is not None:
        s_BPKGs = softcap * jnp.tanh(s_BPKGs / softcap)
    position_1S, length_B1 = jnp.arange(S)[None], lengths_B[:, None]
    visible_BS = position_1S < length_B1
    if window is not None:
        visible_BS &= position_1S >= length_B1 - 1 - window
    s_BPKGs = jnp.where(split(visible_BS)[:, :, None, None], s_BPKGs, -jnp.inf)
    peak_BPKG = jnp.maximum(s_BPKGs.max(-1), FLOOR)
    p_BPKGs = jnp.exp(s_BPKGs - peak_BPKG[..., None])
    share_BPKG = jnp.exp(peak_BPKG - peak_BPKG.max(1, keepdims=True))
    total_BKG = (p_BPKGs.sum(-1) * share_BPKG).sum(1)
    sum_BPKGH = weighted_sum(p_BPKGs, split(v_BSKH), q_BNH.dtype)
    out_BKGH = (sum_BPKGH * share_BPKG[..., None]).sum(1)
    out_BKGH /= jnp.where(total_BKG == 0, 1, total_BKG)[..., None]
    return out_BKGH.reshape(B, N, H).astype(q_BNH.dtype)


def paged_triton() -> Any:
    """Return the module `paged.triton`, imported here because it imports this module."""
    from jaxtrain_kernels.attention.paged import triton

    return triton


def _default_splits(B: int, S: int, columns: int) -> int:
    """Smallest divisor of S that makes enough work, or the largest with long enough splits."""
    wanted = -(-TILES // max(1, B * columns // TILE_COLUMNS))
    divisors = [P for P in range(1, max(1, S // SMALLEST_SPLIT) + 1) if S % P == 0]
    return next((P for P in divisors if P >= wanted), divisors[-1])


def _dot_scores(q_BKGH: Any, k_BPsKH: Any) -> Any:
    """Return the scores [B, P, K, G, s] in float32 (or wider)."""
    B, K, G, H = q_BKGH.shape
    k, scale_BPsK = _parts(k_BPsKH)
    own = jnp.eye(K, dtype=bool)[:, None, :, None]
    q_BNC = jnp.where(own, q_BKGH[:, :, :, None], 0).reshape(B, K * G, K * H)
    q_BPNC = jnp.broadcast_to(q_BNC[:, None], (B, k.shape[1], K * G, K * H))
    k_BPsC = k.reshape(*k.shape[:3], K * H).astype(q_BKGH.dtype)
    s_BPNs = _dot("BPNC,BPsC->BPNs", q_BPNC, k_BPsC)
    s_BPKGs = s_BPNs.reshape(B, -1, K, G, k.shape[2])
    return s_BPKGs if scale_BPsK is None else s_BPKGs * _by_head(scale_BPsK)


def _dot_sum(p_BPKGs: Any, v_BPsKH: Any, dtype: Any) -> Any:
    """Return the weighted sum of values [B, P, K, G, H] in float32 (or wider)."""
    B, P, K, G, s = p_BPKGs.shape
    v, scale_BPsK = _parts(v_BPsKH)
    if scale_BPsK is not None:
        p_BPKGs = p_BPKGs * _by_head(scale_BPsK)
        # Probabilities times scales are below float16's range.
        dtype = jnp.bfloat16 if dtype == jnp.float16 else dtype
    p_BPNs = p_BPKGs.reshape(B, P, K * G, s).astype(dtype)
    out_BPNC = _dot("BPNs,BPsC->BPNC", p_BPNs, v.reshape(B, P, s, -1).astype(dtype))
    return jnp.einsum("BPKGKH->BPKGH", out_BPNC.reshape(B, P, K, G, K, -1))


def _reduce_scores(q_BKGH: Any, k_BPsKH: Any) -> Any:
    k, scale_BPsK = _parts(k_BPsKH)
    wide = jnp.promote_types(q_BKGH.dtype, jnp.float32)
    q_BKGH = q_BKGH.astype(wide)
    # One sum per query of a group; XLA computes all of them in one pass over the keys.
    groups = [
        (q_BKGH[:, None, None, :, g] * k.astype(wide)).sum(-1) for g in range(q_BKGH.shape[2])
    ]
    s_BPKGs = jnp.stack(groups, -1).transpose(0, 1, 3, 4, 2)
    return s_BPKGs if scale_BPsK is None else s_BPKGs * _by_head(scale_BPsK)


def _reduce_sum(p_BPKGs: Any, v_BPsKH: Any, dtype: Any) -> Any:
    v, scale_BPsK = _parts(v_BPsKH)
    if scale_BPsK is not None:
        p_BPKGs = p_BPKGs * _by_head(scale_BPsK)
    p_BPsKG = p_BPKGs.transpose(0, 1, 4, 2, 3)
    wide_BPsKH = v.astype(p_BPKGs.dtype)
    groups = [(p_BPsKG[..., g, None] * wide_BPsKH).sum(2) for g in range(p_BPsKG.shape[-1])]
    return jnp.stack(groups, 3)


BACKENDS = {"dot": (_dot_scores, _dot_sum), "reduce": (_reduce_scores, _reduce_sum)}


def _parts(cache: Any) -> tuple[Any, Any]:
    return cache if isinstance(cache, Quantized) else (cache, None)


def _dequantized(cache: Cache) -> jax.Array:
    if not isinstance(cache, Quantized):
        return cache
    return cache.values_BSKH.astype(cache.scale_BSK.dtype) * cache.scale_BSK[..., None]


def _by_head(scale_BPsK: Any) -> Any:
    return scale_BPsK.transpose(0, 1, 3, 2)[:, :, :, None]


def _dot(axes: str, x: Any, y: Any) -> Any:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(axes, x, y, preferred_element_type=wide)
