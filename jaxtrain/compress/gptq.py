"""GPTQ: inputs are rounded to 4 bits one by one, and later inputs compensate for the error (Frantar
et al. 2022, arXiv:2210.17323).

Computed in float64, by one program per shape of matrix: on the GPU if there is one, else on the
CPU. With NumPy on the host it took most of the command's time.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cholesky, solve_triangular
from jaxtyping import Array, Float, Float32, Float64, Int8

from jaxtrain.compress.sparsify import BLOCK, DAMPING

LEAST, MOST = -8, 7  # codes of 4 bits
Solution = tuple[Int8[Array, "K N"], Float32[Array, "G N"]]  # codes, and the steps of the groups


def group_steps(w_KN: Float[Array, "K N"]) -> Float[Array, " N"]:
    """The scales of one group of inputs, which map the largest magnitude to 7; rounded to bfloat16
    as they are stored."""
    steps = (jnp.max(jnp.abs(w_KN), axis=0) / MOST).astype(jnp.float32)
    # XLA may drop a cast to bfloat16 and back.
    return jax.lax.reduce_precision(steps, 8, 7).astype(w_KN.dtype)


def inverse_factor(
    hessian_KK: Float64[Array, "K K"], damping: float | Float64[Array, ""]
) -> Float64[Array, "K K"]:
    """`sparsify.inverse_cholesky`: the upper triangular U with (H + damping mean(diag H) I)^-1 =
    U^T U, here without the inverse.

    Read from the last input to the first, H = L L^T, so H = R R^T with an upper triangular R, and
    U = R^-1.
    """
    diagonal = jnp.diagonal(hessian_KK)
    added = damping * jnp.mean(diagonal) + (diagonal == 0)
    H = hessian_KK + jnp.diag(jnp.where(added > 0, added, 1.0))
    L = cholesky(H[::-1, ::-1], lower=True)
    return solve_triangular(L, jnp.eye(len(H), dtype=H.dtype), lower=True)[::-1, ::-1]


def block_size(group_size: int, act_order: bool) -> int:
    """Inputs whose errors are applied to later blocks at once: at most BLOCK. No group begins
    within a block and ends in another, as its scales need the errors of all inputs before it."""
    if act_order:
        return BLOCK
    if group_size <= BLOCK:
        return BLOCK // group_size * group_size
    return next(n for n in range(BLOCK, 0, -1) if group_size % n == 0)


class GptqState(NamedTuple):
    """Where the loop over blocks is. step_N: of the group that the last input belongs to."""

    w_KN: Float64[Array, "K N"]
    codes_KN: Int8[Array, "K N"]
    steps_GN: Float64[Array, "G N"]
    step_N: Float64[Array, " N"]


class BlockState(NamedTuple):
    """Where the loops within a block of S inputs are. Errors are divided by the diagonal of U."""

    w_SN: Float64[Array, "S N"]
    codes_SN: Int8[Array, "S N"]
    errors_SN: Float64[Array, "S N"]


@functools.partial(jax.jit, static_argnames=("group_size", "act_order"))
def solve_gptq(
    w_KN: Float[Array, "K N"],
    hessian_KK: Float[Array, "K K"],
    damping: Float64[Array, ""],
    group_size: int,
    act_order: bool,
) -> Solution:
    """`gptq_codes`, with 64-bit types enabled. All loops have as many iterations as their shapes
    say, so that a GPU waits for no answer of the host."""
    (K, N), size = w_KN.shape, block_size(group_size, act_order)
    span = size if act_order else min(group_size, size)  # inputs that are rounded by one step_N
    hessian_KK = hessian_KK.astype(jnp.float64)
    diagonal = jnp.diagonal(hessian_KK)
    w_KN = jnp.where(diagonal[:, None] == 0, 0.0, w_KN.astype(jnp.float64))
    steps_GN = jax.vmap(group_steps)(w_KN.reshape(-1, group_size, N))
    order = jnp.argsort(-diagonal, stable=True) if act_order else jnp.arange(K)
    U_KK = inverse_factor(hessian_KK[order[:, None], order], damping)
    more = -K % size  # inputs that fill the last block; they are zero and have no errors
    U_KK = jnp.pad(U_KK, (0, more)) + jnp.diag(jnp.pad(jnp.zeros(K), (0, more), constant_values=1))
    rows = lambda x, begin, count: jax.lax.dynamic_slice_in_dim(x, begin, count)
    step_of_input_KN = jnp.pad(steps_GN[order // group_size], ((0, more), (0, 0)))

    def block(b: Array, state: GptqState) -> GptqState:
        begin = b * size
        U_SK = rows(U_KK, begin, size)
        U_SS = jax.lax.dynamic_slice_in_dim(U_SK, begin, size, axis=1)

        def part(p: Array, both: tuple[GptqState, BlockState]) -> tuple[GptqState, BlockState]:
            outer, inner = both
            first = begin + p * span
            if not act_order:  # scales from the weights updated so far
                if group_size <= size:
                    step_N = group_steps(rows(inner.w_SN, p * span, group_size))
                else:  # the group begins with a block
                    ahead = rows(outer.w_KN, first // group_size * group_size, group_size)
                    is_new = first % group_size == 0
                    step_N = jnp.where(is_new, group_steps(ahead), outer.step_N)
                steps = outer.steps_GN.at[first // group_size].set(step_N, mode="drop")
                outer = outer._replace(steps_GN=steps, step_N=step_N)

            def one(j: Array, x: BlockState) -> BlockState:
                i = p * span + j
                step_N = step_of_input_KN[begin + i] if act_order else outer.step_N
                code_N = jnp.round(x.w_SN[i] / jnp.where(step_N > 0, step_N, 1.0))
                code_N = jnp.clip(code_N, LEAST, MOST)
                error_N = (x.w_SN[i] - code_N * step_N) / U_SS[i, i]
                return BlockState(
                    x.w_SN - jnp.outer(U_SS[i], error_N),  # U is zero for the inputs before i
                    x.codes_SN.at[i].set(code_N.astype(jnp.int8)),
                    x.errors_SN.at[i].set(error_N),
                )

            return outer, jax.lax.fori_loop(0, span, one, inner)

        empty = jnp.zeros((size, N), jnp.int8), jnp.zeros((size, N))
        inner = BlockState(rows(state.w_KN, begin, size), *empty)
        state, inner = jax.lax.fori_loop(0, size // span, part, (state, inner))
        later_SK = jnp.where(jnp.arange(K + more)[None] >= begin + size, U_SK, 0.0)
        write = jax.lax.dynamic_update_slice_in_dim
        return state._replace(
            w_KN=state.w_KN - later_SK.T @ inner.errors_SN,
            codes_KN=write(state.codes_KN, inner.codes_SN, begin, axis=0),
        )

    w_KN = jnp.pad(w_KN[order], ((0, more), (0, 0)))
    start = GptqState(w_KN, jnp.zeros(w_KN.shape, jnp.int8), steps_GN, steps_GN[0])
    state = jax.lax.fori_loop(0, (K + more) // size, block, start)
    codes_KN = jnp.zeros((K, N), jnp.int8).at[order].set(state.codes_KN[:K])
    return codes_KN, state.steps_GN.astype(jnp.float32)


def gptq_codes(
    w_KN: Float[Array, "K N"] | Float[np.ndarray, "K N"],
    hessian_KK: Float[Array, "K K"] | Float[np.ndarray, "K K"],
    group_size: int,
    act_order: bool = False,
    damping: float = DAMPING,
) -> Solution:
    """(codes from -8 to 7, scales of each group of `group_size` inputs) of W in y = x W; the group
    size divides K or is larger.

    act_order: round inputs with the largest sum of squares first. Groups keep the stored order, and
    their scales come from the original weights. damping: added to the Hessian's diagonal, in
    multiples of its mean.
    """
    # Other accelerators have no Cholesky factorization in float64.
    device = None if jax.default_backend() in ("cpu", "gpu") else jax.devices("cpu")[0]
    with jax.enable_x64(True):
        w, hessian = jax.device_put((w_KN, hessian_KK), device)
        return solve_gptq(w, hessian, jnp.float64(damping), min(group_size, len(w)), act_order)
