"""model.remat=int8: the loss is exact, gradients are near, and less is kept for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_remat import kept, value_and_grad
from tiny import build

from jaxtrain.model.saved_activations import GROUP, compress, decompress

DEEP = {"depth": 2, "width": 128, "head_dim": 32, "window_pattern": "L", "attention": "xla"}
DEEP |= {"value_embeddings": False}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.quick("False")
def test_gradients_are_near_and_less_is_kept(scan):
    """An input of a layer takes 1 byte a channel and 4 a group, in the place of 4 a channel."""
    _, graphdef, _, params = build(**DEEP, remat="block", scan_layers=scan)
    (loss, grads), most = value_and_grad(graphdef, params), kept(graphdef, params)
    _, graphdef, _, _ = build(**DEEP, remat="int8", scan_layers=scan)
    found_loss, found = value_and_grad(graphdef, params)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        assert np.linalg.norm(x - y) <= 0.05 * np.linalg.norm(y) + 1e-7
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    error = np.linalg.norm(flat(found) - flat(grads)) / np.linalg.norm(flat(grads))
    assert 1e-6 < error < 0.02, "rounded, but near"
    tokens, width = 4 * 32, DEEP["width"]
    saved = DEEP["depth"] * tokens * (3 * width - 4 * width // GROUP)
    if not scan:  # the first layer's input is the embedding, which all layers keep whole
        saved -= 4 * tokens * width
    assert most - kept(graphdef, params) >= 0.9 * saved > 0


@pytest.mark.parametrize("width", [48, 2 * GROUP])
def test_rounding_by_hand(width):
    x = np.random.default_rng(0).normal(size=(2, 3, width)).astype(np.float32)
    x[0, 0] = 0
    groups = x.reshape(2, 3, -1, min(width, GROUP))
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    expected = (np.round(groups / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)
    rounded = compress(jnp.asarray(x))
    assert rounded.codes.dtype == jnp.int8 and rounded.scales.shape == (2, 3, groups.shape[2])
    np.testing.assert_allclose(decompress(rounded, jnp.float32), expected, atol=1e-6)
    assert np.abs(expected - x).max() <= 0.5 * scale.max() * 1.001
