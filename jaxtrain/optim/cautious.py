"""Cautious updates of any optimizer (Liang et al. 2024, arXiv:2411.16085, algorithm 1)."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.types import Transformation, Wrapper, is_layer_stack
from jaxtrain.settings import Settings
from jaxtrain.weights.params import ParamSpec

MIN_MEAN = 1e-3  # of the mask, as in the authors' code


class CautiousConfig(Settings):
    """Only those entries of an update count that go against their gradient's sign; they grow by as
    much as the others take away. Weight decay is a part of the update."""

    name: Literal["cautious"] = "cautious"


def cautious_update(u: jax.Array, g: jax.Array, spec: ParamSpec) -> jax.Array:
    """An update without the entries that would go up the gradient, over the share that is left.

    u, g: update and gradient of one parameter, the same shape. In a stack the share is each
    layer's own.
    """
    mask = (u * g < 0).astype(jnp.float32)
    axes = tuple(range(int(is_layer_stack(spec)), mask.ndim))
    share = jnp.mean(mask, axis=axes, keepdims=True)
    return (u * mask / jnp.maximum(share, MIN_MEAN)).astype(u.dtype)


def cautious(c: CautiousConfig) -> Wrapper:
    """Keeps no state of its own."""

    def wrap(tx: Transformation, label: str) -> Transformation:
        def update(updates, state, params=None, **extra):
            new, state = tx.update(updates, state, params, **extra)
            return jax.tree.map(cautious_update, new, updates, extra["specs"]), state

        return optax.GradientTransformationExtraArgs(tx.init, update)

    return Wrapper(wrap, by_rows=False)
