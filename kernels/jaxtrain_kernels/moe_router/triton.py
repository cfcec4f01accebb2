"""Triton backend: one launch forward, three backward; Hopper.

The float32 matrix is split into three bfloat16 parts, whose products with x are exact, so tensor
cores compute the float32 logits. The kernels are in `kernels.py`, imported by the first call:
Pallas takes a while to import.
"""

import functools

import jax
import jax.numpy as jnp

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target, triton_unsupported
from jaxtrain_kernels.moe_permute import triton as permute

MOST_EXPERTS = 64
MOST_VALUES = 2**31 - 1  # offsets are 32 bits
TOKENS = 64  # of a program of the forward pass: a part


def supports(target: Target, x_BTD, router_DE) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    if reason := triton_unsupported(target) or hopper.unsupported_reason(target):
        return reason
    _, T, D = x_BTD.shape
    if x_BTD.dtype != jnp.bfloat16 or router_DE.dtype != jnp.float32:
        return f"needs bfloat16 and a float32 router, got {x_BTD.dtype} and {router_DE.dtype}"
    if T % TOKENS or D % 128:
        return f"needs a length in multiples of {TOKENS} and a width of 128, got {T} and {D}"
    if (E := router_DE.shape[1]) > MOST_EXPERTS:
        return f"needs at most {MOST_EXPERTS} experts, got {E}"
    if x_BTD.size > MOST_VALUES:
        return f"needs at most {MOST_VALUES} values, got {x_BTD.size}"
    return None


def supports_permute(target: Target, x_BTD, router_DE, top_k: int) -> str | None:
    """`supports` of `moe_router_permute`."""
    B, T, D = x_BTD.shape
    chosen_Nk = jax.ShapeDtypeStruct((B * T, top_k), jnp.int32)
    x_ND = jax.ShapeDtypeStruct((B * T, D), x_BTD.dtype)
    return (
        supports(target, x_BTD, router_DE)
        or permute.supports(target, "row_id_map", chosen_Nk, router_DE.shape[1])
        or permute.supports(target, "moe_permute", x_ND, chosen_Nk)
    )


def moe_router(
    x_BTD, router_DE, bias_E, *, top_k, score_function, interpret=False
) -> tuple[jax.Array, ...]:
    """Backend of the public function; a part has `TOKENS` tokens."""
    bias_E = jnp.zeros(router_DE.shape[1]) if bias_E is None else bias_E
    return _router(top_k, score_function, interpret, x_BTD, router_DE, bias_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _router(top_k, score_function, interpret, *arrays):
    return _forward(top_k, score_function, interpret, *arrays)[0]


def _forward(
    top_k, score_function, interpret, x_BTD, router_DE, bias_E
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    from jaxtrain_kernels.moe_router import kernels

    B, T, D = x_BTD.shape
    x_ND = x_BTD.reshape(B * T, D)
    logits_NE, chosen_Nk, weights_Nk, hits_nE, shares_nE, z_n = kernels.route(
        top_k, score_function, interpret, x_ND, router_DE, bias_E
    )
    by_token = lambda a: a.reshape(B, T, a.shape[1])
    by_part = lambda a: a.reshape(B, -1, *a.shape[1:])
    results = (
        x_BTD, by_token(chosen_Nk), by_token(weights_Nk), by_part(hits_nE), by_part(shares_nE),
        by_part(z_n),
    )  # fmt: skip
    return results, (x_BTD, router_DE, logits_NE, chosen_Nk)


def _backward(top_k, score_function, interpret, saved, gradients):
    from jaxtrain_kernels.moe_router import kernels

    x_BTD, router_DE, logits_NE, chosen_Nk = saved
    dx_BTD, _, dweights_BTk, _, dshares_BbE, dz_Bb = gradients
    flat = lambda a: a.reshape(-1, a.shape[-1])
    dlogits_NE = kernels.logits_gradient(
        score_function, interpret, logits_NE, chosen_Nk, flat(dweights_BTk), flat(dshares_BbE),
        dz_Bb.reshape(-1),
    )  # fmt: skip
    dx_ND = kernels.token_gradient(interpret, router_DE, dlogits_NE, flat(dx_BTD))
    drouter_DE = kernels.router_gradient(interpret, flat(x_BTD), dlogits_NE)
    return dx_ND.reshape(x_BTD.shape), drouter_DE, None


_router.defvjp(_forward, _backward)


def moe_router_permute(
    x_BTD, router_DE, bias_E, *, top_k, score_function, interpret=False
) -> tuple[jax.Array, ...]:
    """Backend of the public function; a part has `TOKENS` tokens."""
    bias_E = jnp.zeros(router_DE.shape[1]) if bias_E is None else bias_E
    return _router_permute(top_k, score_function, interpret, x_BTD, router_DE, bias_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _router_permute(top_k, score_function, interpret, *arrays):
    return _permute_forward(top_k, score_function, interpret, *arrays)[0]


def _permute_forward(top_k, score_function, interpret, x_BTD, router_DE, bias_E):
    from jaxtrain_kernels.moe_permute import kernels

    routing, saved = _forward(top_k, score_function, interpret, x_BTD, router_DE, bias_E)
    _, chosen_BTk, weights_BTk, *sums = routing
    B, T, _ = x_BTD.shape
    flat = lambda a: a.reshape(B * T, -1)
    row_Nk, _ = permute.row_id_map(flat(chosen_BTk), router_DE.shape[1], interpret=interpret)
    rows_MD, weights_M1 = kernels.copy_rows(interpret, flat(x_BTD), row_Nk, flat(weights_BTk))
    by_sequence = lambda a, length: a.reshape(B, length, -1)
    M = T * top_k
    rows = by_sequence(rows_MD, M), by_sequence(weights_M1, M), by_sequence(row_Nk, T)
    return (*rows, *sums), (*saved, row_Nk)


def _permute_backward(top_k, score_function, interpret, saved, gradients):
    from jaxtrain_kernels.moe_permute import kernels as rows
    from jaxtrain_kernels.moe_router import kernels

    x_BTD, router_DE, logits_NE, chosen_Nk, row_Nk = saved
    drows_BMD, dweights_BM1, _, _, dshares_BbE, dz_Bb = gradients
    flat = lambda a: a.reshape(-1, a.shape[-1])
    dlogits_NE = kernels.logits_gradient(
        score_function, interpret, logits_NE, chosen_Nk, flat(dweights_BM1), flat(dshares_BbE),
        dz_Bb.reshape(-1), row_Nk,
    )  # fmt: skip
    dx_ND = rows.sum_rows_with_product(interpret, flat(drows_BMD), row_Nk, dlogits_NE, router_DE.T)
    drouter_DE = kernels.router_gradient(interpret, flat(x_BTD), dlogits_NE)
    return dx_ND.reshape(x_BTD.shape), drouter_DE, None


_router_permute.defvjp(_permute_forward, _permute_backward)
