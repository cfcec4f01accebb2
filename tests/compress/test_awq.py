"""AWQ: less error at a matrix's output than absmax where a few inputs are large."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.compress import awq
from jaxtrain.compress.calibrate import Inputs, statistics
from jaxtrain.compress.methods import METHODS, MethodOptions
from jaxtrain.settings import UserError
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.stored import arrays_of, form_of, rebuild

K, N, GROUP = 64, 12, 32


def loud_channels(seed=0, loud=3):
    """A matrix [K, N] and inputs [tokens, K]; a few of them are 30 times the others."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(200, K))
    x[:, random.choice(K, loud, replace=False)] *= 30
    return jnp.float32(random.normal(size=(K, N))), jnp.float32(x)


def output_error(x, w, weight):
    return float(np.linalg.norm(x @ (w - weight.dequantize())) / np.linalg.norm(x @ w))


def quantized(w, inputs):
    return METHODS["awq"].quantize(w, inputs, MethodOptions(GROUP))


def test_loud_channels_leave_less_error_than_absmax():
    w, x = loud_channels()
    nearest = output_error(x, w, quantize_int4(w, GROUP))
    scaled = output_error(x, w, quantized(w, statistics([x], hessian=True)))
    assert scaled < 0.7 * nearest < 0.15


def test_the_scale_is_the_best_of_twenty_powers():
    w, x = loud_channels()
    inputs = statistics([x], hessian=True)
    mean_K = inputs.magnitude_K / inputs.tokens
    errors = []
    for alpha in np.arange(20) / 20:
        scales = awq.input_scales(mean_K, jnp.float32(alpha))
        assert float(jnp.min(scales) * jnp.max(scales)) == pytest.approx(1, rel=0.02)
        errors.append(output_error(x, w, awq.scaled_int4(w, scales, GROUP)))
    assert 0 < np.argmin(errors) < 19
    assert output_error(x, w, quantized(w, inputs)) == pytest.approx(min(errors), rel=1e-3)


def test_inputs_of_one_size_are_rounded_to_nearest():
    """Alpha = 0, and any power of equal sizes, is absmax; so is a matrix without statistics."""
    w, _ = loud_channels()
    equal = Inputs(jnp.float32(9), jnp.ones(K), jnp.ones(K), jnp.ones(K), jnp.eye(K))
    nearest = quantize_int4(w, GROUP).dequantize()
    for inputs in (equal, None):
        np.testing.assert_array_equal(quantized(w, inputs).dequantize(), nearest)


def test_inputs_that_are_always_zero_have_finite_scales():
    w, x = loud_channels()
    for silent in (x.at[:, :5].set(0), 0 * x):
        weight = quantized(w, statistics([silent], hessian=True))
        assert np.isfinite(weight.dequantize()).all()
        assert np.all(arrays_of("a", weight)["a/input_scales"] > 0)


def test_the_stored_form_comes_back_and_names_what_is_missing():
    w, x = loud_channels()
    weight = quantized(w, statistics([x], hessian=True))
    form, arrays = form_of(weight), arrays_of("a", weight)
    assert form.form == "int4_scaled" and arrays["a/input_scales"].shape == (K,)
    again = rebuild("a", form, arrays)
    np.testing.assert_array_equal(again.dequantize(), weight.dequantize())
    np.testing.assert_allclose(again.matmul(x), x @ weight.dequantize(), rtol=1e-5, atol=1e-4)
    del arrays["a/input_scales"]
    with pytest.raises(UserError, match="stored as int4_scaled, but there is no a/input_scales"):
        rebuild("a", form, arrays)


def test_groups_that_do_not_divide_the_inputs_are_one_line():
    w, x = loud_channels()
    with pytest.raises(UserError, match="groups of 24, .* 64 inputs .*: --group-size 16 does"):
        METHODS["awq"].quantize(w, statistics([x], hessian=True), MethodOptions(24))
