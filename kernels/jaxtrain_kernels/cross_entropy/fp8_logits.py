"""Linear + cross-entropy with the logits' matmul in float8, the gradients' two in x's dtype.

The gradients are those of the rounded logits, taken at x and w as they are (straight through).
Their operands would need casts of whole logits, which cost what float8 saves; x and w are small.
"""

from typing import Any

from jaxtrain_kernels.cross_entropy import fp8, hopper, xla
from jaxtrain_kernels.cross_entropy.hopper import rows
from jaxtrain_kernels.dispatch import Target, target
from jaxtrain_kernels.matmul.fp8 import E4M3, Fp8, fp8_product, fp8_quantize


def supports(target: Target, x_ND, w_DV) -> str | None:
    return fp8.supports(target, x_ND, w_DV)


def linear_cross_entropy(x_ND, w_DV, labels_N, weights_N, **options):
    """As the public function, the pass over the logits by the fastest backend."""
    ours = hopper.supports(target(), x_ND, w_DV) is None
    return xla.linear_cross_entropy(
        x_ND, w_DV, labels_N, weights_N, row_pass=rows.loss_rows if ours else None,
        logits_of=(quantized, float8_logits), **options,
    )  # fmt: skip


def quantized(w_DV: Any) -> Fp8:
    return fp8_quantize(w_DV, E4M3, implementation="xla")


def float8_logits(x_CD: Any, w_fp8: Fp8) -> Any:
    """x w in x's dtype."""
    x_fp8 = fp8_quantize(x_CD, E4M3, implementation="xla")
    return fp8_product(x_fp8.q_MK, w_fp8.q_KM, x_fp8.scale * w_fp8.scale, x_CD.dtype)
