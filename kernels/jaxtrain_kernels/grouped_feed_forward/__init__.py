"""The experts' network with the squared ReLU: y = (relu(x W_up)^2 s) W_down, s a weight per row."""

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.grouped_feed_forward import hopper, matmuls, reference

# Fastest first: the first that can serve is the default.
BACKENDS = {"mosaic": hopper, "matmuls": matmuls, "reference": reference}


def grouped_feed_forward_relu2(
    x_MD: Float[Array, "M D"],
    up_EDF: Float[Array, "E D F"],
    down_EFD: Float[Array, "E F D"],
    weights_M1: Float[Array, "M 1"],
    sizes_E: Int[Array, "E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M D"]:
    """(relu(x up[e])^2 weights) down[e] in x's dtype, e the group of each row.

    The first sizes_E[0] rows are group 0; rows after the last group give zeros. The weights are not
    negative. Raises ValueError for an unknown implementation, NotImplementedError where the named
    one cannot serve.
    """
    reasons = {name: b.supports(target(), x_MD, up_EDF, down_EFD) for name, b in BACKENDS.items()}
    arrays = (x_MD, up_EDF, down_EFD)
    signature = " ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
    backend = BACKENDS[
        choose_backend("grouped_feed_forward_relu2", reasons, implementation, signature)
    ]
    return backend.grouped_feed_forward_relu2(*arrays, weights_M1, sizes_E)
