"""`model.remat=dots` saves the matmuls of matrices in other forms: none is computed again."""

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.model.remat import matmuls
from jaxtrain.weights import WEIGHTS
from jaxtrain.weights.contract import matmul


@pytest.mark.parametrize("form", sorted(WEIGHTS))
def test_a_matmul_is_saved_in_every_form(form):
    w_1KN = jax.random.normal(jax.random.key(0), (1, 128, 128))
    w = jax.tree.map(lambda x: x[0], WEIGHTS[form].encode(w_1KN))

    def layer(x_MK):
        return jnp.sin(matmul(x_MK, w))

    def times(layer):
        """Matmuls in the value and the gradient of two layers."""
        both = jax.value_and_grad(lambda x_MK: layer(layer(x_MK)).sum())
        return str(jax.make_jaxpr(both)(jnp.ones((32, 128)))).count(" dot_general[")

    saved = times(jax.checkpoint(layer, policy=matmuls))
    assert 0 < saved <= times(layer) and saved < times(jax.checkpoint(layer))
