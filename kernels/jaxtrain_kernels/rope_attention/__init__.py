"""Attention with the rotation and the norm of queries and keys before it, as one op.

Knowing both, a backend can turn queries and keys where they are and give their gradients as one
array: the projections of all three are one matmul each way, and no pass adds its gradients up.
"""

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention.call import Call
from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.rope_attention import hopper, reference, xla

# The first that can serve is the default.
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
    """`attention` of `rope_norm(q, k)` and v + value, where q, k and v stand in one array.

    C = N + 2 K heads: N = `heads` of queries, then the keys' and the values'. value: added to the
    values. The rest is as in `rope_norm` (angles without a factor) and `attention`.
    Raises ValueError for an unknown implementation, NotImplementedError where it cannot serve.
    """
    if window is not None and window >= qkv_BTCH.shape[1] - 1:
        window = None
    call = Call(causal, window, segment_ids_BT, None, softcap, scale)
    reasons = {name: b.supports(target(), qkv_BTCH, call) for name, b in BACKENDS.items()}
    signature = f"{qkv_BTCH.dtype}{list(qkv_BTCH.shape)} heads={heads} window={window}"
    backend = BACKENDS[choose_backend("rope_attention", reasons, implementation, signature)]
    return backend.rope_attention(qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, heads, eps, call)
