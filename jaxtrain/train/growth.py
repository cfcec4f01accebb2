"""The state of a phase as that of the next, which has more layers.

Parameters, optimizer states and what features keep of each layer are stacked over layers: a row of
GROWTHS says which of the old layers each new one is a copy of. Training goes on from there; the
step, the schedule and the data know nothing of it. Sources: G_stack (Du et al. 2024, Stacking Your
Transformers), gradual stacking (Reddi et al. 2023).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.model import initialize
from jaxtrain.optim import Optimizer
from jaxtrain.settings import UserError
from jaxtrain.train.step import State
from jaxtrain.weights.params import Specs


def stack(old: int, new: int) -> np.ndarray:
    """The whole stack again on top of itself: 0 1 2 0 1 2."""
    return np.arange(new) % old


def interleave(old: int, new: int) -> np.ndarray:
    """Each layer again behind itself: 0 0 1 1 2 2."""
    return np.arange(new) * old // new


# (old layers, new layers) -> of each new layer, the old one that it begins as.
GROWTHS: dict[str, Callable[[int, int], np.ndarray]] = {"stack": stack, "interleave": interleave}


def check_optimizer_grows(before: Optimizer, now: Optimizer, old: Specs, new: Specs) -> None:
    """Raises UserError unless the states of two phases differ in the number of layers alone.

    old, new: declarations of the parameters that train.
    """
    states = [
        jax.eval_shape(lambda o=o, specs=specs: o.init(initialize(specs, 0)))
        for o, specs in ((before, old), (now, new))
    ]
    if len({jax.tree.structure(state) for state in states}) > 1:
        raise UserError(
            "train.phases: the optimizer keeps another kind of state for matrices of more layers "
            "(8 bits from optim.min_size values on); set another optim.min_size or optimizer"
        )
    for one, other in zip(*map(jax.tree.leaves, states)):
        if one.shape != other.shape:
            layers_dim(one.shape, other.shape)


def layers_dim(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """The one dimension that differs. UserError where others do."""
    found = [dim for dim, (a, b) in enumerate(zip(old, new)) if a != b]
    if len(found) != 1 or len(old) != len(new):
        raise UserError(
            f"train.phases: a state of shape {old} cannot become one of {new}; only the number of "
            "layers may grow"
        )
    return found[0]


class Growth(NamedTuple):
    """How the checkpoint at a phase's start becomes the phase's first state."""

    step: int  # of that checkpoint
    before: State  # its shapes and places
    depths: tuple[int, int]  # layers of the model before and now
    name: str  # of GROWTHS

    def __call__(self, state: State, like: State) -> State:
        """`like`'s shapes and places, with the values of `state`, which is used up.

        UserError for a state that has another dimension than that of the layers.
        """
        grow = jax.jit(
            lambda tree: jax.tree.map(self._leaf, tree, like),
            out_shardings=jax.tree.map(lambda x: x.sharding, like),
        )
        grown = grow(state)
        jax.tree.map(lambda x: x.delete(), state)
        return grown

    def _leaf(self, old: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
        if old.shape == new.shape:
            return old
        found = [dim for dim, sizes in enumerate(zip(old.shape, new.shape)) if sizes[0] != sizes[1]]
        if len(found) != 1 or old.ndim != new.ndim:
            raise UserError(
                f"train.phases: a state of shape {old.shape} cannot become one of {new.shape}; "
                "only the number of layers may grow"
            )
        (dim,) = found
        return jnp.take(old, self.copies(old.shape[dim], new.shape[dim]), axis=dim)

    def copies(self, old: int, new: int) -> np.ndarray:
        """Of each of `new` entries, the old one that it copies.

        The entries are layers; values of layers one after the other, as blocks of an 8-bit state;
        or only some of the layers, which have a part that others have not.
        """
        (few, many), each = self.depths, old // self.depths[0]
        if old != few * each or new != many * each:
            return GROWTHS[self.name](old, new)
        layers = GROWTHS[self.name](few, many)
        return (layers[:, None] * each + np.arange(each)).reshape(-1)
