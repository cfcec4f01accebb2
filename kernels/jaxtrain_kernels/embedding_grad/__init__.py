"""Gradient of an embedding: each row of the table gets the sum of its tokens' gradients."""

from jaxtyping import Array, DTypeLike, Float, Int

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.embedding_grad import reference, triton

# Fastest first: the first that can serve is the default.
BACKENDS = {"triton": triton, "reference": reference}


def embedding_grad(
    g_MD: Float[Array, "M D"],
    token_M: Int[Array, " M"],
    size: int,
    dtype: DTypeLike,
    *,
    implementation: str | None = None,
) -> Float[Array, "V D"]:
    """Sums of the rows of g with the same token, in float32, rounded to `dtype`; V = size.

    token: indices below V. Raises ValueError for an unknown implementation, NotImplementedError
    where it cannot serve.
    """
    reasons = {name: b.supports(target(), g_MD, size) for name, b in BACKENDS.items()}
    signature = f"{g_MD.dtype}{list(g_MD.shape)} into {size} rows"
    backend = BACKENDS[choose_backend("embedding_grad", reasons, implementation, signature)]
    return backend.embedding_grad(g_MD, token_M, size, dtype)
