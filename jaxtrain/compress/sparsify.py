"""Unstructured and N:M pruning of a trained matrix: magnitude, Wanda, SparseGPT.

Each method takes a matrix [K, N] (y = x W), its inputs' statistics and a target. It returns the new
matrix and the mask of the remaining weights. Computed on the host in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxtrain.settings import UserError

BLOCK = 128  # inputs per SparseGPT mask
DAMPING = 0.01  # added to the Hessian's diagonal, as a fraction of its mean


class InputStatistics(NamedTuple):
    """Statistics of a matrix's inputs: sum of x^2, and X^T X if a method needs it."""

    square_K: Float[np.ndarray, " K"]
    hessian_KK: Float[np.ndarray, "K K"] | None


class SparsityTarget(NamedTuple):
    """A share of zeros, or an N:M pattern: `left` nonzero weights per `of` inputs of an output."""

    sparsity: float
    left: int = 0
    of: int = 0


Pruned = tuple[Float[np.ndarray, "K N"], Bool[np.ndarray, "K N"]]
Solve = Callable[[Float[np.ndarray, "K N"], InputStatistics | None, SparsityTarget], Pruned]


def parse_target(sparsity: float | None, pattern: str | None) -> SparsityTarget:
    """The target of a command line. Raises UserError unless exactly one of the two is given and
    valid."""
    if (sparsity is None) == (pattern is None):
        raise UserError("name one of --sparsity 0.5 and --pattern 2:4")
    if sparsity is not None:
        if not 0 < sparsity < 1:
            raise UserError(
                f"--sparsity {sparsity}: must be a share of zeros between 0 and 1, such as 0.5"
            )
        return SparsityTarget(sparsity)
    left, colon, of = (pattern or "").partition(":")
    if not (colon and left.isdigit() and of.isdigit() and 0 < int(left) < int(of)):
        raise UserError(
            f"--pattern {pattern}: must be N:M, which keeps N weights of every M inputs, such as "
            "2:4"
        )
    return SparsityTarget(1 - int(left) / int(of), int(left), int(of))


def check_shape(name: str, K: int, target: SparsityTarget) -> None:
    """Raise UserError for a matrix whose K is no multiple of the pattern's group."""
    if target.of and K % target.of:
        raise UserError(
            f"--pattern {target.left}:{target.of}: {name} has {K} inputs, not a multiple of "
            f"{target.of}; use --sparsity"
        )


def keep_pattern(scores_KN: np.ndarray, target: SparsityTarget) -> np.ndarray:
    """Mask of the largest scores in each group of inputs; ties keep the first."""
    K, N = scores_KN.shape
    groups = -scores_KN.reshape(K // target.of, target.of, N)
    ranks = np.argsort(np.argsort(groups, axis=1, kind="stable"), axis=1, kind="stable")
    return (ranks < target.left).reshape(K, N)


def keep_columns(scores_KN: np.ndarray, zeros: int) -> np.ndarray:
    """Mask of all but the `zeros` smallest scores of each column; ties drop the first."""
    ranks = np.argsort(np.argsort(scores_KN, axis=0, kind="stable"), axis=0, kind="stable")
    return ranks >= zeros


def keep_matrix(scores_KN: np.ndarray, zeros: int) -> np.ndarray:
    """Mask of all but the `zeros` smallest scores of the matrix."""
    keep = np.ones(scores_KN.size, bool)
    keep[np.argsort(scores_KN, axis=None, kind="stable")[:zeros]] = False
    return keep.reshape(scores_KN.shape)


def magnitude_pruning(
    w_KN: np.ndarray, inputs: InputStatistics | None, target: SparsityTarget
) -> Pruned:
    """Zero the smallest |w| of the matrix or of each group (Han et al. 2015, arXiv:1506.02626)."""
    scores = np.abs(w_KN)
    zeros = round(target.sparsity * w_KN.size)
    keep = keep_pattern(scores, target) if target.of else keep_matrix(scores, zeros)
    return w_KN * keep, keep


def wanda(w_KN: np.ndarray, inputs: InputStatistics | None, target: SparsityTarget) -> Pruned:
    """Zero the smallest |w| ||x||_2 of each output (Sun et al. 2023, arXiv:2306.11695)."""
    assert inputs is not None
    scores = np.abs(w_KN) * np.sqrt(inputs.square_K)[:, None]
    zeros = round(target.sparsity * len(w_KN))
    keep = keep_pattern(scores, target) if target.of else keep_columns(scores, zeros)
    return w_KN * keep, keep


def inverse_cholesky(hessian_KK: np.ndarray, damping: float) -> np.ndarray:
    """The upper triangular U with (H + damping mean(diag H) I)^-1 = U^T U. An input that is always
    0 gets 1 added on the diagonal.

    Row i of U divided by U_ii is the update of later inputs that compensates for an error in i,
    with earlier inputs fixed (Frantar & Alistarh 2022, arXiv:2208.11580).
    """
    H = np.array(hessian_KK, np.float64)
    diagonal = np.diagonal(H).copy()
    added = damping * diagonal.mean() + (diagonal == 0)
    H[np.diag_indices_from(H)] += np.where(added > 0, added, 1.0)
    return np.linalg.cholesky(np.linalg.inv(H)).T


def sparsegpt(w_KN: np.ndarray, inputs: InputStatistics | None, target: SparsityTarget) -> Pruned:
    """SparseGPT: inputs are pruned one by one, and later weights compensate (Frantar & Alistarh
    2023, arXiv:2301.00774). Masks are chosen by w^2 / U_ii^2, for 128 inputs or for one group of
    the pattern at a time."""
    assert inputs is not None and inputs.hessian_KK is not None
    w, (K, N) = np.array(w_KN, np.float64), w_KN.shape
    U = inverse_cholesky(inputs.hessian_KK, DAMPING)
    w[np.diagonal(inputs.hessian_KK) == 0] = 0
    keep = np.ones((K, N), bool)
    size = BLOCK if not target.of else BLOCK // target.of * target.of or target.of
    for begin in range(0, K, size):
        end = min(begin + size, K)
        inside, errors = slice(begin, end), np.zeros((end - begin, N))
        d = np.diagonal(U)[inside, None]
        if not target.of:
            zeros = round(target.sparsity * end * N) - round(target.sparsity * begin * N)
            keep[inside] = keep_matrix((w[inside] / d) ** 2, zeros)
        for i in range(begin, end):
            if target.of and i % target.of == 0:
                group = slice(i, i + target.of)
                keep[group] = keep_pattern((w[group] / np.diagonal(U)[group, None]) ** 2, target)
            error = np.where(keep[i], 0.0, w[i]) / U[i, i]
            w[i:end] -= U[i, i:end, None] * error
            errors[i - begin] = error
        w[end:] -= U[inside, end:].T @ errors
    return w * keep, keep


class Pruner(NamedTuple):
    """solve: the method. inputs, hessian: whether it needs input statistics, with X^T X."""

    solve: Solve
    inputs: bool = False
    hessian: bool = False


METHODS: dict[str, Pruner] = {
    "magnitude": Pruner(magnitude_pruning),
    "wanda": Pruner(wanda, inputs=True),
    "sparsegpt": Pruner(sparsegpt, inputs=True, hessian=True),
}


def expected_zeros(method: str, target: SparsityTarget, K: int, N: int) -> int:
    """Number of weights that a method sets to zero in a matrix [K, N]."""
    if target.of:
        return K // target.of * (target.of - target.left) * N
    return round(target.sparsity * K) * N if method == "wanda" else round(target.sparsity * K * N)


def sparsify(
    method: str, name: str, w_KN: np.ndarray, inputs: InputStatistics | None, target: SparsityTarget
) -> np.ndarray:
    """Prune a matrix to exactly `expected_zeros` zeros, in its own dtype. Raises UserError as
    `check_shape` does."""
    check_shape(name, len(w_KN), target)
    w, keep = METHODS[method].solve(np.asarray(w_KN, np.float64), inputs, target)
    assert np.sum(~keep) == expected_zeros(method, target, *w_KN.shape), name
    assert np.isfinite(w).all() and not w[~keep].any(), name
    return w.astype(w_KN.dtype)
