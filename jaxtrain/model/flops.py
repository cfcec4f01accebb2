"""Parameter counts and FLOPs per token, from the declarations (nanochat's convention)."""

import jax

from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.plan import make_plan
from jaxtrain.model.stochastic_depth import keep_probabilities
from jaxtrain.model.token_dropping import kept_tokens
from jaxtrain.weights.params import Specs, count


def flops_per_token(
    c: ResolvedModel, specs: Specs, sequence_length: int, trained: Specs | None = None
) -> float:
    """Forward and backward FLOPs of one token: 6 per matmul weight, and attention.

    trained: the trainable parameters, if not all of `specs`: a subset, or added ones such as
    LoRA's. A frozen weight counts 4 FLOPs, since it has no weight gradient. The layers of
    `model.frozen_layers` count their forward pass only. With `model.token_dropping` a layer counts
    for the tokens that it keeps, with `model.stochastic_depth` by its keep probability.
    Attention counts 6 x N x (H of queries + H of values) x min(window, T) per layer, without
    halving for causality, so that MFU is comparable with nanochat's.
    """
    trained = specs if trained is None else trained
    of_group = lambda name: (
        c.layers_per_set
        * sum(spec.size for spec in jax.tree.leaves(trained) if spec.group.startswith(name))
    )
    lora, still = of_group("lora"), of_group("frozen")
    of_blocks = lambda tree: c.layers_per_set * count(tree.get("blocks", {}), "matrix")
    weights = 4.0 * (active(c, specs) + lora) + 2.0 * (active(c, trained) - still)
    blocks = 4.0 * (of_blocks(specs) + lora) + 2.0 * (of_blocks(trained) - still)
    keys = 0.0
    for layer, keep in zip(make_plan(c), keep_probabilities(c).tolist(), strict=True):
        taken = kept_tokens(sequence_length, c.token_dropping) if layer.drops_tokens else None
        length = taken or sequence_length
        share = keep * length / sequence_length / (3 if layer.frozen else 1)
        keys += share * min(layer.window or length, length)
        weights -= (1 - share) * blocks / c.depth
    keys += (c.mtp or 0) * sequence_length
    return weights + 6.0 * c.heads * (c.qk_dim + c.head_dim) * keys


def active(c: ResolvedModel, specs: Specs) -> float:
    """Number of active weights, of matrices and head, in one token's forward pass.

    `top_k` experts of a layer count. Shared weights count once per layer that uses them. The head
    counts once more per module of multi-token prediction.
    """
    weights: float = count(specs, "matrix")
    weights += (c.layers_per_set - 1) * count(specs.get("blocks", {}), "matrix")
    head = specs["embed"].size if c.tied_head and "embed" in specs else count(specs, "head")
    weights += (1 + (c.mtp or 0)) * head
    if c.moe is not None:
        weights -= sizes(specs).get("experts", 0) * (1 - c.moe.top_k / c.moe.experts)
    return float(weights)


def sizes(specs: Specs) -> dict[str, int]:
    """Number of parameters by optimizer group, and in total."""
    table: dict[str, int] = {}
    for spec in jax.tree.leaves(specs):
        table[spec.group] = table.get(spec.group, 0) + spec.size
    return {**table, "total": sum(table.values())}
