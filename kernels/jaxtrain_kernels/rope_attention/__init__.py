"""Attention with RoPE and QK norm before it, as one op.

A backend of the whole op can rotate queries and keys in place and return the gradients of q, k and
v as one array. So their projections are one matmul, forward and backward, and no pass adds up
gradients.
"""

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention.call import Call
from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.fp8.gradients import GradientCast, cast_gradient
from jaxtrain_kernels.rope_attention import hopper, reference, xla

# The first backend that can serve the call is the default.
BACKENDS = {"mosaic": hopper, "xla": xla, "reference": reference}


def rope_attention(
    qkv_BTCH: Float[Array, "B T C H"],
    cos_BTH: Float[Array, "b T H"],
    sin_BTH: Float[Array, "b T H"],
    value_BTKH: Float[Array, "B T K H"] | None = None,
    *,
    heads: int,
    eps: float,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    gradient: GradientCast | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """`attention` of `rope_norm(q, k)` and v + value, where q, k and v are in one array.

    C = N + 2 K heads: N = `heads` query heads, then K key heads and K value heads. value: added to
    the values. Other arguments are as in `rope_norm` (angles without a factor) and `attention`.
    gradient: of the matmul that computes qkv; the backward pass casts qkv's gradient to float8.
    Raises ValueError for an unknown implementation, NotImplementedError where it cannot serve.
    """
    if window is not None and window >= qkv_BTCH.shape[1] - 1:
        window = None
    call = Call(causal, window, segment_ids_BT, None, softcap, scale)
    reasons = {name: b.supports(target(), qkv_BTCH, call) for name, b in BACKENDS.items()}
    signature = f"{qkv_BTCH.dtype}{list(qkv_BTCH.shape)} heads={heads} window={window}"
    backend = BACKENDS[choose_backend("rope_attention", reasons, implementation, signature)]
    arrays = cos_BTH, sin_BTH, value_BTKH
    if gradient is not None and backend is hopper and not hopper.casts_unsupported(qkv_BTCH):
        return hopper.rope_attention(qkv_BTCH, *arrays, heads, eps, call, gradient=gradient)
    if gradient is not None:
        flat = qkv_BTCH.reshape(*qkv_BTCH.shape[:2], -1)
        qkv_BTCH = cast_gradient(flat, gradient).reshape(qkv_BTCH.shape)
    return backend.rope_attention(qkv_BTCH, *arrays, heads, eps, call)
