"""Attention for training (`attention`) and against a key/value cache (`decode_attention`)."""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention import cudnn, reference, xla
from jaxtrain_kernels.attention.decode import decode_attention as decode_attention
from jaxtrain_kernels.dispatch import choose, target

# Fastest first: the first that can serve is the default.
BACKENDS = {"cudnn": cudnn, "xla": xla, "reference": reference}


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B T K H"],
    v_BSKH: Float[Array, "B T K H"],
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Self-attention of N query heads over K key/value heads (N a multiple of K: GQA).

    window: how many keys left of the query itself stay visible (FlashAttention's (window, 0));
    None = all. Needs causal.
    segment_ids_BT: a token sees only its own id; 0 is padding, whose outputs are 0 and which
    neither gives nor receives gradient.
    softcap: scores become softcap * tanh(scores / softcap), after the scale (Gemma 2).
    scale: of q k^T, 1/sqrt(H) by default.

    Returns [B, T, N, H] in q's dtype; with return_lse also the log of the softmax's denominator,
    [B, N, T] in float32 (-inf where a query sees no key), itself differentiable.
    Raises ValueError for arguments that make no sense together, NotImplementedError if the backend
    cannot serve.
    """
    (T, N, H), (S, K) = q_BTNH.shape[1:], k_BSKH.shape[1:3]
    if T != S or N % K:
        raise ValueError(f"T == S and N % K == 0 are needed, got T={T} S={S} N={N} K={K}")
    if window is not None and (not causal or window < 0):
        raise ValueError(f"window needs causal=True and must be >= 0, got {window=} {causal=}")
    if window is not None and window >= T - 1:
        window = None
    call = dict(causal=causal, window=window, segment_ids_BT=segment_ids_BT, softcap=softcap)
    reasons = {
        name: backend.supports(target(), q_BTNH, return_lse=return_lse, **call)
        for name, backend in BACKENDS.items()
    }
    options = [f"{name}={call[name]}" for name in ("window", "softcap") if call[name] is not None]
    flags = {"causal": causal, "segments": segment_ids_BT is not None, "lse": return_lse}
    options += [name for name, on in flags.items() if on]
    signature = f"{q_BTNH.dtype}{list(q_BTNH.shape)} kv_heads={K} {' '.join(options)}".rstrip()
    backend = BACKENDS[choose("attention", reasons, implementation, signature)]
    scale = H**-0.5 if scale is None else scale
    out_BTNH, lse_BNT = backend.attention(q_BTNH, k_BSKH, v_BSKH, scale=scale, **call)
    return (out_BTNH, lse_BNT) if return_lse else out_BTNH
