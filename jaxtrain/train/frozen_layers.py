"""Frozen layers at the bottom of the stack (`model.frozen_layers`).

AutoFreeze (Liu et al. 2021, arXiv:2102.01386), Egeria (Wang et al. 2023, arXiv:2201.06227). The
model stops the gradient above the frozen layers (`model/run_layers.py`), so that they have no
backward pass. This file runs the optimizer on the other parameters only: of each array stacked over
layers, on the entries of the top layers. State and checkpoints keep their shapes, so that later
phases may freeze more layers, or fewer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxtrain.model import ResolvedModel, Transformer, initialize, path_name, split
from jaxtrain.optim import Optimizer
from jaxtrain.optim.types import Hyperparams
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Params, Specs

EMBEDDING = ("embed", "position_embed", "smear_gate", "smear_scale", "bigram")


def top_specs(c: ResolvedModel, vocab_size: int) -> Specs:
    """Declare the trainable parameters: all but the frozen layers and the embedding.

    A tied head trains, and with it the embedding, which is its transpose.
    """
    layers = c.depth - c.frozen_layers
    above = c.model_copy(update={"depth": layers, "frozen_layers": 0})
    specs = split(Transformer(above, vocab_size))[1]
    kept = {"embed"} if c.tied_head else set()
    return {name: spec for name, spec in specs.items() if name not in {*EMBEDDING} - kept}


def freeze_layers(
    make: Callable[[Specs], Optimizer], specs: Specs, c: ResolvedModel, vocab_size: int
) -> Optimizer:
    """Return make(specs); with frozen layers, the optimizer neither reads nor changes their state.

    UserError for an optimizer whose state is of another kind for fewer layers.
    """
    whole = make(specs)
    if not c.frozen_layers:
        return whole
    own = top_specs(c, vocab_size)
    top = make(own)
    states = [jax.eval_shape(lambda o=o, s=s: o.init(initialize(s, 0)))
              for o, s in ((whole, specs), (top, own))]  # fmt: skip

    def apply(
        grads: Params,
        state: PyTree,
        params: Params,
        step: Array,
        hyperparams: Hyperparams,
        finite: Array | None = None,
    ) -> tuple[Params, PyTree]:
        given = upper(grads, own), upper(state, states[1]), upper(params, own)
        new, moved = top.apply(*given, step, hyperparams, finite)
        return merge(params, new), merge(state, moved)

    check_same_kind(states[0], states[1])
    return whole._replace(apply=apply)


def check_same_kind(state: PyTree, top: PyTree) -> None:
    """UserError if an array of `top` is not in `state`, or differs in rank or dtype."""
    leaves = by_path(state)
    for path, small in by_path(top).items():
        x = leaves.get(path)
        if x is None or (x.ndim, x.dtype) != (small.ndim, small.dtype):
            raise UserError(
                "model.frozen_layers: the optimizer state changes its type when fewer layers train "
                "(8-bit from optim.min_size values on); set another optim.min_size or optimizer"
            )


def upper(tree: PyTree, like: PyTree) -> PyTree:
    """Slice each array that `like` has to the shape in `like`, from the end of each dim.

    The dtype stays that of `tree`: gradients are bfloat16 where parameters are float32.
    """
    leaves = by_path(tree)
    last = [last_entries(leaves[name], small.shape) for name, small in by_path(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), last)


def last_entries(x: Array, shape: tuple[int, ...]) -> Array:
    """Slice an array to `shape`, from the end of each dim."""
    start = [a - b for a, b in zip(x.shape, shape)]
    return jax.lax.slice(x, start, x.shape) if any(start) else x


def merge(tree: PyTree, top: PyTree) -> PyTree:
    """Write the arrays of `top` over the last entries of the arrays of `tree`."""
    new = by_path(top)
    merged = [with_last(old, new.get(name)) for name, old in by_path(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), merged)


def with_last(old: Array, x: Array | None) -> Array:
    """Write `x` at the end of each dim of an array; None changes nothing."""
    if x is None or x.shape == old.shape:
        return old if x is None else x
    start = [jnp.int32(a - b) for a, b in zip(old.shape, x.shape)]
    return jax.lax.dynamic_update_slice(old, x, start)


def by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path."""
    return {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
