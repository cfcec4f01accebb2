"""Linear + cross-entropy with all three matmuls in float8, like `fp8`, with Hopper kernels.

On Hopper, one kernel reads the logits and writes their gradient in float8, and another transposes
it: no array of the logits' size is cast.
"""

from jaxtrain_kernels import hopper
from jaxtrain_kernels.cross_entropy import fp8, xla
from jaxtrain_kernels.cross_entropy.hopper import rows
from jaxtrain_kernels.cross_entropy.hopper.transpose import SIDE, fp8_transpose
from jaxtrain_kernels.dispatch import Target, target
from jaxtrain_kernels.matmul.fp8 import E5M2


def supports(target: Target, x_ND, w_DV) -> str | None:
    return fp8.supports(target, x_ND, w_DV)


def linear_cross_entropy(x_ND, w_DV, labels_N, weights_N, *, softcap, z_loss, valid_vocab, chunk):
    """Backend of the public function; x, w and the logits' gradient are rounded to float8."""
    chunk = chunk or xla.default_chunk(len(x_ND), len(w_DV.T))
    passes = fp8.Passes(fp8.row_pass, None)
    if served(target(), x_ND, w_DV):
        passes, chunk = fp8.Passes(row_pass, None), -(-chunk // SIDE) * SIDE
    options = xla.CrossEntropyOptions(softcap, z_loss, valid_vocab, chunk)
    return fp8.with_passes(passes, options, x_ND, w_DV, labels_N, weights_N)


def served(target: Target, x_ND, w_DV) -> bool:
    """Whether the Hopper kernels support these logits."""
    unsupported = hopper.unsupported_reason(target)
    return not (unsupported or rows.unsupported_reason(w_DV.shape[1], x_ND.dtype, fp8=True))


def row_pass(logits_CV, labels_C, weights_C, *, interpret: hopper.Interpret = False, **options):
    """Hopper kernels for `fp8.row_pass`. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    nll_C, lse_C, d_CV = rows.loss_rows(
        logits_CV, labels_C, weights_C, gradient_dtype=E5M2, interpret=interpret, **options
    )
    return nll_C, lse_C, d_CV, fp8_transpose(d_CV, interpret=interpret)
