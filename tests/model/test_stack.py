"""A scan over layers keeps no copy of their weights."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tiny import build, tokens

LAYERS = {"depth": 4, "attention": "xla", "scan_layers": True}


def kept_weights(**changes):
    """Shapes of weight matrices among what the forward scan hands on to the backward one."""
    _, graphdef, _, params = build(**LAYERS, **changes)
    matrices = {leaf.shape[1:] for leaf in jax.tree.leaves(params["blocks"]) if leaf.ndim == 3}
    tokens_BT = jnp.asarray(tokens()[:, :24])  # activations end in other sizes than matrices
    hidden = lambda p: jnp.sum(nnx.merge(graphdef, p)(tokens_BT).states)
    eqns = jax.make_jaxpr(jax.grad(hidden))(params).jaxpr.eqns
    forward, _ = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    shapes = [v.aval.shape for v in forward.outvars]
    return [shape for shape in shapes if shape[-2:] in matrices]


@pytest.mark.parametrize("pattern", ["L", "SL"])
@pytest.mark.slow
def test_no_weights_are_kept(pattern):
    assert not kept_weights(window_pattern=pattern, remat="block")
    assert not kept_weights(window_pattern=pattern)
    # Kept where half of a layer is computed again: a layer is a slice of its period's stack.
    assert kept_weights(window_pattern=pattern, remat="ffn")
