"""Matmuls of a training step in float8 (Micikevicius et al. 2022, arXiv:2209.05433).

All three matmuls of a linear layer are in 8 bits: y = x w of e4m3 by e4m3, dx = dy w^T and
dw = x^T dy of e5m2 by e4m3, since gradients need range. A tensor has one scale, a power of two
computed from its amax. A power of two is exact in any dtype, so scaling never rounds; it costs no
accuracy, only at most one bit of range.

On Hopper both operands of a float8 matmul must be contiguous along the contracted dim, hence a
matrix and its transpose in `Fp8`. XLA turns a dot of float8 arrays into cuBLASLt's float8 matmul
(`__cublas$lt$matmul$f8`) with the factor on its result as the scale.
"""

import functools
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike, Float

from jaxtrain_kernels.dispatch import Target, choose_backend, target
from jaxtrain_kernels.matmul.fp8 import hopper, reference, xla
from jaxtrain_kernels.matmul.fp8.functions import Function, itself
from jaxtrain_kernels.matmul.fp8.xla import fp8_amax

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
INPUT = "fp8_input"  # name of a cast input for the policies of `jax.checkpoint`
# Backends of the pass that scales, casts and transposes; the first that can serve is the default.
# XLA's is one kernel too, which can also compute the tensor (a norm, say), but it is slower. If it
# also finds the amax, the transpose is a second kernel. It alone supports `jax.vmap`, and arrays
# that XLA divides among devices; a caller with a mesh may pass a `CastBackend` of its own.
BACKENDS: dict[str, Any] = {"mosaic": hopper, "xla": xla, "reference": reference}


@runtime_checkable
class CastBackend(Protocol):
    """The two passes of a backend, as in `reference`; hashable.

    The last result of `cast_measured` is amaxes of parts of the value, in any shape.
    """

    def cast(
        self, arrays: tuple[Array, ...], multiplier: Array, dtype: DTypeLike, function: Function,
        *, saturate: bool,
    ) -> tuple[Array, Array]: ...  # fmt: skip

    def cast_measured(
        self, arrays: tuple[Array, ...], multiplier: Array, dtype: DTypeLike, function: Function
    ) -> tuple[Array, Array, Array]: ...


Implementation = str | CastBackend | None


class Fp8(NamedTuple):
    """A matrix as q x scale, in both layouts; scale is a power of two."""

    q_MK: Array
    q_KM: Array
    scale: Array


class Fp8Input(NamedTuple):
    """A matmul's input, cast to e4m3 by the pass that computed it; seen: amaxes of its parts."""

    fp8: Fp8
    seen: Array


def fp8_unsupported(where: Target | None = None) -> str | None:
    """Why the device has no float8 matmuls; None if it has, or (a CPU) emulates them for tests."""
    platform, capability, _ = where or target()
    if platform == "cpu" or (platform == "cuda" and capability and capability >= (8, 9)):
        return None
    this = f"{platform} {'.'.join(map(str, capability))}" if capability else platform
    return (
        "float8 matmuls need an NVIDIA GPU of compute capability 8.9 or later (L4, RTX 4090, "
        f"H100, H200, B200), this is {this}: its tensor cores have no float8"
    )


def fp8_quantize(
    x_MK: Float[Array, "M K"],
    dtype: DTypeLike = E4M3,
    *,
    amax: Float[Array, ""] | None = None,
    implementation: Implementation = None,
) -> Fp8:
    """Quantize x to float8, with its transpose, in one pass after the one that finds the amax.

    amax: a known amax to scale by, which saves that pass. Larger values saturate, and 0 means a
    scale of 1. Without it x's own amax is used: no finite value saturates, and inf and nan do not
    spread to other values.
    Raises NotImplementedError on a device without float8 matmuls.
    """
    if amax is None:
        return fp8_quantize_function(itself, (x_MK,), dtype, None, implementation)[0]
    scale = given_scale(amax, dtype)
    backend = choose_cast((x_MK,), dtype, implementation)
    q_MK, q_KM = backend.cast((x_MK,), 1 / scale, dtype, itself, saturate=True)
    return Fp8(q_MK, q_KM, scale)


def fp8_quantize_delayed(
    x_MK: Float[Array, "M K"],
    dtype: DTypeLike,
    amax: Float[Array, ""],
    *,
    implementation: Implementation = None,
) -> tuple[Fp8, Float[Array, ""]]:
    """Return `fp8_quantize` by an earlier amax, and x's own amax, which the same pass finds."""
    fp8, seen = fp8_quantize_function(itself, (x_MK,), dtype, amax, implementation)
    return fp8, jnp.max(seen)


def fp8_quantize_function(
    function: Function,
    arrays_MK: tuple[Array, ...],
    dtype: DTypeLike,
    amax: Array | None,
    implementation: Implementation,
) -> tuple[Fp8, Any]:
    """Quantize function(*arrays), one of `fp8.functions`. If an earlier amax is given to scale by,
    also return the amaxes of the value's parts (else None). Nothing is written in the arrays'
    dtype. amax: as of `amax_in_slots`.
    """
    backend = choose_cast(arrays_MK, dtype, implementation)
    if amax is None:
        scale = fp8_scale(fp8_amax(*arrays_MK, function=function), dtype)
        q_MK, q_KM = backend.cast(arrays_MK, 1 / scale, dtype, function, saturate=False)
        return Fp8(q_MK, q_KM, scale), None
    scale = given_scale(known_amax(amax), dtype)
    q_MK, q_KM, seen = backend.cast_measured(arrays_MK, 1 / scale, dtype, function)
    return Fp8(q_MK, q_KM, scale), seen


def fp8_input(
    x_MK: Float[Array, "M K"],
    amax: Float[Array, "*P"] | None,
    *,
    function: Function = itself,
    implementation: Implementation = None,
) -> Fp8Input:
    """Cast function(x), a matmul's input, to e4m3, as `fp8_quantize_function` does.

    The transpose, which the backward pass needs, is named INPUT with the scale and the amax, so
    that a `jax.checkpoint` policy can save them.
    """
    return named(Fp8Input(*fp8_quantize_function(function, (x_MK,), E4M3, amax, implementation)))


def named(cast: Fp8Input) -> Fp8Input:
    """Name what the backward pass needs of a cast INPUT."""
    name = functools.partial(checkpoint_name, name=INPUT)
    q_MK, *saved = cast.fp8
    return Fp8Input(Fp8(q_MK, *map(name, saved)), jax.tree.map(name, cast.seen))


def choose_cast(
    arrays_MK: tuple[Any, ...], dtype: DTypeLike, implementation: Implementation
) -> CastBackend:
    """The backend that casts arrays of these shapes; a `CastBackend` is itself.

    Raises NotImplementedError on a device without float8 matmuls, or where a named backend cannot.
    """
    if reason := fp8_unsupported():
        raise NotImplementedError(reason)
    if not isinstance(implementation, str | None):
        return implementation
    reasons = {name: b.supports(target(), *arrays_MK) for name, b in BACKENDS.items()}
    given = " ".join(f"{x.dtype}{list(x.shape)}" for x in arrays_MK)
    signature = f"{given} to {jnp.dtype(dtype)}"
    return BACKENDS[choose_backend("fp8_quantize", reasons, implementation, signature)]


def known_amax(amax: Float[Array, "*P"]) -> Float[Array, ""]:
    """The amax of earlier steps, which an array has in each of its slots."""
    return amax.reshape(-1)[0]


def amax_in_slots(seen: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Amaxes of parts in an array of this shape, with the same maximum: the cotangent of the amax
    of earlier steps, which has this shape.

    A kernel finds one amax for each of its blocks. With a slot for each, a step takes the maximum
    of all layers' in one kernel; a scalar, or more parts than slots, take a kernel for each tensor.
    """
    parts, slots = seen.reshape(-1), math.prod(shape)
    rows = -(-parts.size // slots)
    parts = jnp.pad(parts, (0, rows * slots - parts.size))
    if rows > 1:
        parts = jnp.max(parts.reshape(rows, slots), axis=0)
    return parts.reshape(shape)


def given_scale(amax: Array, dtype: DTypeLike) -> Array:
    """`fp8_scale` of an amax that may be 0, which means a scale of 1."""
    return jnp.where(amax > 0, fp8_scale(amax, dtype), 1.0)


def fp8_scale(amax: Float[Array, "*L"], dtype: DTypeLike) -> Float[Array, "*L"]:
    """Smallest power of two such that values up to amax, divided by it, fit the dtype.

    It is bounded, so that the product of two scales is a normal number, and so that no scale made
    from zeros, inf or nan spreads them to other values.
    """
    largest = float(jnp.finfo(jnp.float32).max)
    amax = jnp.where(jnp.isfinite(amax), jnp.maximum(amax, 2.0**-48), largest)
    ratio = float(jnp.finfo(dtype).max) / amax
    exponent = lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(0xFF800000)
    return 1 / lax.bitcast_convert_type(exponent, jnp.float32)


def fp8_matmul(
    x_MK: Float[Array, "M K"],
    w_KN: Float[Array, "K N"],
    *,
    w_fp8: Fp8 | None = None,
    amax_2: Float[Array, "2 *P"] | None = None,
    x_cast: Fp8Input | None = None,
    fast_accum: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "M N"]:
    """x w in x's dtype, accumulated in float32, with all three matmuls in float8.

    w_fp8: w in e4m3, quantized once for many calls; w itself then only receives the gradient.
    amax_2: delayed scaling: amaxes of x and of y's gradient in earlier steps, to scale by (0 = no
    scale yet). Its cotangent is these amaxes in this call; the caller keeps the amax history in its
    training state. With slots, as of `amax_in_slots`, the cotangent is amaxes of parts.
    x_cast: x, already cast with the scale of its amax in amax_2; x itself then only receives the
    gradient, and is not read.
    fast_accum: x's gradient is summed with the tensor cores' 14 bits, as y is, not in float32.
    implementation: of `fp8_quantize`. Raises NotImplementedError on a device without float8.
    """
    if w_fp8 is None:
        w_fp8 = fp8_quantize(lax.stop_gradient(w_KN), E4M3, implementation=implementation)
    return _matmul(MatmulOptions(implementation, fast_accum), x_MK, w_KN, w_fp8, amax_2, x_cast)


class MatmulOptions(NamedTuple):
    """Arguments of `fp8_matmul` that are not arrays."""

    implementation: Implementation
    fast_accum: bool


class SavedMatmul(NamedTuple):
    """What the backward pass needs: of x the transpose. like_w: empty, of w's dtype."""

    x_KM: Array
    x_scale: Array
    like_w: Array
    w_KN: Array
    w_scale: Array
    amax_2: Array | None
    seen: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(options, x_MK, w_KN, w_fp8, amax_2, x_cast):
    return matmul_forward(options, x_MK, w_KN, w_fp8, amax_2, x_cast)[0]


def matmul_forward(options: MatmulOptions, x_MK, w_KN, w_fp8, amax_2, x_cast):
    """Return (x w, a `SavedMatmul`)."""
    amax = None if amax_2 is None else amax_2[0]
    x_fp8, seen = x_cast or fp8_input(x_MK, amax, implementation=options.implementation)
    y_MN = fp8_product(x_fp8.q_MK, w_fp8.q_KM, x_fp8.scale * w_fp8.scale, x_MK.dtype)
    saved = x_fp8.q_KM, x_fp8.scale, w_KN[:0], w_fp8.q_MK, w_fp8.scale, amax_2, seen
    return y_MN, SavedMatmul(*saved)


def _backward(options, saved, dy_MN):
    amax = None if saved.amax_2 is None else saved.amax_2[1]
    dy, seen_dy = fp8_quantize_function(itself, (dy_MN,), E5M2, amax, options.implementation)
    return matmul_backward(options, saved, dy, seen_dy, dy_MN.dtype)


def matmul_backward(
    options: MatmulOptions, saved: SavedMatmul, dy: Fp8, seen_dy: Array | None, dtype: DTypeLike
):
    """Gradients of x (in this dtype), w, w_fp8, amax_2 and x_cast."""
    x_KM, x_scale, like_w, w_KN, w_scale, amax_2, seen = saved
    exact = not options.fast_accum
    dx_MK = fp8_product(dy.q_MK, w_KN, dy.scale * w_scale, dtype, exact)
    dw_KN = fp8_product(x_KM, dy.q_KM, x_scale * dy.scale, like_w.dtype, exact=True)
    maxima = None
    if amax_2 is not None and seen is not None and seen_dy is not None:
        maxima = jnp.stack([amax_in_slots(x, amax_2.shape[1:]) for x in (seen, seen_dy)])
    return dx_MK, dw_KN, None, maxima, None


_matmul.defvjp(matmul_forward, _backward)


def fp8_product(
    a_MK: Array, b_NK: Array, scale: Array, dtype: DTypeLike, exact: bool = False
) -> Array:
    """a b^T x scale. exact: accumulate in float32, where the tensor cores' own sum has fewer bits.

    The scale is cast to the result's dtype, so that XLA recognizes it as cuBLASLt's scale.
    """
    y_MN = lax.dot_general(
        a_MK, b_NK, (((1,), (1,)), ((), ())), preferred_element_type=dtype,
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
    )  # fmt: skip
    return y_MN * scale.astype(dtype)
