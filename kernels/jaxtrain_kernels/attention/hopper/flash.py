"""Differentiable attention from the Hopper forward and backward kernels."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from jaxtrain_kernels.attention.call import Call, kept
from jaxtrain_kernels.attention.hopper import backward, forward
from jaxtrain_kernels.attention.hopper.backward import BackwardTiling
from jaxtrain_kernels.attention.hopper.forward import ForwardTiling


class FlashOptions(NamedTuple):
    """Static parameters of one call."""

    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    deterministic: bool
    forward: ForwardTiling | None
    backward: BackwardTiling | None


def options(call: Call) -> FlashOptions:
    tiling = call.tiling or {}
    forward = ForwardTiling(**tiling["forward"]) if "forward" in tiling else None
    backward = BackwardTiling(**tiling["backward"]) if "backward" in tiling else None
    same = call.causal, call.window, call.softcap, call.scale, call.deterministic
    return FlashOptions(*same, forward, backward)


def flash(o: FlashOptions, q_BTNH, k_BSKH, v_BSKH, ids_BT):
    """Return (out_BTNH, lse_BNT). A negative sign moves to q: maxima are taken before scaling."""
    if o.scale < 0:
        q_BTNH, o = -q_BTNH, o._replace(scale=-o.scale)
    return _flash(o, q_BTNH, k_BSKH, v_BSKH, ids_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(options: FlashOptions, q_BTNH, k_BSKH, v_BSKH, ids_BT):
    return _forward(options, q_BTNH, k_BSKH, v_BSKH, ids_BT)


def _forward(o: FlashOptions, q_BTNH, k_BSKH, v_BSKH, ids_BT):
    def run(q, k, v, ids):
        return forward.forward(
            q, k, v, ids, causal=o.causal, window=o.window, softcap=o.softcap, scale=o.scale,
            tiling=o.forward,
        )  # fmt: skip

    return kept(*folding(run)(q_BTNH, k_BSKH, v_BSKH, ids_BT))


def _flash_fwd(o: FlashOptions, *primals):
    # With symbolic zeros, a primal is an object with its value.
    inputs = [None if x is None else x.value for x in primals]
    out_BTNH, lse_BNT = _forward(o, *inputs)
    return (out_BTNH, lse_BNT), (*inputs, out_BTNH, lse_BNT)


def _flash_bwd(o: FlashOptions, residuals, cotangents):
    """dq, dk, dv, None; a cotangent of zeros costs nothing for the LSE, which few callers use."""
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(residuals[4])
    if isinstance(dlse, SymbolicZero):
        dlse = None

    def run(q, k, v, ids, out, lse, dout, dlse):
        return backward.backward(
            q, k, v, ids, out, lse, dout, dlse, causal=o.causal, window=o.window,
            softcap=o.softcap, scale=o.scale, deterministic=o.deterministic, tiling=o.backward,
        )  # fmt: skip

    dq_BTNH, dk_BSKH, dv_BSKH = folding(run)(*residuals, dout, dlse)
    return dq_BTNH, dk_BSKH, dv_BSKH, None


_flash.defvjp(_flash_fwd, _flash_bwd, symbolic_zeros=True)


def gradients(o: FlashOptions, q_BTNH, k_BSKH, v_BSKH, ids_BT, out_BTNH, lse_BNT, dout_BTNH):
    """Return (dq, dk, dv) from the output and the LSE, which may be over more keys than these."""
    sign = -1 if o.scale < 0 else 1
    o = o._replace(scale=sign * o.scale)
    residuals = sign * q_BTNH, k_BSKH, v_BSKH, ids_BT, out_BTNH, lse_BNT
    dq_BTNH, dk_BSKH, dv_BSKH, _ = _flash_bwd(o, residuals, (dout_BTNH, None))
    return sign * dq_BTNH, dk_BSKH, dv_BSKH


def folding(
    function: Callable[..., tuple[Any, ...]],
    last_in: int | None = None,
    last_out: int | None = None,
) -> Callable[..., Any]:
    """Make vmap fold the mapped axis into the batch dim of `function`, of arrays [B, ...].

    The kernels schedule their tiles by a counter, which a batch of kernels would share. last_in,
    last_out: index of the argument and of the result that are [n, B * T].
    """
    folded = custom_vmap(function)

    @folded.def_vmap
    def rule(axis_size, in_batched, *arrays):
        def rows(x, batched, last):
            x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            x = jnp.moveaxis(x, 0, 1) if last else x
            return x.reshape(len(x), -1) if last else x.reshape(-1, *x.shape[2:])

        def split(x, last):
            if last:
                return jnp.moveaxis(x.reshape(len(x), axis_size, -1), 1, 0)
            return x.reshape(axis_size, -1, *x.shape[1:])

        def each(convert, last, *trees):
            one = lambda i, *x: jax.tree.map(functools.partial(convert, last=i == last), *x)
            return tuple(map(one, range(len(trees[0])), *trees))

        results = folded(*each(rows, last_in, arrays, in_batched))
        results = each(split, last_out, results)
        return results, jax.tree.map(lambda _: True, results)

    return folded
