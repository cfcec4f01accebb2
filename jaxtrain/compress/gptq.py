"""GPTQ: inputs are rounded to 4 bits one by one, and later inputs compensate for the error (Frantar
et al. 2022, arXiv:2210.17323). Computed on the host in float64."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxtrain.compress.sparsify import BLOCK, DAMPING, inverse_cholesky

LEAST, MOST = -8, 7  # codes of 4 bits


def group_steps(w_KN: Float[np.ndarray, "K N"]) -> Float[np.ndarray, " N"]:
    """The scales of one group of inputs, which map the largest magnitude to 7; rounded to bfloat16
    as they are stored."""
    steps = (np.max(np.abs(w_KN), axis=0) / MOST).astype(np.float32)
    return steps.astype(jnp.bfloat16).astype(np.float64)


def gptq_codes(
    w_KN: Float[np.ndarray, "K N"],
    hessian_KK: Float[np.ndarray, "K K"],
    group_size: int,
    act_order: bool = False,
    damping: float = DAMPING,
) -> tuple[Int[np.ndarray, "K N"], Float[np.ndarray, "G N"]]:
    """(codes from -8 to 7, scales of each group of `group_size` inputs) of W in y = x W.

    act_order: round inputs with the largest sum of squares first. Groups keep the stored order, and
    their scales come from the original weights. damping: added to the Hessian's diagonal, in
    multiples of its mean.
    """
    w, (K, N) = np.array(w_KN, np.float64), w_KN.shape
    diagonal = np.diagonal(hessian_KK)
    w[diagonal == 0] = 0
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(K)
    U = inverse_cholesky(np.asarray(hessian_KK, np.float64)[np.ix_(order, order)], damping)
    steps = np.stack([group_steps(w[i : i + group_size]) for i in range(0, K, group_size)])
    w, codes = w[order], np.zeros((K, N), np.int8)
    for begin in range(0, K, BLOCK):
        end = min(begin + BLOCK, K)
        errors = np.zeros((end - begin, N))
        for i in range(begin, end):
            group = order[i] // group_size
            if not act_order and i % group_size == 0:  # scales from the weights updated so far
                ahead = w[i : i + group_size].copy()
                done = i - begin  # errors of this block not yet applied to later blocks
                if done and i + group_size > end:
                    ahead[end - i :] -= U[begin:i, end : i + group_size].T @ errors[:done]
                steps[group] = group_steps(ahead)
            step = np.where(steps[group] > 0, steps[group], 1.0)
            code = np.clip(np.round(w[i] / step), LEAST, MOST)
            codes[order[i]] = code
            error = (w[i] - code * steps[group]) / U[i, i]
            w[i:end] -= U[i, i:end, None] * error
            errors[i - begin] = error
        w[end:] -= U[begin:end, end:].T @ errors
    return codes, steps
