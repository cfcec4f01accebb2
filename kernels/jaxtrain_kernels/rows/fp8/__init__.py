"""Norms that also write their result in float8, in both layouts, for the matmuls that read it.

With delayed scaling the scale is known before the norm. So the pass that norms a row also casts it,
and finds its amax: the result is neither written nor read again in 16 bits. Values equal those of
the norm and a cast after it: they are rounded to 16 bits first.
"""

from typing import NamedTuple

from jax import lax
from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.matmul.fp8 import E4M3, Fp8, Fp8Input, given_scale, known_amax, named
from jaxtrain_kernels.rows.fp8 import hopper, reference, xla

# The first that can serve is the default.
BACKENDS = {"mosaic": hopper, "xla": xla, "reference": reference}


class QuantizedNorm(NamedTuple):
    """s, s / rms(s) and x0, as `rows.mixed_norm` returns them, and the norm in float8.

    The norm in 16 bits passes the gradient back. Of its values only those that are read are
    computed.
    """

    s_BTD: Array
    h_BTD: Array
    x0_BTD: Array | None
    cast: Fp8Input


def norm_quantized(
    x_BTD: Float[Array, "B T D"],
    y_BTD: Float[Array, "B T D"] | None,
    x0_BTD: Float[Array, "B T D"] | None,
    scales: tuple[Float[Array, ""], Float[Array, ""]] | None,
    amax: Float[Array, "*P"],
    *,
    eps: float,
    implementation: str | None = None,
) -> QuantizedNorm:
    """`rows.mixed_norm` with scales (a, b), or without them `rows.residual_norm` of x and y, cast
    to e4m3.

    y None = 0, with scales only; x0 is None without them. amax: of the norm in earlier steps, to
    scale by (in slots: `fp8.amax_in_slots`); larger values saturate, and 0 means a scale of 1. The
    casts have no gradient. Raises
    NotImplementedError where a named backend cannot serve, ValueError for an unknown one.
    """
    given = [x for x in (x_BTD, y_BTD, x0_BTD) if x is not None]
    reasons = {name: b.supports(target(), *given) for name, b in BACKENDS.items()}
    signature = f"{x_BTD.dtype}{list(x_BTD.shape)}"
    backend = BACKENDS[choose_backend("norm_quantized", reasons, implementation, signature)]
    scale = lax.stop_gradient(given_scale(known_amax(amax), E4M3))
    s_BTD, h_BTD, x0_BTD, q_MK, q_KM, seen = backend.norm_quantized(
        x_BTD, y_BTD, x0_BTD, scales, 1 / scale, eps=eps
    )
    return QuantizedNorm(s_BTD, h_BTD, x0_BTD, named(Fp8Input(Fp8(q_MK, q_KM, scale), seen)))
