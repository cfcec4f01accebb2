"""Attention with RoPE and QK norm before it, as one op.

A backend of the whole op can rotate queries and keys in place and return the gradients of q, k and
v as one array. So their projections are one matmul, forward and backward, and no pass adds up
gradients.
"""

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention.call import Call
from jaxtrain_kernels.dispatch import choose_backend, target
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
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """`attention` of `rope_norm(q, k)` and v + value, where q, k and v are in one array.

    C = N + 2 K heads: N = `heads` query heads, then K key heads and K value heads. value: added to
    the values. Other arguments are as in `rope_norm` (angles without a factor) and `attention`.
    Raises ValueError for an unknown implementation, NotImplementedError where it cannot serve.
    """
    if window is not None and window >= qkv_BTCH.shape[1] - 1:
        window = None
    call = Call(causal, window, segment_ids_BT, None, softcap, scale)
    reasons = {name: b.supports(target(), qkv_BTCH, call) for name, b in BACKENDS.items()}
    signature = f"{qkv_BTCH.dtype}{list(qkv_BTCH.shape)} heads={heads} window={window}"
    backend = BACKENDS[choose_backend("rope_attention", reasons, implementation, signature)]
    return backend.rope_attention(qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, heads, eps, call)
