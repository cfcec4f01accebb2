"""The outline of a fused attention kernel: what it reads, writes and keeps, without its arithmetic.

A GPU's kernel does not compile on a CPU, and plain attention would put all scores in memory. It is
among the backends only inside `outlined`, where nothing is run.
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
    """Traces made inside are those of a GPU of this kind, but can be compiled for a CPU.

    Yields the name of the attention backend to ask for.
    """
    # By its full name: the package's `attention` is the function.
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
    """The backward pass by itself, of a part of the keys."""
    return _backward((q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT), (dout_BTNH,))


def attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, call: Call) -> tuple[Array, Array]:
    """Results of the shapes of attention's."""
    return _outline(q_BTNH, k_BSKH, v_BSKH)


@jax.custom_vjp
def _outline(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    return _forward(q, k, v)[0]


def _product(x: Array) -> Array:
    """A matmul, so that its operand has to be in memory."""
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
