"""cuDNN's flash attention, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.attention.call import Call
from jaxtrain_kernels.dispatch import Target


def supports(target: Target, q_BTNH, call: Call) -> str | None:
    H, cc = q_BTNH.shape[-1], target.compute_capability
    if target.platform != "cuda":
        return f"needs an NVIDIA GPU, this is {target.platform}"
    if cc is None or cc < (8, 0):
        return f"needs compute capability 8.0 (Ampere), this is {cc}"
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {q_BTNH.dtype}"
    largest = 256 if cc >= (9, 0) else 128
    if H % 8 or largest < H:
        return f"needs a head dim that is a multiple of 8, at most {largest}, got {H}"
    if q_BTNH.shape[1] % 2:
        return "jax.nn does not differentiate it at odd lengths"
    if call.softcap is not None:
        return "has no softcap"
    if call.segment_ids_BT is not None:
        return "has no segment ids"
    if call.return_lse:
        return "jax.nn rounds its LSE to the input dtype and does not differentiate it"
    if call.deterministic:
        return "sums its gradients in any order"
    return None


def attention(q_BTNH, k_BSKH, v_BSKH, call: Call):
    """Backend of the public function, without LSE: returns (out_BTNH, None).

    Tracing needs JAX's CUDA plugin with cuDNN, so a CPU-only installation cannot lower it.
    """
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        is_causal=call.causal,
        local_window_size=None if call.window is None else (call.window, 0),
        scale=call.scale,
        implementation="cudnn",
    )
    return out_BTNH, None
