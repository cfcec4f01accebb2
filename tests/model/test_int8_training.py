"""Training in int8: sums of integers, exact by hand; the mean gradient is the unrounded one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_low_bit import distance, random

from jaxtrain.weights import WEIGHTS, int8_training
from jaxtrain.weights.contract import matmul

X, W, DY = random(2, 24, 40), random(40, 56, seed=1), random(2, 24, 56, seed=2)


def products(form, key=None, dtype=jnp.float32, **options):
    """y, dx, dw."""
    encode = lambda w: WEIGHTS[form].encode(w, key, **options)
    given = jnp.asarray(X, dtype), jnp.asarray(W, dtype)
    y, back = jax.vjp(lambda x, w: matmul(x, encode(w)), *given)
    return y, *back(jnp.asarray(DY, dtype))


def codes(x, axis):
    """Whole numbers -127 .. 127 and their scales, in float64."""
    scale = np.abs(x).max(axis, keepdims=True).astype(np.float64) / 127
    return np.round(x / scale) * scale


@pytest.mark.parametrize("form", ["int8_training", "switchback"])
def test_products_are_those_of_integers(form):
    x, dy = X.reshape(-1, 40), DY.reshape(-1, 56)
    y, dx, dw = products(form, stochastic_rounding=False)
    np.testing.assert_allclose(y.reshape(-1, 56), codes(x, 1) @ codes(W, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        dx.reshape(-1, 40), codes(dy, 1) @ codes(W.T, 0), rtol=1e-5, atol=1e-5
    )
    expected = x.T @ dy if form == "switchback" else codes(x.T, 1) @ codes(dy, 0)
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-4)
    assert 1e-3 < distance(y, X @ W) < 0.02


@pytest.mark.parametrize(("form", "count"), [("int8_training", 3), ("switchback", 2)])
def test_sums_are_in_int32(form, count):
    text = str(jax.make_jaxpr(lambda key: products(form, key, jnp.bfloat16))(jax.random.key(0)))
    dots = [line for line in text.splitlines() if "preferred_element_type=int32" in line]
    assert text.count("preferred_element_type=int32") == count, dots


@pytest.mark.slow
def test_the_mean_gradient_is_the_unrounded_one():
    keys = jax.random.split(jax.random.key(0), 256)
    many = jax.jit(jax.vmap(lambda key: products("int8_training", key)[1:]))(keys)
    x, dy = X.reshape(-1, 40), DY.reshape(-1, 56)
    exact = (dy @ codes(W.T, 0)).reshape(X.shape), codes(x.T, 1) @ dy
    for found, expected in zip(many, exact):
        one = distance(found[0], expected)
        assert one > 1e-3 and distance(found.mean(0), expected) < 0.2 * one


def test_a_sum_that_int32_cannot_hold_is_taken_in_parts(monkeypatch):
    monkeypatch.setattr(int8_training, "LONGEST", 16)
    parts = products("int8_training", stochastic_rounding=False)
    monkeypatch.undo()
    assert int8_training.LONGEST * 127**2 < 2**31
    for a, b in zip(parts, products("int8_training", stochastic_rounding=False)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    """The step's guard must see it."""
    x = jnp.asarray(X[0]).at[3, 5].set(bad)
    y = matmul(x, int8_training.int8_training(jnp.asarray(W)))
    assert np.isfinite(np.delete(y, 3, 0)).all() and not np.isfinite(y[3]).any()


def test_zeros_stay_zeros():
    zero = jnp.zeros((4, 40))
    assert not matmul(zero, int8_training.int8_training(jnp.asarray(W))).any()
