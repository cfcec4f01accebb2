"""Stand-in for a fused attention kernel: the same reads, writes and residuals, other arithmetic.

A GPU kernel does not compile on a CPU, and plain attention would keep all scores in memory. The
stand-in is a registered backend only inside `outlined`, where nothing is run.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtrain_kernels.attention import Call
from jaxtrain_kernels.dispatch import on_target
from jaxtyping import Array

NAME = "outline"


@contextlib.contextmanager
def outlined(kind: str, capability: tuple[int, int]) -> Iterator[str]:
    """Trace inside as for a GPU of this kind, in a form that compiles for a CPU.

    Yields the name of the attention backend to use.
    """
    # The full module name is needed: the package's `attention` attribute is the function.
    backends = importlib.import_module("jaxtrain_kernels.attention").BACKENDS
    backends[NAME] = sys.modules[__name__]
    try:
        with on_target("cuda", capability, kind):
            yield NAME
    finally:
        del backends[NAME]


def supports(*_: object) -> None:
    return None


def gradients(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    out_BTNH: Array,
    lse_BNT: Array,
    dout_BTNH: Array,
    call: Call,
) -> tuple[Array, Array, Array]:
    """The backward pass alone, for a part of the keys."""
    return _backward((q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT), (dout_BTNH,))


def attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, call: Call) -> tuple[Array, Array]:
    """Outputs with attention's shapes (out and LSE)."""
    return _outline(q_BTNH, k_BSKH, v_BSKH)


@jax.custom_vjp
def _outline(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    return _forward(q, k, v)[0]


def _product(x: Array) -> Array:
    """A matmul, which forces its operand into memory."""
    H = x.shape[-1]
    return x @ (jax.lax.broadcasted_iota(x.dtype, (H, H), 0) + x[0, 0, 0, 0])


def _forward(q: Array, k: Array, v: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    B, T, K, H = k.shape
    out = _product(q).reshape(B, T, K, -1, H) + _product(_product(k) + v)[:, :, :, None]
    lse = jnp.swapaxes(jnp.sum(out.astype(jnp.float32), -1).reshape(q.shape[:3]), 1, 2)
    out = out.reshape(q.shape)
    return (out, lse), (q, k, v, out, lse)


def _backward(saved: Any, gradient: Any) -> tuple[Any, Any, Any]:
    q, k, v, out, lse = saved
    d = _product(gradient[0] * jnp.swapaxes(lse, 1, 2)[..., None].astype(q.dtype))
    dq = _product(_product(q) + _product(out) + d)
    dk = _product(_product(k) + jnp.mean(d.reshape(*k.shape[:3], -1, k.shape[3]), 3))
    return dq, dk, _product(_product(v) + dk)


_outline.defvjp(_forward, _backward)
