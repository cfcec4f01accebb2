"""Sparsity masks around any optimizer, stored in its state.

A `MaskRule` draws the masks. A method of pruning or of sparse training is such a rule and a row of
WRAPPERS. Masks are sharded, saved and restored like their weights. Masked weights and their moments
are exactly zero after each update. Their gradients are dense, and a rule may read them. Only
matrices of the blocks are masked (`is_block_matrix`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxtrain.optim.offload import name_of, owner_of
from jaxtrain.optim.types import OptState, Transformation, Wrapper
from jaxtrain.settings import UserError
from jaxtrain.weights.params import BLOCK_GROUPS, is_block_matrix

Arrays = dict[str, Array]  # of the masked matrices [.., in, out], by name
Masks = dict[str, Bool[Array, "*L i o"]]  # False: zero


class MaskInputs(NamedTuple):
    """Inputs of a rule that draws masks."""

    step: Int[Array, ""]  # number of updates, including this one
    masks: Masks  # current masks; initially all True unless the rule has a `start`
    params: Arrays  # after the update
    grads: Arrays  # of all weights, including masked ones


class MaskRule(NamedTuple):
    """`due(step, memory)`: whether to call `draw` after that update.

    `draw(inputs, memory)`: the new masks and memory. `memory(params)`: initial state of the rule.
    `metrics(memory)`: its logged values. `start(params)`: the initial masks.
    """

    due: Callable[[Int[Array, ""], PyTree], Bool[Array, ""]]
    draw: Callable[[MaskInputs, PyTree], tuple[Masks, PyTree]]
    memory: Callable[[Arrays], PyTree] = lambda params: ()
    metrics: Callable[[Any], dict[str, Array]] = lambda memory: {}
    start: Callable[[Arrays], Masks] = lambda params: {
        n: jnp.ones(p.shape, bool) for n, p in params.items()
    }


class MaskState(NamedTuple):
    count: Int[Array, ""]  # number of updates
    masks: Masks  # sharded like the parameters
    zeros: Float[Array, ""]  # number of masked weights
    weights: Float[Array, ""]  # number of weights that have a mask; 0 before the first draw
    memory: PyTree
    inner: OptState


def with_masks(rule: MaskRule) -> Wrapper:
    """Make the wrapper of a rule."""

    def wrap(tx: Transformation, label: str) -> Transformation:
        if label.split(" x ")[0] not in BLOCK_GROUPS:
            return tx

        def init(params):
            flat, zero = by_name(params), jnp.zeros((), jnp.float32)
            masks = rule.start(flat)
            count, memory = jnp.zeros((), jnp.int32), rule.memory(flat)
            return MaskState(count, masks, zero, zero, memory, tx.init(params))

        def update(updates, state, params=None, **extra):
            specs = by_name(extra["specs"])
            names = [name for name, spec in specs.items() if is_block_matrix(spec)]
            old = {name: state.masks[name] for name in names}
            seen = mask_leaves(old, updates)
            moved, inner = tx.update(seen, state.inner, params, **extra)
            grads, flat, moves = by_name(updates), by_name(params), by_name(moved)
            count, zero = state.count + 1, jnp.float32(0)

            def draw() -> tuple[Any, ...]:
                after = {n: jnp.where(old[n], flat[n] + moves[n], 0) for n in names}
                inputs = MaskInputs(count, old, after, {n: grads[n] for n in names})
                masks, memory = rule.draw(inputs, state.memory)
                zeros = sum((jnp.sum(~m, dtype=jnp.float32) for m in masks.values()), zero)
                return masks, memory, zeros, zero + sum(m.size for m in masks.values())

            keep = lambda: (old, state.memory, state.zeros, state.weights)
            due = rule.due(count, state.memory)
            masks, *rest = jax.lax.cond(due, draw, keep)
            # p + -p is zero; weights that grow also start at zero.
            stay = {n: jnp.where(masks[n] & old[n], moves[n], -flat[n]) for n in names}
            moved = map_by_name(lambda name, u: stay.get(name, u), moved)
            memory, zeros, weights = rest
            new = MaskState(
                count, state.masks | masks, zeros, weights, memory, mask_leaves(masks, inner)
            )
            return moved, new

        return optax.GradientTransformationExtraArgs(init, update)

    def metrics(states: Sequence[OptState]) -> dict[str, Array]:
        found = [s for s in states if isinstance(s, MaskState)]
        zero = jnp.float32(0)
        zeros, weights = sum((s.zeros for s in found), zero), sum((s.weights for s in found), zero)
        values = [rule.metrics(s.memory) for s in found]
        means = jax.tree.map(lambda *xs: sum(xs) / len(xs), *values)
        return {"sparsity": zeros / jnp.maximum(weights, 1)} | means

    return Wrapper(wrap, by_rows=False, metrics=metrics, keeps_zeros=True)


# ---- trees by name ----------------------------------------------------------------------------


def by_name(tree: PyTree) -> dict[str, Any]:
    """name -> leaf of a tree of parameters, without leaves masked out for other groups."""
    return {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def map_by_name(change: Callable[..., Any], tree: PyTree, *rest: PyTree) -> Any:
    """Map change(name, leaf, leaves of the other trees) over a tree."""
    named = lambda path, *leaves: change(name_of(path), *leaves)
    return jax.tree_util.tree_map_with_path(named, tree, *rest)


def mask_leaves(masks: Masks, tree: PyTree) -> Any:
    """Zero the masked weights in a tree of parameters, or their entries in an optimizer state."""

    def one(path: tuple[Any, ...], x: Array) -> Array:
        mask = masks.get(owner_of(path, masks) or "")
        return x if mask is None or mask.shape != x.shape else jnp.where(mask, x, 0)

    return jax.tree_util.tree_map_with_path(one, tree)


# ---- the largest of many ----------------------------------------------------------------------


def magnitude(x: Float[Array, "*L i o"]) -> Int[Array, "*L i o"]:
    """Integers ordered like |x|: the bits of a float32 without its sign."""
    return jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)


def keep_largest(keys: Int[Array, "*L i o"], keep: Int[Array, ""] | int) -> Bool[Array, "*L i o"]:
    """Mask of the `keep` largest keys of each matrix; ties go to the last. Keys below 0 are left
    out."""
    i, o = keys.shape[-2:]
    count = lambda masks: jnp.sum(masks[0], (-2, -1), dtype=jnp.int32, keepdims=True)
    return largest([keys], [jnp.arange(i * o, dtype=jnp.int32).reshape(i, o)], keep, count)[0]


def keep_largest_of_all(keys: dict[str, Int[Array, "*L i o"]], keep: Int[Array, ""] | int) -> Masks:
    """Masks of the `keep` largest keys of all matrices together. UserError for >= 2^31 keys."""
    if sum(x.size for x in keys.values()) >= 2**31:
        raise UserError(
            "optim.wrappers: scope: global ranks at most 2^31 weights; set scope: matrix"
        )
    places, start = [], 0
    for x in keys.values():
        places.append(start + jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape))
        start += x.size
    count = lambda masks: sum(jnp.sum(mask, dtype=jnp.int32) for mask in masks)
    return dict(zip(keys, largest(list(keys.values()), places, keep, count)))


def largest(
    keys: Sequence[Array],
    places: Sequence[Array],
    keep: Array | int,
    count: Callable[[Sequence[Array]], Any],
) -> list[Array]:
    """Masks with exactly `keep` True entries. Nothing is sorted: thresholds are found bit by bit
    from counts, which are summed over the devices that shard an array."""

    def threshold(keys: Sequence[Array], keep: Array | int) -> Array:
        """The largest integer such that at least `keep` keys are not below it."""

        def bit(i: Array, level: Array) -> Array:
            raised = level | (1 << (30 - i))
            return jnp.where(count([k >= raised for k in keys]) >= keep, raised, level)

        return jax.lax.fori_loop(0, 31, bit, jnp.zeros_like(count([k > 0 for k in keys])))

    level = threshold(keys, keep)
    above = [k > level for k in keys]
    tied = [jnp.where(k == level, index, -1) for k, index in zip(keys, places)]
    first = threshold(tied, keep - count(above))
    return [a | (t >= first) for a, t in zip(above, tied)]
