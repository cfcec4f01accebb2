"""Attention for training (`attention`), and over a KV cache that is contiguous
(`decode_attention`) or paged (`paged_attention`)."""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention import cudnn, fa4, hopper, reference, table, triton, xla
from jaxtrain_kernels.attention.call import RESULT as RESULT
from jaxtrain_kernels.attention.call import Call as Call
from jaxtrain_kernels.attention.decode import Quantized as Quantized
from jaxtrain_kernels.attention.decode import decode_attention as decode_attention
from jaxtrain_kernels.attention.decode import quantize as quantize
from jaxtrain_kernels.attention.paged import paged_attention as paged_attention
from jaxtrain_kernels.attention.paged.append import paged_append as paged_append
from jaxtrain_kernels.attention.paged.rope_append import Rotation as Rotation
from jaxtrain_kernels.attention.paged.rope_append import rope_append as rope_append
from jaxtrain_kernels.attention.paged.rope_append import (
    supports_rope_append as supports_rope_append,
)
from jaxtrain_kernels.dispatch import choose_backend, target

# Order of preference where the table has no measured rows (documents, softcap): first the backends
# that are fastest in its other rows, then those whose GPU tests have run.
BACKENDS = {
    "cudnn": cudnn, "mosaic": hopper, "xla": xla, "triton": triton, "fa4": fa4,
    "reference": reference,
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

    window: number of visible keys before the query itself (FlashAttention's (window, 0));
    None = all. Needs causal.
    segment_ids_BT: a token attends only to tokens of its own id. 0 is padding: its outputs are 0,
    and it neither contributes nor receives gradient.
    key_segment_ids_BS: segment ids of the keys, if they are other tokens than the queries.
    softcap: scores become softcap * tanh(scores / softcap), after the scale (Gemma 2).
    scale: factor of q k^T, 1/sqrt(H) by default.
    implementation: name of a backend; None = the fastest that can serve, by `table.json`.
    deterministic: gradients are bitwise repeatable (outputs always are).
    tiling: block sizes of the named implementation; {} = its own choice, None = by `table.json`.

    Returns [B, T, N, H] in q's dtype; with return_lse also the log of the softmax's denominator,
    [B, N, T] in float32 (-inf where a query sees no key), itself differentiable.
    Raises ValueError for inconsistent arguments, NotImplementedError if the backend cannot serve.
    """
    if tiling is not None and implementation is None:
        raise ValueError("a tiling needs the implementation that it is for")
    arrays = q_BTNH, k_BSKH, v_BSKH
    call = Call(
        causal, window, segment_ids_BT, key_segment_ids_BS, softcap, scale, return_lse,
        deterministic, tiling,
    )  # fmt: skip
    backend, call = _choose(implementation, arrays, call)
    out_BTNH, lse_BNT = backend.attention(*arrays, call)
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
    """Contribution of these keys to (dq, dk, dv) of an attention over these and other keys.

    out_BTNH, lse_BNT: output and LSE of the softmax over all keys; a query with lse 1e30
    contributes nothing. Other arguments and the errors raised are as in `attention`.
    """
    arrays = q_BTNH, k_BSKH, v_BSKH
    call = Call(
        causal, window, segment_ids_BT, key_segment_ids_BS, softcap, scale, True, deterministic
    )
    backend, call = _choose(implementation, arrays, call, "gradients")
    return backend.gradients(*arrays, out_BTNH, lse_BNT, dout_BTNH, call)


def _checked(q_BTNH: Any, k_BSKH: Any, v_BSKH: Any, call: Call) -> Call:
    """Validate the call, set its scale and drop a window that hides nothing. Raises ValueError."""
    (T, N, H), (S, K), window = q_BTNH.shape[1:], k_BSKH.shape[1:3], call.window
    if T != S or N % K:
        raise ValueError(f"T == S and N % K == 0 are needed, got T={T} S={S} N={N} K={K}")
    if k_BSKH.shape != v_BSKH.shape or k_BSKH.shape[-1] != H:
        raise ValueError(f"k and v need one shape and q's head dim {H}, got {k_BSKH.shape}")
    if not q_BTNH.dtype == k_BSKH.dtype == v_BSKH.dtype:
        dtypes = ", ".join(str(x.dtype) for x in (q_BTNH, k_BSKH, v_BSKH))
        raise ValueError(f"q, k and v need the same dtype, got {dtypes}")
    if window is not None and (not call.causal or window < 0):
        raise ValueError(f"window needs causal=True and must be >= 0, got {window=}")
    if call.key_segment_ids_BS is not None and call.segment_ids_BT is None:
        raise ValueError("key_segment_ids_BS needs segment_ids_BT, those of the queries")
    if window is not None and window >= T - 1:
        call = call._replace(window=None)
    return call._replace(scale=H**-0.5) if call.scale is None else call


def _choose(
    implementation: str | None,
    arrays: tuple[Any, Any, Any],
    call: Call,
    function: str = "attention",
) -> tuple[Any, Call]:
    """Return the backend and the call for it, with the measured tiling if there is one."""
    call, q_BTNH, K = _checked(*arrays, call), arrays[0], arrays[1].shape[2]
    T, N, H = q_BTNH.shape[1:]
    kind = table.TableKey(
        dtype=q_BTNH.dtype.name,
        head_dim=H,
        causal=call.causal,
        window=call.window is not None,
        segments=call.segment_ids_BT is not None,
        softcap=call.softcap is not None,
        group=N // K,
        T=T,
    )
    tilings = dict(table.preferred_backends(table.read_table(), target(), kind, tuple(BACKENDS)))
    reasons = {name: BACKENDS[name].supports(target(), q_BTNH, call) for name in tilings}
    for name in reasons:
        if not hasattr(BACKENDS[name], function):
            reasons[name] = reasons[name] or f"has no {function} by themselves"
    options = [f"{x}={y}" for x in ("window", "softcap") if (y := getattr(call, x)) is not None]
    flags = {"causal": call.causal, "segments": kind.segments, "lse": call.return_lse}
    flags |= {"deterministic": call.deterministic}
    flags |= {"key_segments": call.key_segment_ids_BS is not None}
    options += [flag for flag, given in flags.items() if given]
    signature = f"{q_BTNH.dtype}{list(q_BTNH.shape)} kv_heads={K} {' '.join(options)}".rstrip()
    op = "attention" if function == "attention" else f"attention's {function}"
    name = choose_backend(op, reasons, implementation, signature)
    tiling = tilings[name] if call.tiling is None else call.tiling
    return BACKENDS[name], call._replace(tiling=tiling or None)
