"""Linear + cross-entropy with the logits' matmul in float8, the two gradient matmuls in x's dtype.

The gradients use the rounded logits and the unrounded x and w (straight-through). Float8 gradient
matmuls would need a cast of a logits-sized array, which costs what float8 saves; x and w are small.
"""

from typing import Any

from jaxtrain_kernels.cross_entropy import fp8, hopper, xla
from jaxtrain_kernels.cross_entropy.hopper import rows
from jaxtrain_kernels.dispatch import Target, target
from jaxtrain_kernels.matmul.fp8 import E4M3, Fp8, fp8_product, fp8_quantize


def supports(target: Target, x_ND, w_DV) -> str | None:
    return fp8.supports(target, x_ND, w_DV)


def linear_cross_entropy(x_ND, w_DV, labels_N, weights_N, **options):
    """Backend of the public function; the pass over the logits uses the fastest kernel."""
    ours = hopper.supports(target(), x_ND, w_DV) is None
    return xla.linear_cross_entropy(
        x_ND, w_DV, labels_N, weights_N, row_pass=rows.loss_rows if ours else None,
        logits_of=(quantized, float8_logits), **options,
    )  # fmt: skip


def quantized(w_DV: Any) -> Fp8:
    return fp8_quantize(w_DV, E4M3, implementation="xla")


def float8_logits(x_CD: Any, w_fp8: Fp8) -> Any:
    """x @ w in x's dtype, multiplied in float8."""
    x_fp8 = fp8_quantize(x_CD, E4M3, implementation="xla")
    return fp8_product(x_fp8.q_MK, w_fp8.q_KM, x_fp8.scale * w_fp8.scale, x_CD.dtype)
