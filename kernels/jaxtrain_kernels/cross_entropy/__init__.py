"""Linear + cross-entropy of the language model head, without all logits in memory at once."""

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.cross_entropy import fp8, fp8_head, fp8_logits, hopper, reference, xla
from jaxtrain_kernels.dispatch import choose_backend, target

# The first backend that can serve the call is the default.
BACKENDS = {
    "mosaic": hopper, "xla": xla, "fp8": fp8, "fp8_head": fp8_head, "fp8_logits": fp8_logits,
    "reference": reference,
}  # fmt: skip
PER_TOKEN = {"xla": xla.per_token, "reference": reference.per_token}


def linear_cross_entropy(
    x_ND: Float[Array, "N D"],
    w_DV: Float[Array, "D V"],
    labels_N: Int[Array, "N"],
    weights_N: Float[Array, "N"],
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    valid_vocab: int | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """sum_n weights_n * (nll_n + z_loss * lse_n^2) in float32, for the logits x @ w.

    weights_N: 0 ignores a token, whose label may then be any value (-1). Weights get no gradient.
    softcap: logits become softcap * tanh(logits / softcap).
    z_loss: coefficient of the squared log of the softmax's denominator (PaLM, arXiv:2204.02311).
    valid_vocab: vocabulary columns from here on are padding and are left out of the softmax.
    chunk: number of tokens whose logits are in memory at once; by default chosen for the device.
    Raises ValueError for an unknown implementation.
    """
    reasons = {name: backend.supports(target(), x_ND, w_DV) for name, backend in BACKENDS.items()}
    call = dict(softcap=softcap, z_loss=z_loss, valid_vocab=valid_vocab, chunk=chunk)
    options = " ".join(f"{name}={value}" for name, value in call.items() if value)
    signature = f"{x_ND.dtype}{list(x_ND.shape)} V={w_DV.shape[1]} {options}".rstrip()
    backend = BACKENDS[choose_backend("linear_cross_entropy", reasons, implementation, signature)]
    return backend.linear_cross_entropy(x_ND, w_DV, labels_N, weights_N, **call)


def linear_cross_entropy_per_token(
    x_ND: Float[Array, "N D"],
    w_DV: Float[Array, "D V"],
    labels_N: Int[Array, "N"],
    *,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "N"]:
    """Negative log-likelihood of each token in float32 (nats).

    Arguments as in `linear_cross_entropy`. The gradient takes one matmul more than that of
    `linear_cross_entropy`, because the backward recomputes the logits.
    implementation: `xla` or `reference`; None = `xla`.
    """
    signature = f"{x_ND.dtype}{list(x_ND.shape)} V={w_DV.shape[1]}"
    reasons = dict.fromkeys(PER_TOKEN)
    name = choose_backend("linear_cross_entropy_per_token", reasons, implementation, signature)
    return PER_TOKEN[name](x_ND, w_DV, labels_N, softcap, valid_vocab, chunk)
