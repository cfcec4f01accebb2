"""Router of a mixture of experts: logits in float32, scores, the best experts, their weights.

And sums over tokens for the balance and z losses, each of some tokens of a sequence.
"""

from typing import Literal, NamedTuple

from jaxtyping import Array, Float

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.moe_router import reference, separate, triton

# Fastest first: the first that can serve is the default.
BACKENDS = {"triton": triton, "reference": reference}
PERMUTE_BACKENDS = {"triton": triton, "separate": separate, "reference": reference}
ScoreFunction = Literal["sigmoid", "softmax"]


class Routing(NamedTuple):
    """Experts and weights of each token; sums over each of the b parts of a sequence.

    Sums over all parts are those of the sequence. A backend has as many parts as it likes.
    """

    x_BTD: Array  # the tokens; experts that read them here have their gradient added in one pass
    chosen_BTk: Array  # int32, the best expert first
    weights_BTk: Array  # float32; a token's weights sum to 1
    hits_BbE: Array  # float32: number of choices of each expert
    shares_BbE: Array  # float32: sum of the tokens' scores, each token's divided by their sum
    z_Bb: Array  # float32: sum of the tokens' logsumexp(logits)^2


class PermutedRouting(NamedTuple):
    """Tokens and weights in the rows of their experts, and the sums of `Routing`.

    The rows of all B sequences together are sorted by expert and, within an expert, by token;
    M = T k rows for each sequence.
    """

    rows_BMD: Array
    weights_BM1: Array  # float32; of each row
    row_BTk: Array  # int32, the row of each copy: 0 .. B M - 1
    hits_BbE: Array
    shares_BbE: Array
    z_Bb: Array


def moe_router(
    x_BTD: Float[Array, "B T D"],
    router_DE: Float[Array, "D E"],
    bias_E: Float[Array, "E"] | None,
    *,
    top_k: int,
    score_function: ScoreFunction,
    implementation: str | None = None,
) -> Routing:
    """Choose the top_k experts by score plus bias, and weight them by score.

    Logits are exact products of x and the float32 matrix, summed in float32. Gradients: of x and
    router, from x, weights, shares and z; the bias has none. Raises ValueError for an unknown
    implementation.
    """
    reasons = {name: b.supports(target(), x_BTD, router_DE) for name, b in BACKENDS.items()}
    signature = f"{x_BTD.dtype}{list(x_BTD.shape)} {router_DE.shape[1]} experts"
    backend = BACKENDS[choose_backend("moe_router", reasons, implementation, signature)]
    arrays = x_BTD, router_DE, bias_E
    return Routing(*backend.moe_router(*arrays, top_k=top_k, score_function=score_function))


def moe_router_permute(
    x_BTD: Float[Array, "B T D"],
    router_DE: Float[Array, "D E"],
    bias_E: Float[Array, "E"] | None,
    *,
    top_k: int,
    score_function: ScoreFunction,
    implementation: str | None = None,
) -> PermutedRouting:
    """`moe_router`, and `moe_permute` of what it chose.

    In one operation, since the gradient of x is a sum over its rows and of the router's, in one
    pass. Gradients: of x and router, from rows, weights, shares and z. Raises ValueError for an
    unknown implementation.
    """
    given = target(), x_BTD, router_DE, top_k
    reasons = {name: b.supports_permute(*given) for name, b in PERMUTE_BACKENDS.items()}
    signature = f"{x_BTD.dtype}{list(x_BTD.shape)} {router_DE.shape[1]} experts"
    name = choose_backend("moe_router_permute", reasons, implementation, signature)
    run = PERMUTE_BACKENDS[name].moe_router_permute
    arrays = x_BTD, router_DE, bias_E
    return PermutedRouting(*run(*arrays, top_k=top_k, score_function=score_function))
