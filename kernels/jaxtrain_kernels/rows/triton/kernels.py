"""Kernels of `rows.triton`: one program per token, or per head of a token."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def _read(ref, *index, mask):
    return plgpu.load(ref.at[index], mask=mask, other=0.0).astype(jnp.float32)


def _norm(s_D, eps: float, channels: int):
    """s / rms(s); channels: number of channels of s without zero padding."""
    return s_D * jax.lax.rsqrt((s_D * s_D).sum(0) / channels + eps)


def _call(kernel, name: str, grid, out_shape, warps: int, interpret: bool, arrays):
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arrays)


def _sums_and_norms(name: str, sum_of, eps: float, interpret: bool, *arrays):
    """Return (s, s / rms(s)) for each token's s = sum_of(*arrays). arrays: [B, T, D] or scalars."""
    B, T, D = arrays[0].shape

    def kernel(*refs):
        *in_refs, s_ref, out_ref = refs
        r, channels = pl.program_id(0), jnp.arange(pl.next_power_of_2(D))
        inside = channels < D
        read = lambda ref: ref[0] if ref.ndim == 1 else _read(ref, r, channels, mask=inside)
        s_D = sum_of(*map(read, in_refs)).astype(s_ref.dtype).astype(jnp.float32)
        plgpu.store(s_ref.at[r, channels], s_D.astype(s_ref.dtype), mask=inside)
        y_D = _norm(s_D, eps, D).astype(out_ref.dtype)
        plgpu.store(out_ref.at[r, channels], y_D, mask=inside)

    out = jax.ShapeDtypeStruct((B * T, D), arrays[0].dtype)
    rows = [x.reshape(B * T, D) if x.ndim else x.reshape(1) for x in arrays]
    warps = min(8, max(1, pl.next_power_of_2(D) // 256))
    found = _call(kernel, name, (B * T,), [out, out], warps, interpret, rows)
    return tuple(x.reshape(B, T, D) for x in found)


@functools.partial(jax.jit, static_argnums=(0, 1))
def residual_norm(eps: float, interpret: bool, x_BTD, y_BTD):
    """Return (s, s / rms(s)) for s = x + y. All calls of a shape share one trace and one kernel."""
    add = lambda x, y: x + y
    return _sums_and_norms("residual_norm", add, eps, interpret, x_BTD, y_BTD)


@functools.partial(jax.jit, static_argnums=(0, 1))
def mixed_norm(eps: float, interpret: bool, x_BTD, y_BTD, x0_BTD, a, b):
    """Return (s, s / rms(s)) for s = a (x + y) + b x0; y None = 0."""
    if y_BTD is None:
        mix = lambda x, x0, a, b: a * x + b * x0
        return _sums_and_norms("mixed_norm", mix, eps, interpret, x_BTD, x0_BTD, a, b)
    dtype = x_BTD.dtype
    mix = lambda x, y, x0, a, b: a * (x + y).astype(dtype).astype(jnp.float32) + b * x0
    return _sums_and_norms("mixed_norm", mix, eps, interpret, x_BTD, y_BTD, x0_BTD, a, b)


@functools.partial(jax.jit, static_argnums=(0, 1))
def rope_norm(eps: float, interpret: bool, q_BTNH, k_BTKH, cos_BTH, sin_BTH):
    """Rotate and divide by the root mean square: one program per query or key head of a token."""
    (B, T, N, H), K = q_BTNH.shape, k_BTKH.shape[2]
    shared = len(cos_BTH) == 1  # all batch rows have the same positions

    def turn(x_ref, out_ref, r, n, cos_H, sin_H):
        h_H = jnp.arange(pl.next_power_of_2(H))
        inside = h_H < H
        other = jnp.where(h_H < H // 2, h_H + H // 2, h_H - H // 2)
        x_H = _read(x_ref, r, n, h_H, mask=inside)
        turned_H = x_H * cos_H + _read(x_ref, r, n, other, mask=inside) * sin_H
        y_H = turned_H * jax.lax.rsqrt((x_H * x_H).sum(0) / H + eps)
        plgpu.store(out_ref.at[r, n, h_H], y_H.astype(out_ref.dtype), mask=inside)

    def kernel(q_ref, k_ref, cos_ref, sin_ref, q_out_ref, k_out_ref):
        r, n = pl.program_id(0), pl.program_id(1)
        h_H = jnp.arange(pl.next_power_of_2(H))
        row_of_table = jax.lax.rem(r, T) if shared else r
        cos_H, sin_H = (_read(ref, row_of_table, h_H, mask=h_H < H) for ref in (cos_ref, sin_ref))
        pl.when(n < N)(lambda: turn(q_ref, q_out_ref, r, n, cos_H, sin_H))
        pl.when(n >= N)(lambda: turn(k_ref, k_out_ref, r, n - N, cos_H, sin_H))

    arrays = [x.reshape(-1, *x.shape[2:]) for x in (q_BTNH, k_BTKH, cos_BTH, sin_BTH)]
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:2]]
    found = _call(kernel, "rope_norm", (B * T, N + K), out, 1, interpret, arrays)
    return found[0].reshape(q_BTNH.shape), found[1].reshape(k_BTKH.shape)
