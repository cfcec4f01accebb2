"""Parameter counts and FLOPs per token, from the declarations (nanochat's convention)."""

from typing import Any

import jax

from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.params import count
from jaxtrain.model.plan import make_plan


def flops_per_token(c: ResolvedModel, specs: dict[str, Any], sequence_length: int) -> float:
    """Forward and backward FLOPs of one token: 6 per matmul weight, and attention.

    Attention counts 12 x N x H x min(window, T) a layer, without halving for causality, so that
    MFU compares with nanochat's figures.
    """
    keys = sum(min(s.window or sequence_length, sequence_length) for s in make_plan(c))
    return 6.0 * active(c, specs) + 12.0 * c.heads * c.head_dim * keys


def active(c: ResolvedModel, specs: dict[str, Any]) -> float:
    """Weights of matrices and head that a token meets: of the experts, `top_k`."""
    weights: float = count(specs, "matrix") + count(specs, "head")
    if c.tied_head:
        weights += specs["embed"].size
    if c.moe is not None:
        weights -= sizes(specs)["experts"] * (1 - c.moe.top_k / c.moe.experts)
    return float(weights)


def sizes(specs: dict[str, Any]) -> dict[str, int]:
    """Number of parameters by optimizer group, and in all."""
    table: dict[str, int] = {}
    for spec in jax.tree.leaves(specs):
        table[spec.group] = table.get(spec.group, 0) + spec.size
    return {**table, "total": sum(table.values())}
