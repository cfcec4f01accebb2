"""Statistics that ride on gradients: what the backward pass reports besides derivatives.

In the place of its gradient, an experts' router bias gets its load, the tokens of each expert
(`model/moe.py`): summed over microbatches and devices like any gradient. Here alone they are told
from gradients. The largest magnitudes of delayed float8 scaling are no parameters': the step
differentiates them beside the parameters (`StepTransform.statistics`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.weights.params import BALANCE_GROUPS, Params, ParamSpec, Specs


def is_load(spec: ParamSpec) -> bool:
    """Whether a parameter's "gradient" is the load of experts."""
    return spec.group in BALANCE_GROUPS


def squared_norms(grads: Params, specs: Specs) -> Float[Array, "P"]:
    """The squared norm of each parameter's gradient; a load counts nothing."""
    leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(specs))
    return jnp.stack(
        [jnp.sum(jnp.square(g.astype(jnp.float32))) * (not is_load(s)) for g, s in leaves]
    )


def load_metrics(grads: Params, specs: Specs) -> dict[str, Array]:
    """Tokens of each expert over its layer's mean: averaged over the layers, and the extremes.

    Empty without experts, or where they are frozen.
    """
    leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(specs))
    loads = [load_LE for load_LE, spec in leaves if is_load(spec)]
    if not loads:
        return {}
    (load_LE,) = loads
    share_LE = load_LE / jnp.mean(load_LE, axis=1, keepdims=True)
    return {
        "expert_load": jnp.mean(share_LE, axis=0),
        "expert_load_max": jnp.max(share_LE),
        "expert_load_min": jnp.min(share_LE),
    }
