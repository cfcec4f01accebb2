"""Tokens to the rows of their experts and back: a counting sort, copies and sums of rows.

A token has k copies, one for each of its experts. The row id map gives each copy a row: rows are
sorted by expert and, within an expert, by token. The names are those of Megatron-LM.
"""

from types import ModuleType

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.dispatch import choose_backend, target
from jaxtrain_kernels.moe_permute import reference, triton

# Fastest first: the first that can serve is the default.
BACKENDS = {"triton": triton, "reference": reference}


def row_id_map(
    chosen_Nk: Int[Array, "N k"], experts: int, *, implementation: str | None = None
) -> tuple[Int[Array, "N k"], Int[Array, "E"]]:
    """Return the row of each copy, sorted by expert, and each expert's number of rows.

    The sort is stable: equal to the inverse of `argsort(chosen.reshape(-1), stable=True)`. Both
    results are int32. Raises ValueError for an unknown implementation.
    """
    signature = f"{list(chosen_Nk.shape)} {experts} experts"
    backend = _backend("row_id_map", implementation, signature, chosen_Nk, experts)
    return backend.row_id_map(chosen_Nk, experts)


def moe_permute(
    x_ND: Float[Array, "N D"],
    weights_Nk: Float[Array, "N k"],
    row_Nk: Int[Array, "N k"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M 1"]]:
    """Write each token, and the weight of each copy, to the copies' rows; M = N k.

    row: a permutation of the M rows. The gradient of x is summed over copies in float32.
    """
    backend = _backend("moe_permute", implementation, _signature(x_ND, row_Nk), x_ND, row_Nk)
    return backend.moe_permute(x_ND, weights_Nk, row_Nk)


def moe_unpermute(
    y_MD: Float[Array, "M D"], row_Nk: Int[Array, "N k"], *, implementation: str | None = None
) -> Float[Array, "N D"]:
    """Sum each token's rows, in float32, in y's dtype. row: a permutation of the M rows."""
    backend = _backend("moe_unpermute", implementation, _signature(y_MD, row_Nk), y_MD, row_Nk)
    return backend.moe_unpermute(y_MD, row_Nk)


def gather_rows(
    x_ND: Float[Array, "N D"], row_S: Int[Array, "S"], *, implementation: str | None = None
) -> Float[Array, "S D"]:
    """x[row], zeros where there is no such row. It defines no gradient."""
    signature = f"{x_ND.dtype}{list(x_ND.shape)} {len(row_S)} rows"
    return _backend("gather_rows", implementation, signature, x_ND, row_S).gather_rows(x_ND, row_S)


def sum_rows(
    y_MD: Float[Array, "M D"],
    row_Nk: Int[Array, "N k"],
    added_SD: Float[Array, "S D"] | None = None,
    first: Int[Array, ""] | int = 0,
    *,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """Sum each token's rows, in float32, in y's dtype; rows that y lacks are zeros. It defines no
    gradient. added: its rows first .. first + N - 1 are added to the tokens' sums."""
    backend = _backend("sum_rows", implementation, _signature(y_MD, row_Nk), y_MD, row_Nk)
    return backend.sum_rows(y_MD, row_Nk, added_SD, first)


def scatter_rows(
    into_ND: Float[Array, "N D"],
    rows_SD: Float[Array, "S D"],
    row_S: Int[Array, "S"],
    *,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """`into` with these rows replaced, in place where XLA can; rows that it does not have are left
    out. row: no row twice. It defines no gradient."""
    signature = f"{rows_SD.dtype}{list(into_ND.shape)} {len(row_S)} rows"
    backend = _backend("scatter_rows", implementation, signature, rows_SD, row_S)
    return backend.scatter_rows(into_ND, rows_SD, row_S)


def _signature(x: Array, row_Nk: Array) -> str:
    return f"{x.dtype}{list(x.shape)} {row_Nk.shape[1]} copies"


def _backend(op: str, implementation: str | None, signature: str, *given: object) -> ModuleType:
    reasons = {name: b.supports(target(), op, *given) for name, b in BACKENDS.items()}
    return BACKENDS[choose_backend(op, reasons, implementation, signature)]
