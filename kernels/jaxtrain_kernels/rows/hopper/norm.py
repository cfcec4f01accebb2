"""Residual addition (or mixing with x0) and RMS norm: forward and backward in one pass each."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxtrain_kernels import hopper
from jaxtrain_kernels.rows.hopper.launch import broadcast_lanes, launch, like, load, rows_layout

ROWS = 4  # per block: one per warp


class NormOptions(NamedTuple):
    eps: float
    interpret: hopper.Interpret


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def residual_norm(options, x_BTD, y_BTD):
    """Backend of the public function."""
    return tuple(_forward(options, x_BTD, y_BTD, None, None))


def _residual_fwd(options, x_BTD, y_BTD):
    s_BTD, h_BTD = _forward(options, x_BTD, y_BTD, None, None)
    return (s_BTD, h_BTD), s_BTD


def residual_bwd(options, s_BTD, cotangents):
    ds_BTD, dh_BTD = cotangents
    (dx_BTD,) = _backward(options, s_BTD, ds_BTD, dh_BTD, None, None, None)
    return dx_BTD, dx_BTD


residual_norm.defvjp(_residual_fwd, residual_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mixed_norm(options, x_BTD, y_BTD, x0_BTD, a, b):
    """Backend of the public function."""
    s_BTD, h_BTD = _forward(options, x_BTD, y_BTD, x0_BTD, stacked(a, b))
    return s_BTD, h_BTD, x0_BTD


def _mixed_fwd(options, x_BTD, y_BTD, x0_BTD, a, b):
    s_BTD, h_BTD = _forward(options, x_BTD, y_BTD, x0_BTD, stacked(a, b))
    return (s_BTD, h_BTD, x0_BTD), (s_BTD, x0_BTD, a, b, None if y_BTD is None else y_BTD[:0])


def mixed_bwd(options, saved, cotangents):
    s_BTD, x0_BTD, a, b, like_y = saved
    ds_BTD, dh_BTD, dx0_BTD = cotangents
    dx_BTD, dx0_BTD, sums_2R = _backward(
        options, s_BTD, ds_BTD, dh_BTD, x0_BTD, dx0_BTD, stacked(a, b)
    )
    # <g, s> and <g, x0> for g = d loss / d s. x + y was not saved: it is (s - b x0) / a.
    of_s, of_x0 = sum_rows(sums_2R)
    da = ((of_s - b.astype(jnp.float32) * of_x0) / a.astype(jnp.float32)).astype(a.dtype)
    return dx_BTD, None if like_y is None else dx_BTD, dx0_BTD, da, of_x0.astype(b.dtype)


mixed_norm.defvjp(_mixed_fwd, mixed_bwd)


def sum_rows(x_NR: Float[Array, "N R"]) -> list[Float[Array, ""]]:
    """Sum each row in one kernel: XLA sums up to 16,384 numbers in one, and more in two."""
    R = x_NR.shape[1]
    parts = next((n for n in range(1, 9) if R % n == 0 and R // n <= 16384), 1)
    x_NP = jnp.sum(x_NR.reshape(-1, parts, R // parts), axis=2)
    return [functools.reduce(jnp.add, [row[n] for n in range(parts)]) for row in x_NP]


def stacked(a, b):
    """Both scales in float32, as the kernels read them."""
    return jnp.stack([a.astype(jnp.float32), b.astype(jnp.float32)])


def summed(
    arrays: dict[str, hopper.Ref], here: pl.Slice, layout: hopper.RegisterLayout
) -> jax.Array:
    """x + y, or a (x + y) + b x0, of the rows `here`; arrays: those given of x, y, x0, scales."""
    values = {name: load(ref.at[here], layout) for name, ref in arrays.items() if name != "scales"}
    s = values["x"] + values["y"] if "y" in values else values["x"]
    if "scales" in arrays:
        s = arrays["scales"][0] * s + arrays["scales"][1] * values["x0"]
    return s


@hopper.jit_kernel("options")
def _forward(options, x_BTD, y_BTD, x0_BTD, scales_2):
    """Return [s, h]: x, y and x0 are read once, s and h are written once."""
    D = x_BTD.shape[-1]
    layout = rows_layout(D)
    given = {"x": x_BTD, "y": y_BTD, "x0": x0_BTD, "scales": scales_2}
    given = {name: x for name, x in given.items() if x is not None}

    def norm_forward(block, *refs):
        arrays, (s_ref, h_ref) = dict(zip(given, refs)), refs[-2:]
        here = pl.ds(block * ROWS, ROWS)
        s = summed(arrays, here, layout).astype(x_BTD.dtype)
        s_ref[here] = s
        s = s.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(s * s, 1) * (1 / D) + options.eps)
        h_ref[here] = (s * broadcast_lanes(scale, s, layout)).astype(x_BTD.dtype)

    flat = [x if name == "scales" else x.reshape(-1, D) for name, x in given.items()]
    blocks = flat[0].shape[0] // ROWS
    out = launch(norm_forward, [like(flat[0])] * 2, blocks, *flat, interpret=options.interpret)
    return [x.reshape(x_BTD.shape) for x in out]


@hopper.jit_kernel("options")
def _backward(options, s_BTD, ds_BTD, dh_BTD, x0_BTD, dx0_BTD, scales_2):
    """Return, for g = d loss / d s: [g]; with scales [a g, dx0 + b g, rows' (<g, s>, <g, x0>)]."""
    D = s_BTD.shape[-1]
    layout = rows_layout(D)
    mixed = scales_2 is not None

    def norm_backward(block, s_ref, ds_ref, dh_ref, *more):
        here = pl.ds(block * ROWS, ROWS)
        s, dh, ds = (load(ref.at[here], layout) for ref in (s_ref, dh_ref, ds_ref))
        if mixed:
            x0_ref, acc_ref, scales, dx_ref, dx0_ref, sums_ref = more
            x0, acc = load(x0_ref.at[here], layout), load(acc_ref.at[here], layout)
        scale = lax.rsqrt(jnp.sum(s * s, 1) * (1 / D) + options.eps)
        along = jnp.sum(dh * s, 1) * (-1 / D) * scale * scale * scale
        g = ds + dh * broadcast_lanes(scale, s, layout) + s * broadcast_lanes(along, s, layout)
        if not mixed:
            more[0][here] = g.astype(s_BTD.dtype)
            return
        dx_ref[here] = (scales[0] * g).astype(s_BTD.dtype)
        dx0_ref[here] = (acc + scales[1] * g).astype(s_BTD.dtype)
        sums_ref[0, here] = jnp.sum(g * s, 1)
        sums_ref[1, here] = jnp.sum(g * x0, 1)

    arrays = [x.reshape(-1, D) for x in (s_BTD, ds_BTD, dh_BTD)]
    out_types = [like(arrays[0])]
    if mixed:
        sums_2R = jax.ShapeDtypeStruct((2, len(arrays[0])), jnp.float32)
        out_types += [like(arrays[0]), sums_2R]
        arrays += [x0_BTD.reshape(-1, D), dx0_BTD.reshape(-1, D), scales_2]
    blocks = arrays[0].shape[0] // ROWS
    out = launch(norm_backward, out_types, blocks, *arrays, interpret=options.interpret)
    grads = 1 + mixed
    return [*(x.reshape(s_BTD.shape) for x in out[:grads]), *out[grads:]]
