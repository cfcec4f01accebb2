"""SmoothQuant: int8 products that a few large inputs do not spoil."""

import jax
import jax.numpy as jnp
import numpy as np
from test_awq import K, N, loud_channels

from jaxtrain.compress.calibrate import statistics
from jaxtrain.compress.methods import METHODS, MethodOptions
from jaxtrain.weights import w8a8
from jaxtrain.weights.stored import arrays_of, form_of, rebuild


def smoothed(w, x, alpha=0.5):
    inputs = statistics([x], hessian=False)
    return METHODS["w8a8"].quantize(w, inputs, MethodOptions(alpha=alpha))


def product_error(x, w, weight):
    return float(np.linalg.norm(x @ w - weight.matmul(x)) / np.linalg.norm(x @ w))


def test_loud_channels_leave_less_error_than_without_smoothing():
    w, x = loud_channels()
    quiet = jnp.where(jnp.max(jnp.abs(x), axis=0, keepdims=True) < 10, x, 0)
    rough = METHODS["w8a8"].quantize(w, None, MethodOptions())
    assert product_error(x, w, smoothed(w, x)) < 0.7 * product_error(x, w, rough) < 0.05
    assert product_error(quiet, w, smoothed(w, x)) < 0.05


def test_the_scales_are_those_of_the_paper():
    w, x = loud_channels()
    amax, most = np.max(np.abs(np.asarray(x)), 0), np.max(np.abs(np.asarray(w)), 1)
    for alpha in (0.0, 0.3, 1.0):
        scales = arrays_of("a", smoothed(w, x, alpha))["a/input_scales"].astype(jnp.float32)
        np.testing.assert_allclose(scales, amax**alpha / most ** (1 - alpha), rtol=2**-8)


def test_the_product_is_the_dequantized_one_within_the_rounding_of_the_inputs():
    """An input is off by half a step, amax / 254 of its token, at most."""
    w, x = loud_channels()
    weight = smoothed(w, x)
    scales = np.asarray(arrays_of("a", weight)["a/input_scales"], np.float32)
    whole = np.asarray(weight.dequantize())
    half = np.abs(np.asarray(x) / scales).max(1) / 254
    bound = half[:, None] * np.abs(whole * scales[:, None]).sum(0)[None]
    off = np.abs(weight.matmul(x) - x @ whole)
    assert np.all(off <= 1.01 * bound) and np.max(off) > 0
    one_by_one = np.concatenate([weight.matmul(row[None]) for row in x[:5]])
    np.testing.assert_allclose(one_by_one, weight.matmul(x)[:5], rtol=1e-5, atol=1e-5)
    by_hand = np.round(np.asarray(x) / scales / half[:, None] / 2) * 2 * half[:, None] * scales
    np.testing.assert_allclose(weight.matmul(x), by_hand @ whole, rtol=1e-3, atol=2e-2)


def test_an_input_that_is_always_zero_is_not_smoothed():
    w, x = loud_channels()
    weight = smoothed(w.at[3].set(0), x.at[:, 5].set(0))
    scales = arrays_of("a", weight)["a/input_scales"]
    assert scales[3] == scales[5] == 1 and np.isfinite(weight.matmul(x)).all()
    assert not np.asarray(weight.matmul(0 * x)).any()


def test_the_gradient_of_the_inputs_is_that_of_the_dequantized_matrix():
    w, x = loud_channels()
    weight, dy = smoothed(w, x), jnp.ones((len(x), N))
    found = jax.vjp(lambda x: w8a8.w8a8_matmul(x, weight), x)[1](dy)[0]
    np.testing.assert_allclose(found, dy @ weight.dequantize().T, rtol=1e-5, atol=1e-5)


def test_the_stored_form_comes_back():
    w, x = loud_channels()
    weight = smoothed(w, x)
    form = form_of(weight)
    assert form.form == "w8a8" and form.facts == {"dtype": "float32"}
    again = rebuild("a", form, arrays_of("a", weight))
    np.testing.assert_array_equal(again.matmul(x[:, None]), weight.matmul(x[:, None]))
    assert arrays_of("a", again)["a/input_scales"].shape == (K,)
