"""Statistics that the backward pass returns in the place of gradients.

The "gradient" of a router's bias is the expert load: the tokens of each expert (`model/moe.py`). It
is summed over microbatches and devices like a gradient. Only this file distinguishes the two.
The amax values of delayed float8 scaling belong to no parameter: the step differentiates them as a
separate input (`StepTransform.statistics`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain.weights.params import BALANCE_GROUPS, Params, ParamSpec, Specs


def is_load(spec: ParamSpec) -> bool:
    """Whether a parameter's "gradient" is the expert load."""
    return spec.group in BALANCE_GROUPS


def squared_norms(grads: Params, specs: Specs) -> Float[Array, "P"]:
    """Return the squared norm of each parameter's gradient; 0 for an expert load."""
    leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(specs))
    return jnp.stack(
        [jnp.sum(jnp.square(g.astype(jnp.float32))) * (not is_load(s)) for g, s in leaves]
    )


def layer_squares(grads: Params, specs: Specs) -> Float[Array, " L"]:
    """Return the squared norm of each layer's gradient, over parameters that every layer has."""
    leaves = zip(jax.tree.leaves(grads["blocks"]), jax.tree.leaves(specs["blocks"]))
    stacked = [g for g, s in leaves if s.axes[0] == "layers" and not is_load(s)]
    depth = max(len(g) for g in stacked)
    rows = [g.astype(jnp.float32).reshape(depth, -1) for g in stacked if len(g) == depth]
    return sum((jnp.sum(jnp.square(g_LN), axis=1) for g_LN in rows), jnp.zeros(depth))


def load_metrics(grads: Params, specs: Specs) -> dict[str, Array]:
    """Return each expert's tokens relative to its layer's mean: mean over layers, max and min.

    Empty without experts, or if they are frozen.
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
