"""Linear + cross-entropy as in `xla`, with one Hopper kernel for the pass over the logits."""

from jaxtrain_kernels import hopper
from jaxtrain_kernels.cross_entropy import xla
from jaxtrain_kernels.cross_entropy.hopper import rows
from jaxtrain_kernels.dispatch import Target


def supports(target: Target, x_ND, w_DV) -> str | None:
    return hopper.unsupported_reason(target) or rows.unsupported_reason(w_DV.shape[1], x_ND.dtype)


def linear_cross_entropy(x_ND, w_DV, labels_N, weights_N, **options):
    """Backend of the public function."""
    return xla.linear_cross_entropy(
        x_ND, w_DV, labels_N, weights_N, row_pass=rows.loss_rows, **options
    )
