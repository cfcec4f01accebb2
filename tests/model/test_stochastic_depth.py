"""model.stochastic_depth: layers are skipped by the step's key; evaluation uses them all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import build, tokens

from jaxtrain.model import Forward
from jaxtrain.model.attention import attend_rows
from jaxtrain.model.fused_ops import PLAIN
from jaxtrain.model.run_layers import run_layers
from jaxtrain.model.stochastic_depth import keep_probabilities

FIELDS = {"depth": 4, "window_pattern": "L", "value_embeddings": False, "backout": False}
RATE = 0.8


def states(params, graphdef, key=None):
    run = lambda p, key: nnx.merge(graphdef, p)(jnp.asarray(tokens(2)), mode=Forward(key))
    return jax.jit(run)(params, key).states


def kept_layers(c, key):
    """Which layers a step of this key keeps, from the formula."""
    draw = lambda i, keep: jax.random.bernoulli(jax.random.fold_in(key, i), keep)
    return [bool(draw(i, keep)) for i, keep in enumerate(keep_probabilities(c))]


@pytest.fixture(scope="module")
def model():
    c, graphdef, _, params = build(**FIELDS, stochastic_depth=RATE)
    return c, graphdef, params


def test_the_probability_falls_linearly(model):
    np.testing.assert_allclose(keep_probabilities(model[0]), [0.8, 0.6, 0.4, 0.2], rtol=1e-6)


def test_evaluation_is_the_plain_model(model):
    _, graphdef, params = model
    plain = build(**FIELDS)[1]
    np.testing.assert_array_equal(states(params, graphdef), states(params, plain))


def test_a_skipped_layer_is_absent_and_a_kept_one_weighs_more(model):
    """By hand: the layers that the key keeps, one at a time, each addition over its probability."""
    c, graphdef, params = model
    one = build(**FIELDS | {"depth": 1})[1]
    keys = [jax.random.key(i) for i in range(40)]
    key = next(k for k in keys if 0 < sum(kept_layers(c, k)) < c.depth)
    merged = nnx.merge(one, jax.tree.map(lambda x: x, layer_of(params, 0)))
    x0_BTD, _ = merged.embed_tokens(jnp.asarray(tokens(2)), None)
    x_BTD = x0_BTD
    for i, (kept, keep) in enumerate(zip(kept_layers(c, key), keep_probabilities(c), strict=True)):
        if kept:
            x_BTD = x_BTD + (through(one, layer_of(params, i), x_BTD, x0_BTD) - x_BTD) / keep
    expected = merged.final_norm(x_BTD, x_BTD)
    np.testing.assert_allclose(states(params, graphdef, key), expected, rtol=1e-4, atol=1e-4)


def layer_of(params, i):
    """The parameters of a model of layer i alone."""
    scales = {n: params[n][i : i + 1] for n in ("residual_scale", "x0_scale")}
    return {**params, **scales, "blocks": jax.tree.map(lambda x: x[i : i + 1], params["blocks"])}


def through(graphdef, params, x_BTD, x0_BTD):
    """The stream after a model's only layer."""
    model = nnx.merge(graphdef, params)
    inputs = model.layer_inputs(x0_BTD, jnp.asarray(tokens(2)), None, None, attend_rows, PLAIN)
    start, runs = (x_BTD, x_BTD), [(model.plan, 1)]
    return run_layers(model.modules(), model.stack(), runs, start, inputs).x_BTD


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"scan_layers": True}, {"scan_layers": True, "remat": "int8"}])
def test_scan_is_unroll(model, changes):
    _, graphdef, params = model
    scanned = build(**FIELDS, stochastic_depth=RATE, **changes)[1]
    key = jax.random.key(3)
    plain, found = states(params, graphdef, key), states(params, scanned, key)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_layer_is_a_branch_of_the_program_forward_and_backward(model):
    """A skipped layer costs no time: its products stand inside a `case` of the lowered program."""
    _, graphdef, params = model
    loss = lambda p, key: jnp.mean(jnp.square(states(p, graphdef, key)))
    text = jax.jit(jax.grad(loss)).lower(params, jax.random.key(0)).as_text()
    plain = jax.jit(jax.grad(lambda p: jnp.mean(jnp.square(states(p, build(**FIELDS)[1])))))
    assert text.count("stablehlo.case") >= 2 * FIELDS["depth"]
    assert "stablehlo.case" not in plain.lower(params).as_text()


@pytest.mark.slow
def test_skipped_layers_get_no_gradient(model):
    c, graphdef, params = model
    key = next(k for k in map(jax.random.key, range(40)) if 0 < sum(kept_layers(c, k)) < c.depth)
    grads = jax.grad(lambda p: jnp.mean(jnp.square(states(p, graphdef, key)[:, :4])))(params)
    found = np.abs(grads["blocks"]["attention"]["v"]).max(axis=(1, 2)) > 0
    assert found.tolist() == kept_layers(c, key)
