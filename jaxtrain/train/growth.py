"""Model growth: turns the state of a phase into that of the next phase, which has more layers.

Parameters, optimizer states and transforms' states are stacked over layers. A function of GROWTHS
makes the new layers from the old ones. Step, schedule and data do not change. Sources: G_stack (Du
et al. 2024, Stacking Your Transformers), gradual stacking (Reddi et al. 2023).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from jaxtrain.model import initialize
from jaxtrain.optim import Optimizer
from jaxtrain.settings import UserError
from jaxtrain.train.step import State
from jaxtrain.weights.params import Specs


class Layers(NamedTuple):
    """An array of the state with a layer dimension."""

    path: str  # "params/blocks/ffn/up", "optimizer/...", "extras/..."
    x: jax.Array
    dim: int
    depths: tuple[int, int]  # layers of the model before and now
    size: int  # new size of the dimension

    def copied(self, copies: Callable[[int, int], np.ndarray]) -> jax.Array:
        """Return the array whose new layer i is a copy of old layer copies(old, new)[i].

        One entry along the dimension is one layer, with two exceptions: 8-bit states have several
        blocks per layer, and a parameter that only some layers have (experts) has fewer entries.
        """
        (few, many), had = self.depths, self.x.shape[self.dim]
        each = had // few
        if had == few * each and self.size == many * each:
            layers = copies(few, many)
            index = (layers[:, None] * each + np.arange(each)).reshape(-1)
        else:
            index = copies(had, self.size)
        return jnp.take(self.x, index, axis=self.dim)


def stack(layers: Layers) -> jax.Array:
    """Put a copy of the whole stack on top: 0 1 2 0 1 2."""
    return layers.copied(lambda old, new: np.arange(new) % old)


def interleave(layers: Layers) -> jax.Array:
    """Put a copy of each layer after it: 0 0 1 1 2 2."""
    return layers.copied(lambda old, new: np.arange(new) * old // new)


def repeat_top(layers: Layers) -> jax.Array:
    """Repeat the last layers on top (gradual stacking, Reddi et al. 2023): 0 1 2 1 2."""

    def copies(old: int, new: int) -> np.ndarray:
        index = np.arange(new)
        # If more layers are added than exist, the old layers repeat as often as needed.
        start = max(2 * old - new, 0)
        return np.where(index < old, index, start + (index - old) % (old - start))

    return layers.copied(copies)


ADAPTERS = "adapters"  # growth from ReLoRA's full-rank warm start: adapters are added
# Layers -> the next phase's array, with `size` entries along `dim`.
GROWTHS: dict[str, Callable[[Layers], jax.Array]] = {
    "stack": stack,
    "interleave": interleave,
    "repeat_top": repeat_top,
}


def check_optimizer_grows(before: Optimizer, now: Optimizer, old: Specs, new: Specs) -> None:
    """Raise UserError if the states of two phases differ in more than the number of layers.

    old, new: declarations of the trainable parameters.
    """
    states = [
        jax.eval_shape(lambda o=o, specs=specs: o.init(initialize(specs, 0)))
        for o, specs in ((before, old), (now, new))
    ]
    if len({jax.tree.structure(state) for state in states}) > 1:
        raise UserError(
            "train.phases: the optimizer state changes its type when layers are added (8-bit from "
            "optim.min_size values on); set another optim.min_size or optimizer"
        )
    for one, other in zip(*map(jax.tree.leaves, states)):
        if one.shape != other.shape:
            layers_dim(one.shape, other.shape)


def layers_dim(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """Return the dimension in which two shapes differ. Raises UserError if several differ."""
    found = [dim for dim, (a, b) in enumerate(zip(old, new)) if a != b]
    if len(found) != 1 or len(old) != len(new):
        raise UserError(
            f"train.phases: a state of shape {old} cannot become one of {new}; only the number of "
            "layers may grow"
        )
    return found[0]


class Growth(NamedTuple):
    """Conversion of the checkpoint at a phase's start into the phase's first state."""

    step: int  # of that checkpoint
    before: State  # shapes and shardings of that checkpoint
    depths: tuple[int, int]  # layers of the model before and now
    name: str  # a key of GROWTHS, or ADAPTERS
    fresh: Callable[[], State] | None = None  # makes the phase's initial state

    def __call__(self, state: State, like: State) -> State:
        """Grow `state` to the shapes and shardings of `like`; donates `state`.

        Raises UserError if an array differs in more than one dimension.
        """
        if self.name == ADAPTERS:
            return self._add_adapters(state, like)
        grow = jax.jit(
            lambda tree: jax.tree_util.tree_map_with_path(self._leaf, tree, like),
            out_shardings=jax.tree.map(lambda x: x.sharding, like),
        )
        grown = grow(state)
        jax.tree.map(lambda x: x.delete(), state)
        return grown

    def _add_adapters(self, state: State, like: State) -> State:
        """Make the initial state of the phase, with the values that the phase before has for it."""
        fresh = self.fresh
        assert fresh is not None
        by_name = lambda tree: {
            jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)
        }

        def adopt(old: State) -> State:
            had = by_name(old)
            take = lambda path, x: had.get(jax.tree_util.keystr(path), x)
            return jax.tree_util.tree_map_with_path(take, fresh())

        shardings = jax.tree.map(lambda x: x.sharding, like)
        return jax.jit(adopt, out_shardings=shardings, donate_argnums=0)(state)

    def _leaf(self, path: KeyPath, old: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
        if old.shape == new.shape:
            return old
        dim = layers_dim(old.shape, new.shape)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return GROWTHS[self.name](Layers(name, old, dim, self.depths, new.shape[dim]))
