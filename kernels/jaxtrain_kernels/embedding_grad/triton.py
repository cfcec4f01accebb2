"""Triton backend: the tokens are sorted, and each row of the table sums its own, in their order.

XLA's scatter-add clears a float32 table, adds to it with atomics and rounds it: 20 bytes per value.
This reads and writes each value once, and the result does not depend on the order of threads.
The sort depends on the tokens alone, so XLA computes it once for all tables. The kernels are in
`kernels.py`, imported by the first call: Pallas takes a while to import.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target, triton_unsupported

PIECE = 32  # tokens that one program sums
MOST_VALUES = 2**31 - 1  # offsets are 32 bits


class SortedTokens(NamedTuple):
    """The tokens of a batch in the order of their rows, and the pieces of the frequent ones.

    order: index of each sorted token in the batch. start: of each table row's tokens in that order.
    A row with more than PIECE tokens has further pieces: first: where each begins in the order (M
    for none), by row. slot: number of further pieces that begin before each sorted token.
    """

    order_M: jax.Array
    start_S: jax.Array  # S = V + 1
    token_E: jax.Array
    first_E: jax.Array
    slot_M: jax.Array


def supports(target: Target, g_MD, size) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    if reason := triton_unsupported(target) or hopper.unsupported_reason(target):
        return reason
    M, D = g_MD.shape
    if g_MD.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {g_MD.dtype}"
    if D % 128:
        return f"needs a width in multiples of 128, got {D}"
    if (values := max(M, size) * D) > MOST_VALUES:
        return f"needs at most {MOST_VALUES} values, got {values}"
    return None


def embedding_grad(g_MD, token_M, size, dtype, *, interpret=False):
    """Backend of the public function."""
    from jaxtrain_kernels.embedding_grad import kernels

    tokens = sort_tokens(token_M.astype(jnp.int32), size)
    parts_ED = kernels.sum_pieces(interpret, g_MD, *tokens[:4])
    return kernels.sum_tokens(
        interpret, jnp.dtype(dtype), g_MD, parts_ED, tokens.order_M, tokens.start_S, tokens.slot_M
    )


def sort_tokens(token_M: jax.Array, size: int) -> SortedTokens:
    M = len(token_M)
    index_M = jnp.arange(M, dtype=jnp.int32)
    sorted_M, order_M = lax.sort((token_M, index_M), num_keys=1, is_stable=True)
    counts_S = jnp.zeros(size + 1, jnp.int32).at[token_M + 1].add(1)
    start_S = jnp.cumsum(counts_S, dtype=jnp.int32)
    rank_M = index_M - start_S[sorted_M]
    begins_M = (rank_M > 0) & (rank_M % PIECE == 0)
    slot_M = jnp.cumsum(begins_M, dtype=jnp.int32) - begins_M
    E = max(1, M // PIECE)
    first_E = jnp.full(E, M, jnp.int32)
    first_E = first_E.at[jnp.where(begins_M, slot_M, E)].set(index_M, mode="drop")
    token_E = sorted_M.at[first_E].get(mode="fill", fill_value=0)
    return SortedTokens(order_M, start_S, token_E, first_E, slot_M)
