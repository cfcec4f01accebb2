"""Mean of the optimizer states of several replicas, when their number changes."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxtrain.optim.types import OptState


@runtime_checkable
class Mergeable(Protocol):
    """A state whose arrays are meaningful only together: codes with their scales, or an eigenbasis
    with statistics in it."""

    def merge(self) -> OptState:
        """Merge states stacked [R, ...] into one."""
        ...


def mean_over_replicas(x_R: Shaped[Array, "R *S"]) -> Shaped[Array, "*S"]:
    """Mean over R, summed in float32, in the array's dtype. Integers are counts, the same in all
    replicas: the first is returned."""
    if not jnp.issubdtype(x_R.dtype, jnp.floating):
        return x_R[0]
    return jnp.mean(x_R.astype(jnp.float32), axis=0).astype(x_R.dtype)


def is_mergeable(x: object) -> bool:
    """Whether a node of a state's tree has its own `merge`."""
    return isinstance(x, Mergeable)


def merge_states(states: OptState) -> OptState:
    """Mean of a tree of states or parameters stacked [R, ...], without the dim R."""
    one = lambda x: x.merge() if isinstance(x, Mergeable) else mean_over_replicas(x)
    return jax.tree.map(one, states, is_leaf=is_mergeable)
