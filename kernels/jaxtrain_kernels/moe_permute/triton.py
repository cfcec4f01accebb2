"""Triton backend: each row is read once and written once, in one launch; Hopper.

XLA's gathers run at half of a copy's rate, and its sort takes six launches. The kernels are in
`kernels.py`, imported by the first call: Pallas takes a while to import.
"""

import functools

import jax
import jax.numpy as jnp

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target, triton_unsupported

MOST_EXPERTS = 256
MOST_COPIES = 16
MOST_COUNTS = 65536  # of all blocks; each program of the sort reads them
MOST_VALUES = 2**31 - 1  # offsets are 32 bits


def supports(target: Target, op: str, x, other) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    if reason := triton_unsupported(target) or hopper.unsupported_reason(target):
        return reason
    if op == "row_id_map":
        if other > MOST_EXPERTS:
            return f"needs at most {MOST_EXPERTS} experts, got {other}"
        blocks = -(-x.size // copies_of_a_block(other))
        if blocks * other > MOST_COUNTS:
            return f"needs at most {MOST_COUNTS} counts, got {blocks} blocks of {other} experts"
        return None
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {x.dtype}"
    if x.shape[1] % 128:
        return f"needs a width in multiples of 128, got {x.shape[1]}"
    if op in ("moe_permute", "moe_unpermute", "sum_rows") and (k := other.shape[1]) > MOST_COPIES:
        return f"needs at most {MOST_COPIES} experts a token, got {k}"
    if (values := max(other.size, len(x)) * x.shape[1]) > MOST_VALUES:
        return f"needs at most {MOST_VALUES} values, got {values}"
    return None


def copies_of_a_block(experts: int) -> int:
    """Copies that a program of the sort counts: 64 flags for each of 128 threads."""
    return 8192 // max(8, 1 << (experts - 1).bit_length())


def row_id_map(chosen_Nk, experts, *, interpret=False):
    """Backend of the public function."""
    from jaxtrain_kernels.moe_permute import kernels

    block = copies_of_a_block(experts)
    expert_M = chosen_Nk.reshape(-1).astype(jnp.int32)
    blocks = -(-len(expert_M) // block)
    expert_bC = jnp.pad(expert_M, (0, blocks * block - len(expert_M)), constant_values=experts)
    expert_bC = expert_bC.reshape(blocks, block)
    counts_bE = jnp.sum(
        expert_bC[..., None] == jnp.arange(experts)[None, None], axis=1, dtype=jnp.int32
    )
    row_bC = kernels.row_ids(interpret, expert_bC, counts_bE)
    row_M = row_bC.reshape(-1)[: len(expert_M)]
    return row_M.reshape(chosen_Nk.shape), jnp.sum(counts_bE, axis=0)


def moe_permute(x_ND, weights_Nk, row_Nk, *, interpret=False):
    """Backend of the public function."""
    return _permute(interpret, x_ND, weights_Nk, row_Nk)


def moe_unpermute(y_MD, row_Nk, *, interpret=False):
    """Backend of the public function."""
    return _unpermute(interpret, y_MD, row_Nk)


def gather_rows(x_ND, row_S, *, interpret=False):
    """Backend of the public function."""
    from jaxtrain_kernels.moe_permute import kernels

    return kernels.gather_rows(interpret, x_ND, row_S)


def sum_rows(y_MD, row_Nk, added_SD=None, first=0, *, interpret=False):
    """Backend of the public function."""
    from jaxtrain_kernels.moe_permute import kernels

    return kernels.sum_rows(interpret, y_MD, row_Nk, added_SD=added_SD, first=first)[0]


def scatter_rows(into_ND, rows_SD, row_S, *, interpret=False):
    """Backend of the public function."""
    from jaxtrain_kernels.moe_permute import kernels

    return kernels.scatter_rows(interpret, into_ND, rows_SD, row_S)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permute(interpret, x_ND, weights_Nk, row_Nk):
    from jaxtrain_kernels.moe_permute import kernels

    return kernels.copy_rows(interpret, x_ND, row_Nk, weights_Nk)


def _permute_backward(interpret, row_Nk, gradients):
    from jaxtrain_kernels.moe_permute import kernels

    dx_MD, dweights_M1 = gradients
    return *kernels.sum_rows(interpret, dx_MD, row_Nk, dweights_M1), None


_permute.defvjp(
    lambda interpret, x_ND, weights_Nk, row_Nk: (
        _permute(interpret, x_ND, weights_Nk, row_Nk),
        row_Nk,
    ),
    _permute_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unpermute(interpret, y_MD, row_Nk):
    from jaxtrain_kernels.moe_permute import kernels

    return kernels.sum_rows(interpret, y_MD, row_Nk)[0]


def _unpermute_backward(interpret, row_Nk, dy_ND):
    from jaxtrain_kernels.moe_permute import kernels

    return kernels.copy_rows(interpret, dy_ND, row_Nk)[0], None


_unpermute.defvjp(
    lambda interpret, y_MD, row_Nk: (_unpermute(interpret, y_MD, row_Nk), row_Nk),
    _unpermute_backward,
)
