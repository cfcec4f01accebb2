"""Norm and RoPE kernels for a few tokens in Pallas Triton, one launch each: Ampere and newer.

XLA makes two kernels of a norm and four of RoPE, and with a few tokens the launches take all of the
time. CUDA graphs can contain these kernels. They are in `kernels.py`, imported by the first call:
Pallas takes a while to import.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.rows import xla

MOST_ROWS = 256  # tokens; a program of one or a few warps handles one token, or one head of it
WIDEST = 16384


def supports(target: Target, op: str, *arrays) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    x = arrays[0]
    if op == "relu2":
        return "has no squared ReLU"
    if reason := triton_unsupported(target):
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {x.dtype}"
    if (rows := math.prod(x.shape[:2])) > MOST_ROWS:
        return f"needs at most {MOST_ROWS} tokens, got {rows}"
    if x.shape[-1] > WIDEST:
        return f"needs a width up to {WIDEST}, got {x.shape[-1]}"
    return None


def residual_norm(x_BTD, y_BTD, *, eps, interpret=False):
    """Backend of the public function."""
    formula = functools.partial(xla.residual_norm, eps=eps)
    return _product(formula, "residual_norm", eps, interpret)(x_BTD, y_BTD)


def mixed_norm(x_BTD, y_BTD, x0_BTD, a, b, *, eps, interpret=False):
    """Backend of the public function."""
    formula = lambda *arrays: xla.mixed_norm(*arrays, eps=eps)[:2]
    run = _product(formula, "mixed_norm", eps, interpret)
    return *run(x_BTD, y_BTD, x0_BTD, a, b), x0_BTD


def rope_norm(q_BTNH, k_BTKH, cos_BTH, sin_BTH, *, eps, interpret=False):
    """Backend of the public function."""
    formula = functools.partial(xla.rope_norm, eps=eps)
    return _product(formula, "rope_norm", eps, interpret)(q_BTNH, k_BTKH, cos_BTH, sin_BTH)


def _product(formula, name: str, eps: float, interpret: bool):
    """Return the kernel of this name; formula: the same function in XLA, for the gradient."""

    @jax.custom_vjp
    def run(*arrays):
        from jaxtrain_kernels.rows.triton import kernels

        return getattr(kernels, name)(eps, interpret, *arrays)

    run.defvjp(
        lambda *arrays: (run(*arrays), arrays),
        lambda arrays, gradients: jax.vjp(formula, *arrays)[1](gradients),
    )
    return run
