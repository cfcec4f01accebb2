"""Compressed saved activations: the loss is exact, less is kept, and the mean gradient is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_remat import kept, value_and_grad
from tiny import batch, build, make_spec, random_params, resolved, tokens

from jaxtrain.model.saved_activations import COMPRESSIONS, GROUP, compress, decompress
from jaxtrain.train.step import gradients

DEEP = {"depth": 2, "width": 128, "head_dim": 32, "window_pattern": "L", "attention": "xla"}
DEEP |= {"value_embeddings": False}


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("width", [10, 48, 2 * GROUP])
@pytest.mark.quick("48-8", "48-2")
def test_values_are_near_and_packed(width, bits):
    """A byte has 8 / bits values; a group's values are whole steps from its least."""
    x = np.random.default_rng(0).normal(size=(2, 3, width)).astype(np.float32)
    x[0, 0], x[0, 1] = 0, 3.3
    key = jax.random.key(0)
    for draw in (key, None):
        packed = compress(jnp.asarray(x), bits, draw)
        found = decompress(packed)
        assert packed.codes.dtype == jnp.uint8 and packed.codes.shape[-1] == -(-width * bits // 8)
        groups = x.reshape(2, 3, -1, GROUP if width % GROUP == 0 else width)
        assert packed.least.shape == packed.step.shape == groups.shape[:-1]
        span = groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)
        step = 1.02 * span / (2**bits - 1) + 0.02 * np.abs(groups).max(-1, keepdims=True)
        most = (step if draw is not None else 0.51 * step).repeat(groups.shape[-1], -1)
        assert (np.abs(found - x) <= most.reshape(x.shape)).all()
        assert not found[0, 0].any() and found.dtype == x.dtype


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.quick("4")
def test_the_mean_over_draws_is_the_value(bits):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, GROUP)), jnp.float32)
    draw = jax.vmap(lambda key: decompress(compress(x, bits, key)))
    many = jax.jit(draw)(jax.random.split(jax.random.key(0), 2000))
    one = np.linalg.norm(many[0] - x)
    assert np.linalg.norm(many.mean(0) - x) < 0.06 * one
    assert not np.isfinite(decompress(compress(x.at[0, 0].set(jnp.nan), bits, None))[0]).any()


# ---- a model -------------------------------------------------------------------------------------


def distance(a, b):
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    return np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.quick("False")
def test_less_is_kept_of_layers_inputs(scan):
    """An input of a layer takes bits / 8 bytes a channel and 4 a group, in the place of 4."""
    _, graphdef, _, params = build(**DEEP, remat="block", scan_layers=scan)
    count, width = 4 * 32, DEEP["width"]
    most = kept(graphdef, params)
    for bits in (8, 4, 2):
        graphdef = build(**DEEP, remat=f"int{bits}", scan_layers=scan)[1]
        saved = DEEP["depth"] * count * (4 * width - width * bits // 8 - 4 * width // GROUP)
        if not scan:  # the first layer's input is the embedding, which all layers keep whole
            saved -= 4 * count * width
        assert most - kept(graphdef, params) >= 0.9 * saved > 0


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.slow
def test_less_is_kept_of_all_activations(scan):
    """Codes take bits / 8 bytes a value, all of them; weights are not among them."""
    _, graphdef, _, params = build(**DEEP, scan_layers=scan)
    sizes, plain = {}, kept(graphdef, params)
    for bits in (8, 4, 2):
        graphdef = build(**DEEP, remat=f"actnn{bits}", scan_layers=scan)[1]
        states = lambda p, g=graphdef: nnx.merge(g, p)(jnp.asarray(tokens())).states
        pullback = lambda p, states=states: jax.vjp(states, p)[1]
        leaves = jax.tree.leaves(jax.eval_shape(pullback, params))
        sizes[bits] = sum(x.size for x in leaves if x.dtype == jnp.uint8)
        assert kept(graphdef, params) < plain - sizes[8]
    values = 4 * 32 * DEEP["width"]  # of one state
    assert sizes[8] == 2 * sizes[4] == 4 * sizes[2] > 8 * DEEP["depth"] * values


@functools.cache
def gradients_of(remat, **changes):
    """key -> (loss, gradients) of one batch."""
    fields = DEEP | {"depth": 1, "smear": False, "remat": remat} | changes
    task, _ = make_spec(resolved(**fields))
    params, rows = random_params(task.specs), jax.tree.map(jnp.asarray, batch(2, micro=2))

    def run(key):
        (loss, _), grads, _ = gradients(task, params, rows, jnp.float32(1), key=key)
        return loss, grads

    return jax.jit(run)


@pytest.mark.parametrize("remat", ["actnn8", "actnn4"])
@pytest.mark.slow
def test_the_mean_gradient_approaches_the_exact_one(remat):
    """As draws are added; the loss is exact."""
    loss, exact = gradients_of("none")(jax.random.key(0))
    found = [gradients_of(remat)(jax.random.key(i)) for i in range(32)]
    np.testing.assert_allclose([each for each, _ in found], float(loss), rtol=1e-6)
    one = distance(found[0][1], exact)
    mean = jax.tree.map(lambda *x: sum(x) / len(x), *(grads for _, grads in found))
    assert 1e-3 < one < 1 and distance(mean, exact) < 0.5 * one


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["actnn4", "int8", "int2"])
def test_gradients_are_near_in_a_scan_too(remat):
    """Nearer with more bits; the same key, the same bits."""
    exact = gradients_of("none", depth=2)(jax.random.key(0))[1]
    for scan in (False, True):
        run = gradients_of(remat, depth=2, scan_layers=scan)
        grads = run(jax.random.key(0))[1]
        assert 1e-4 < distance(grads, exact) < {8: 0.05, 4: 0.4, 2: 1.1}[COMPRESSIONS[remat].bits]
        assert distance(run(jax.random.key(0))[1], grads) == 0
        assert distance(run(jax.random.key(1))[1], grads) > 1e-4


@pytest.mark.slow
def test_evaluation_rounds_nothing():
    """Without a key values round to nearest, and only gradients see it."""
    _, graphdef, _, params = build(**DEEP)
    loss = value_and_grad(graphdef, params)[0]
    found = value_and_grad(build(**DEEP, remat="actnn2")[1], params)[0]
    np.testing.assert_allclose(found, loss, rtol=1e-6)
