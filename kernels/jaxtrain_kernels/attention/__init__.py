"""Attention for training (`attention`) and against a key/value cache (`decode_attention`)."""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention import cudnn, mosaic, reference, table, triton_flash, xla
from jaxtrain_kernels.attention.decode import Quantized as Quantized
from jaxtrain_kernels.attention.decode import decode_attention as decode_attention
from jaxtrain_kernels.attention.decode import quantize as quantize
from jaxtrain_kernels.dispatch import choose, target

# The order of preference where the table has no measured rows: what has been measured comes first.
BACKENDS = {
    "cudnn": cudnn, "xla": xla, "mosaic": mosaic, "triton": triton_flash, "reference": reference,
}  # fmt: skip


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B T K H"],
    v_BSKH: Float[Array, "B T K H"],
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    key_segment_ids_BS: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    tiling: dict[str, Any] | None = None,
) -> Any:
    """Self-attention of N query heads over K key/value heads (N a multiple of K: GQA).

    window: how many keys left of the query itself stay visible (FlashAttention's (window, 0));
    None = all. Needs causal.
    segment_ids_BT: a token sees only its own id; 0 is padding, whose outputs are 0 and which
    neither gives nor receives gradient.
    key_segment_ids_BS: those of the keys, where they are other tokens than the queries.
    softcap: scores become softcap * tanh(scores / softcap), after the scale (Gemma 2).
    scale: of q k^T, 1/sqrt(H) by default.
    implementation: a backend by name; None = the fastest that can serve, by `table.json`.
    deterministic: gradients are bitwise repeatable (outputs always are).
    tiling: the named implementation's block sizes, {} = its own choice; None = by `table.json`.

    Returns [B, T, N, H] in q's dtype; with return_lse also the log of the softmax's denominator,
    [B, N, T] in float32 (-inf where a query sees no key), itself differentiable.
    Raises ValueError for arguments that make no sense together, NotImplementedError if the backend
    cannot serve.
    """
    _check(q_BTNH, k_BSKH, v_BSKH, causal, window)
    if tiling is not None and implementation is None:
        raise ValueError("a tiling needs the implementation that it is for")
    if window is not None and window >= q_BTNH.shape[1] - 1:
        window = None
    call = dict(causal=causal, window=window, segment_ids_BT=segment_ids_BT, softcap=softcap)
    call |= dict(deterministic=deterministic)
    if key_segment_ids_BS is not None:
        call |= dict(key_segment_ids_BS=key_segment_ids_BS)
    name, measured = _choose(implementation, q_BTNH, k_BSKH.shape[2], return_lse, call)
    if tiling := measured if tiling is None else tiling:
        call |= dict(tiling=tiling)
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    out_BTNH, lse_BNT = BACKENDS[name].attention(q_BTNH, k_BSKH, v_BSKH, scale=scale, **call)
    return (out_BTNH, lse_BNT) if return_lse else out_BTNH


def attention_gradients(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B T K H"],
    v_BSKH: Float[Array, "B T K H"],
    out_BTNH: Float[Array, "B T N H"],
    lse_BNT: Float[Array, "B N T"],
    dout_BTNH: Float[Array, "B T N H"],
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    key_segment_ids_BS: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    deterministic: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """What these keys contribute to (dq, dk, dv) of an attention over more keys than these.

    out_BTNH, lse_BNT: of the whole softmax, of which these keys are a part; a row with lse 1e30
    contributes nothing. The rest, and what is raised, is as in `attention`.
    """
    _check(q_BTNH, k_BSKH, v_BSKH, causal, window)
    if window is not None and window >= q_BTNH.shape[1] - 1:
        window = None
    call = dict(causal=causal, window=window, segment_ids_BT=segment_ids_BT, softcap=softcap)
    call |= dict(deterministic=deterministic)
    if key_segment_ids_BS is not None:
        call |= dict(key_segment_ids_BS=key_segment_ids_BS)
    name, tiling = _choose(implementation, q_BTNH, k_BSKH.shape[2], True, call, "gradients")
    call |= dict(tiling=tiling) if tiling else {}
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    arrays = q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, dout_BTNH
    return BACKENDS[name].gradients(*arrays, scale=scale, **call)


def _check(q_BTNH, k_BSKH, v_BSKH, causal, window) -> None:
    (T, N, H), (S, K) = q_BTNH.shape[1:], k_BSKH.shape[1:3]
    if T != S or N % K:
        raise ValueError(f"T == S and N % K == 0 are needed, got T={T} S={S} N={N} K={K}")
    if k_BSKH.shape != v_BSKH.shape or k_BSKH.shape[-1] != H:
        raise ValueError(f"k and v need one shape and q's head dim {H}, got {k_BSKH.shape}")
    if not q_BTNH.dtype == k_BSKH.dtype == v_BSKH.dtype:
        dtypes = ", ".join(str(x.dtype) for x in (q_BTNH, k_BSKH, v_BSKH))
        raise ValueError(f"q, k and v need the same dtype, got {dtypes}")
    if window is not None and (not causal or window < 0):
        raise ValueError(f"window needs causal=True and must be >= 0, got {window=} {causal=}")


def _choose(
    implementation: str | None,
    q_BTNH: Any,
    K: int,
    return_lse: bool,
    call: dict[str, Any],
    function: str = "attention",
) -> tuple[str, dict[str, Any] | None]:
    """The backend, and its measured tiling if there is one."""
    T, N, H = q_BTNH.shape[1:]
    given = {name for name, value in call.items() if value is not None and value is not False}
    kind = table.Kind(
        dtype=q_BTNH.dtype.name,
        head_dim=H,
        causal=call["causal"],
        window="window" in given,
        segments="segment_ids_BT" in given,
        softcap="softcap" in given,
        group=N // K,
        T=T,
    )
    tilings = dict(table.preference(table.read(), target(), kind, tuple(BACKENDS)))
    reasons = {
        name: BACKENDS[name].supports(target(), q_BTNH, return_lse=return_lse, **call)
        for name in tilings
    }
    for name in reasons:
        if not hasattr(BACKENDS[name], function):
            reasons[name] = reasons[name] or f"has no {function} by themselves"
    options = [f"{name}={call[name]}" for name in ("window", "softcap") if name in given]
    flags = {"causal": "causal", "segment_ids_BT": "segments", "deterministic": "deterministic"}
    flags |= {"key_segment_ids_BS": "key_segments"}
    options += [flag for name, flag in flags.items() if name in given]
    options += ["lse"] if return_lse else []
    signature = f"{q_BTNH.dtype}{list(q_BTNH.shape)} kv_heads={K} {' '.join(options)}".rstrip()
    op = "attention" if function == "attention" else f"attention's {function}"
    name = choose(op, reasons, implementation, signature)
    return name, tilings[name]
