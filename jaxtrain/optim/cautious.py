"""Cautious updates for any optimizer (Liang et al. 2024, arXiv:2411.16085, algorithm 1)."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.types import Transformation, Wrapper, is_layer_stack
from jaxtrain.settings import Settings
from jaxtrain.weights.params import ParamSpec

MIN_MEAN = 1e-3  # lower bound of the mask's mean, as in the authors' code


class CautiousConfig(Settings):
    """Keeps only the update entries whose sign is opposite to the gradient's, and divides them by
    the fraction kept. Weight decay is part of the update."""

    name: Literal["cautious"] = "cautious"


def cautious_update(u: jax.Array, g: jax.Array, spec: ParamSpec) -> jax.Array:
    """Zero an update's entries that would go up the gradient, and divide by the share kept.

    u, g: update and gradient of one parameter, with the same shape. In a stack the share is per
    layer.
    """
    mask = (u * g < 0).astype(jnp.float32)
    axes = tuple(range(int(is_layer_stack(spec)), mask.ndim))
    share = jnp.mean(mask, axis=axes, keepdims=True)
    return (u * mask / jnp.maximum(share, MIN_MEAN)).astype(u.dtype)


def cautious(c: CautiousConfig) -> Wrapper:
    """Make the wrapper, which has no state of its own."""

    def wrap(tx: Transformation, label: str) -> Transformation:
        def update(updates, state, params=None, **extra):
            new, state = tx.update(updates, state, params, **extra)
            return jax.tree.map(cautious_update, new, updates, extra["specs"]), state

        return optax.GradientTransformationExtraArgs(tx.init, update)

    return Wrapper(wrap, by_rows=False)
