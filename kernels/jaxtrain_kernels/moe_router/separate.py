"""`moe_router_permute` by the router and the permutation, each by its own default."""

from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.moe_permute import moe_permute, row_id_map


def supports_permute(target: Target, x_BTD, router_DE, top_k: int) -> None:
    return None


def moe_router_permute(x_BTD, router_DE, bias_E, *, top_k, score_function):
    """Backend of the public function."""
    from jaxtrain_kernels.moe_router import moe_router

    r = moe_router(x_BTD, router_DE, bias_E, top_k=top_k, score_function=score_function)
    B, T, _ = x_BTD.shape
    flat = lambda a: a.reshape(B * T, -1)
    row_Nk, _ = row_id_map(flat(r.chosen_BTk), router_DE.shape[1])
    rows = moe_permute(flat(r.x_BTD), flat(r.weights_BTk), row_Nk)
    by_sequence = lambda a, length: a.reshape(B, length, -1)
    permuted = (*(by_sequence(a, T * top_k) for a in rows), by_sequence(row_Nk, T))
    return *permuted, r.hits_BbE, r.shares_BbE, r.z_Bb
