"""Floating-point formats of 4, 6 and 8 bits, emulated in float32: rounding and block scaling.

Elements are those of the OCP Microscaling (MX) specification 1.0. A value rounds to nearest, ties
to even, or at random without bias (stochastic rounding); larger values saturate at the largest
number. Results are bit for bit those of `ml_dtypes`, on every device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Format(NamedTuple):
    """A format with a sign, an exponent and `mantissa` bits; its smallest normal number is
    2^min_exponent."""

    mantissa: int
    min_exponent: int
    max_exponent: int  # of the largest number
    largest: float


E4M3 = Format(3, -6, 8, 448.0)
E5M2 = Format(2, -14, 15, 57344.0)
E2M3 = Format(3, 0, 2, 7.5)
E3M2 = Format(2, -2, 4, 28.0)
E2M1 = Format(1, 0, 2, 6.0)


def exponent(x: Float[Array, "*S"]) -> Int[Array, "*S"]:
    """floor(log2 |x|), from the bits of float32; -127 for zero, 128 if x is not finite."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return ((bits >> 23) & 0xFF) - 127


def power_of_two(n: Int[Array, "*S"]) -> Float[Array, "*S"]:
    """2^n in float32, n in -126 .. 127."""
    return jax.lax.bitcast_convert_type((n + 127) << 23, jnp.float32)


def times_power(x: Float[Array, "*#S"], n: Int[Array, "*#S"]) -> Float[Array, "*S"]:
    """x 2^n for n in -127 .. 127, as two factors, so that both are normal numbers."""
    return x * power_of_two(n // 2) * power_of_two(n - n // 2)


def random_fraction(key: Array, shape: tuple[int, ...]) -> Float[Array, "*S"]:
    """16 random bits as a float32 in (0, 1), never 0; the sum with an integer is exact."""
    return (jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32) + 0.5) / 65536


def round_to(x: Float[Array, "*S"], form: Format, key: Array | None = None) -> Float[Array, "*S"]:
    """Round to a format, as float32. key: for stochastic rounding; None: to nearest."""
    x32 = x.astype(jnp.float32)
    ulp_exponent = jnp.clip(exponent(x32), form.min_exponent, form.max_exponent) - form.mantissa
    steps = jnp.abs(x32) * power_of_two(-ulp_exponent)
    whole = jnp.round(steps) if key is None else jnp.floor(steps + random_fraction(key, x.shape))
    return jnp.copysign(jnp.minimum(whole * power_of_two(ulp_exponent), form.largest), x32)


def mx_exponent(amax: Float[Array, "*S"], form: Format) -> Int[Array, "*S"]:
    """Exponent of a block's e8m0 scale: floor(log2 amax) - exponent of the largest number."""
    return jnp.clip(exponent(amax) - form.max_exponent, -127, 127)


def round_mx(tiles: Array, form: Format, key: Array | None) -> Array:
    """Round blocks to a power-of-two scale times elements: MXFP8, MXFP6, MXFP4."""
    amax = block_amax(tiles)
    shift = mx_exponent(amax, form)
    rounded = times_power(round_to(times_power(tiles, -shift), form, key), shift)
    return jnp.where(jnp.isfinite(amax), rounded, jnp.nan)


def round_nvfp4(tiles: Array, tensor_scale: Array, key: Array | None) -> Array:
    """Round blocks to an e4m3 scale times e2m1 elements, in units of the tensor's scale."""
    tiles = tiles / tensor_scale
    amax = block_amax(tiles)
    scale = round_to(amax / E2M1.largest, E4M3)
    rounded = scale * round_to(tiles / jnp.where(scale > 0, scale, 1.0), E2M1, key)
    return jnp.where(jnp.isfinite(amax), rounded, jnp.nan)


def nvfp4_tensor_scale(x: Float[Array, "*S"]) -> Float[Array, ""]:
    """Tensor scale, for which the largest block's scale is e4m3's largest number; 1 for zeros."""
    scale = jnp.max(jnp.abs(x)).astype(jnp.float32) / (E4M3.largest * E2M1.largest)
    return jnp.where(scale > 0, scale, 1.0)


def block_amax(tiles: Float[Array, "*S M m N n"]) -> Float[Array, "*S M 1 N 1"]:
    return jnp.max(jnp.abs(tiles), axis=(-3, -1), keepdims=True)


def to_tiles(x: Float[Array, "*S M N"], rows: int, columns: int) -> Float[Array, "*S m r n c"]:
    """Split into float32 blocks of rows x columns, zero-padded at the end."""
    *lead, M, N = x.shape
    pads = [(0, 0)] * len(lead) + [(0, -M % rows), (0, -N % columns)]
    x32 = jnp.pad(x.astype(jnp.float32), pads)
    return x32.reshape(*lead, -(-M // rows), rows, -(-N // columns), columns)


def from_tiles(tiles: Array, shape: tuple[int, ...]) -> Float[Array, "*S M N"]:
    """Join blocks into the array [.., M, N], without the padding."""
    *lead, m, rows, n, columns = tiles.shape
    return tiles.reshape(*lead, m * rows, n * columns)[..., : shape[-2], : shape[-1]]
