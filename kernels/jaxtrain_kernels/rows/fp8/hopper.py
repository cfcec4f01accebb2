"""Residual addition (or mixing with x0), RMS norm and cast to float8 in one pass, for Hopper.

A block processes 64 rows, so that a column of the transpose is written in 64 bytes. Its warps read
and norm a row at a time, as in `rows.hopper.norm`, and write the sum and the float8 row directly.
They also keep the row in shared memory for the transpose: the hardware transposes 16-bit elements
(ldmatrix) but not bytes, so an element has two bytes, of rows 32 apart. That takes 64 bytes per
column, so a multiprocessor holds two blocks, and one block's loads hide the other's transpose.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.rows import hopper as rows
from jaxtrain_kernels.rows.hopper import norm
from jaxtrain_kernels.rows.hopper.launch import broadcast_lanes, like, rows_layout

ROWS = 64  # per block
PAIRS = ROWS // 2  # rows n and n + PAIRS share 16-bit elements
COLUMNS = 64  # that a warpgroup transposes at a time
WARPGROUPS = 2  # per block
BARRIER = WARPGROUPS + 1  # a named barrier; those before it are the warpgroups' own
PAD = 8  # elements between rows in shared memory, so that ldmatrix has no bank conflicts
E4M3 = jnp.float8_e4m3fn
Shaped = Array | jax.ShapeDtypeStruct


class CastOptions(NamedTuple):
    eps: float
    interpret: hopper.Interpret


def supports(target: Target, x: Shaped, *others: Shaped) -> str | None:
    if reason := rows.supports(target, "residual_norm", x, *others):
        return reason
    count = x.size // x.shape[-1]
    return f"needs tokens in multiples of {ROWS}, got {count}" if count % ROWS else None


def norm_quantized(
    x_BTD, y_BTD, x0_BTD, scales, multiplier, *, eps, interpret: hopper.Interpret = False
):
    """Backend like `reference`. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    options = CastOptions(eps, interpret)
    return _norm_quantized(options, x_BTD, y_BTD, x0_BTD, scales, multiplier)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_quantized(options, x_BTD, y_BTD, x0_BTD, scales, multiplier):
    return _outputs(options, x_BTD, y_BTD, x0_BTD, scales, multiplier)


def _outputs(options, x_BTD, y_BTD, x0_BTD, scales, multiplier):
    pair = None if scales is None else norm.stacked(*scales)
    s_BTD, r_R, q_RD, q_DR, most_S = _norm_cast(options, x_BTD, y_BTD, x0_BTD, pair, multiplier)
    # No kernel writes h: XLA computes what is read of it.
    r_BT1 = r_R.reshape(*s_BTD.shape[:-1], 1)
    h_BTD = (s_BTD.astype(jnp.float32) * r_BT1).astype(s_BTD.dtype)
    return s_BTD, h_BTD, x0_BTD, q_RD, q_DR, most_S


def _norm_quantized_fwd(options, x_BTD, y_BTD, x0_BTD, scales, multiplier):
    out = _outputs(options, x_BTD, y_BTD, x0_BTD, scales, multiplier)
    return out, (out[0], x0_BTD, scales, None if y_BTD is None else y_BTD[:0])


def _norm_quantized_bwd(options, saved, cotangents):
    """As of the norms alone: the casts have no gradient."""
    s_BTD, x0_BTD, scales, like_y = saved
    plain = norm.NormOptions(options.eps, options.interpret)
    if scales is None:
        dx_BTD, dy_BTD = norm.residual_bwd(plain, s_BTD, cotangents[:2])
        return dx_BTD, None if like_y is None else dy_BTD, None, None, None
    of_norm = norm.mixed_bwd(plain, (s_BTD, x0_BTD, *scales, like_y), cotangents[:3])
    dx_BTD, dy_BTD, dx0_BTD, *d_scales = of_norm
    return dx_BTD, dy_BTD, dx0_BTD, tuple(d_scales), None


_norm_quantized.defvjp(_norm_quantized_fwd, _norm_quantized_bwd)


@hopper.jit_kernel("options")
def _norm_cast(options, x_BTD, y_BTD, x0_BTD, scales_2, multiplier):
    """Return s, 1 / rms(s) of each row, the norm in e4m3 in both layouts, and maxima of it."""
    D = x_BTD.shape[-1]
    layout, largest = rows_layout(D), float(jnp.finfo(E4M3).max)
    given = {"x": x_BTD, "y": y_BTD, "x0": x0_BTD, "scales": scales_2}
    given = {name: x for name, x in given.items() if x is not None}

    def norm_cast(*refs, packed, halves):
        arrays, multiplier = dict(zip(given, refs)), refs[len(given)]
        s_ref, r_ref, q_ref, qt_ref, most_ref = refs[len(given) + 1 :]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        row, factor = block * ROWS, multiplier[0]

        def cast_rows(here: pl.Slice) -> tuple[Array, Array]:
            """Norm and cast 4 rows; return their bytes, and the maximum of each."""
            s = norm.summed(arrays, here, layout).astype(x_BTD.dtype)
            s_ref[here] = s
            s = s.astype(jnp.float32)
            scale = lax.rsqrt(jnp.sum(s * s, 1) * (1 / D) + options.eps)
            r_ref[here] = scale
            h = (s * broadcast_lanes(scale, s, layout)).astype(x_BTD.dtype).astype(jnp.float32)
            scaled = h * factor
            if options.interpret:  # on the device the cast saturates
                scaled = jnp.minimum(jnp.maximum(scaled, -largest), largest)
            q = scaled.astype(E4M3)
            q_ref[here] = q
            bytes_4D = lax.bitcast_convert_type(q, jnp.uint8).astype(jnp.uint16)
            return bytes_4D, jnp.max(jnp.abs(h), 1)

        def norm_half(half: int, step: Array, most: Array) -> Array:
            pair = (step * WARPGROUPS + warpgroup) * norm.ROWS
            at = packed.at[pl.ds(pair, norm.ROWS), pl.ds(0, D)]
            values, peaks = cast_rows(pl.ds(row + half * PAIRS + pair, norm.ROWS))
            if half:
                low = hopper.untyped.load(at, layout=layout, optimized=False)
                values = low | (values << jnp.uint16(8))
            at[...] = values
            return jnp.maximum(most, peaks)

        def transpose_columns(n: Array, _: None) -> None:
            columns = pl.ds((n * WARPGROUPS + warpgroup) * COLUMNS, COLUMNS)
            both = plgpu.load(packed.at[:, columns].T, layout=hopper.MATRIX)
            for half, byte in enumerate((both & jnp.uint16(0xFF), both >> jnp.uint16(8))):
                tile = halves.at[warpgroup, half]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # of this tile, not of the other
                tile[...] = lax.bitcast_convert_type(byte.astype(jnp.uint8), E4M3)
                plgpu.commit_smem()
                at = pl.ds(row + half * PAIRS, PAIRS)
                plgpu.copy_smem_to_gmem(tile, qt_ref.at[columns, at])

        none = hopper.untyped.layout_cast(jnp.zeros(norm.ROWS, jnp.float32), layout.reduce(1))
        steps = PAIRS // (norm.ROWS * WARPGROUPS)
        most = none
        for half in (0, 1):
            most = lax.fori_loop(0, steps, functools.partial(norm_half, half), most)
        most_ref[pl.ds((block * WARPGROUPS + warpgroup) * norm.ROWS, norm.ROWS)] = most
        hopper.bar_sync(BARRIER, WARPGROUPS)
        lax.fori_loop(0, D // (COLUMNS * WARPGROUPS), transpose_columns, None)
        plgpu.wait_smem_to_gmem(0)

    flat = [x if name == "scales" else x.reshape(-1, D) for name, x in given.items()]
    R = flat[0].shape[0]
    blocks = R // ROWS
    struct = jax.ShapeDtypeStruct
    out_type = [
        like(flat[0]), struct((R,), jnp.float32), struct((R, D), E4M3), struct((D, R), E4M3),
        struct((blocks * WARPGROUPS * norm.ROWS,), jnp.float32),
    ]  # fmt: skip
    s_RD, *others = hopper.pallas_kernel(
        norm_cast,
        out_type=out_type,
        scratch_types=dict(
            packed=plgpu.SMEM((PAIRS, D + PAD), jnp.uint16),
            halves=hopper.tiles((WARPGROUPS, 2, COLUMNS, PAIRS), E4M3),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
        interpret=options.interpret,
    )(*flat, multiplier.reshape(1))
    return [s_RD.reshape(x_BTD.shape), *others]
