"""Tokens to the rows of their experts and back: a counting sort, copies of rows, sums of rows.

A token n has k copies, one for each of its experts. `expert_places` gives each copy a row: rows are
sorted by expert and, within an expert, by token.
"""

from types import ModuleType

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.moe_permute import reference, triton

# Fastest first: the first that can serve is the default.
BACKENDS = {"triton": triton, "reference": reference}


def expert_places(
    chosen_Nk: Int[Array, "N k"], experts: int, *, implementation: str | None = None
) -> tuple[Int[Array, "N k"], Int[Array, "E"]]:
    """Return the row of each copy, sorted by expert, and each expert's number of rows.

    The sort is stable: equal to the inverse of `argsort(chosen.reshape(-1), stable=True)`. Both
    results are int32. Raises ValueError for an unknown implementation.
    """
    signature = f"{list(chosen_Nk.shape)} {experts} experts"
    backend = _backend("expert_places", implementation, signature, chosen_Nk, experts)
    return backend.expert_places(chosen_Nk, experts)


def moe_permute(
    x_ND: Float[Array, "N D"],
    weights_Nk: Float[Array, "N k"],
    place_Nk: Int[Array, "N k"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M 1"]]:
    """Write each token, and the weight of each copy, to the copies' rows; M = N k.

    place: a permutation of the M rows. The gradient of x is summed over copies in float32.
    """
    backend = _backend("moe_permute", implementation, _signature(x_ND, place_Nk), x_ND, place_Nk)
    return backend.moe_permute(x_ND, weights_Nk, place_Nk)


def moe_unpermute(
    y_MD: Float[Array, "M D"], place_Nk: Int[Array, "N k"], *, implementation: str | None = None
) -> Float[Array, "N D"]:
    """Sum each token's rows, in float32, in y's dtype. place: a permutation of the M rows."""
    backend = _backend("moe_unpermute", implementation, _signature(y_MD, place_Nk), y_MD, place_Nk)
    return backend.moe_unpermute(y_MD, place_Nk)


def _signature(x: Array, place_Nk: Array) -> str:
    return f"{x.dtype}{list(x.shape)} {place_Nk.shape[1]} copies"


def _backend(op: str, implementation: str | None, signature: str, *given: object) -> ModuleType:
    reasons = {name: b.supports(target(), op, *given) for name, b in BACKENDS.items()}
    return BACKENDS[choose_backend(op, reasons, implementation, signature)]
