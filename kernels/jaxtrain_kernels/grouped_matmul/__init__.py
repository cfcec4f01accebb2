"""Grouped matmul for mixture of experts: each group of rows times its own matrix."""

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.grouped_matmul import hopper, reference, tokamax, xla

# Fastest first: the first that can serve is the default.
BACKENDS = {"mosaic": hopper, "tokamax": tokamax, "xla": xla, "reference": reference}


def grouped_matmul(
    x_MK: Float[Array, "M K"],
    w_EKN: Float[Array, "E K N"],
    sizes_E: Int[Array, "E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """x @ w[e] in x's dtype, e the group of each row; the first sizes_E[0] rows are group 0.

    Rows after the last group give zeros. Raises ValueError for an unknown implementation,
    NotImplementedError where the named one cannot serve.
    """
    reasons = {name: b.supports(target(), x_MK, w_EKN) for name, b in BACKENDS.items()}
    signature = f"{x_MK.dtype}{list(x_MK.shape)} {list(w_EKN.shape)}"
    backend = BACKENDS[choose_backend("grouped_matmul", reasons, implementation, signature)]
    return backend.grouped_matmul(x_MK, w_EKN, sizes_E)
