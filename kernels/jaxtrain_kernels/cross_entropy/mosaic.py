"""Linear + cross-entropy as in `xla`, with the pass over the logits as one kernel for Hopper."""

from jaxtrain_kernels.cross_entropy import mosaic_rows, xla
from jaxtrain_kernels.dispatch import Target


def supports(target: Target, x_ND, w_DV) -> str | None:
    if target.platform != "cuda":
        return f"needs an NVIDIA GPU, this is {target.platform}"
    if target.compute_capability != (9, 0):
        return f"needs compute capability 9.0 (H100, H200), this is {target.compute_capability}"
    return mosaic_rows.refuses(w_DV.shape[1], x_ND.dtype)


def linear_cross_entropy(x_ND, w_DV, labels_N, weights_N, **options):
    """As the public function."""
    return xla.linear_cross_entropy(
        x_ND, w_DV, labels_N, weights_N, row_pass=mosaic_rows.loss_rows, **options
    )
