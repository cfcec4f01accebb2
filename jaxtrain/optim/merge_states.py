"""The mean of several optimizers' states: of replicas that go on as one, or as another number."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxtrain.optim.types import OptState


@runtime_checkable
class Mergeable(Protocol):
    """A state whose arrays mean something only together: codes with their scales, an eigenbasis
    with what is measured in it."""

    def merge(self) -> OptState:
        """Of states stacked [R, ...], the one that stands for all R of them."""
        ...


def mean_over_replicas(x_R: Shaped[Array, "R *S"]) -> Shaped[Array, "*S"]:
    """The mean over R, summed up in float32, in the array's dtype; the first of integers, which
    are counts and alike in all."""
    if not jnp.issubdtype(x_R.dtype, jnp.floating):
        return x_R[0]
    return jnp.mean(x_R.astype(jnp.float32), axis=0).astype(x_R.dtype)


def is_mergeable(x: object) -> bool:
    """Whether a node of a state's tree is to be merged by its own rule, as a whole."""
    return isinstance(x, Mergeable)


def merge_states(states: OptState) -> OptState:
    """Of a tree of states or parameters stacked [R, ...], their mean, without the R."""
    one = lambda x: x.merge() if isinstance(x, Mergeable) else mean_over_replicas(x)
    return jax.tree.map(one, states, is_leaf=is_mergeable)
