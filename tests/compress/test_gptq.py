"""GPTQ: less error at a matrix's output than round to nearest, and its arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.compress import gptq
from jaxtrain.compress.sparsify import inverse_cholesky
from jaxtrain.weights.int4 import pack_int4, quantize_int4


def correlated(K=96, N=12, tokens=300, seed=0):
    """A matrix, the inputs and their X^T X; some channels are much larger than others."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(tokens, K)) @ (np.eye(K) + 0.2 * random.normal(size=(K, K)))
    x = x * np.exp(1.5 * random.normal(size=K))
    return random.normal(size=(K, N)), x, x.T @ x


def whole(weight):
    return np.asarray(weight.dequantize(), np.float64)


def packed(codes, steps):
    return whole(pack_int4(jnp.asarray(codes), jnp.float32(steps), "float32"))


def error(x, w, new):
    return np.linalg.norm(x @ (w - new)) / np.linalg.norm(x @ w)


def test_it_leaves_less_error_than_absmax():
    w, x, H = correlated()
    nearest = error(x, w, whole(quantize_int4(jnp.float32(w), 32)))
    in_order = error(x, w, packed(*gptq.gptq_codes(w, H, 32)))
    by_size = error(x, w, packed(*gptq.gptq_codes(w, H, 32, act_order=True)))
    assert max(in_order, by_size) < 0.8 * nearest < 0.2


def test_gptq_without_correlation_is_round_to_nearest():
    """A diagonal Hessian hands no error on, whatever the order."""
    w, _, _ = correlated()
    H = np.diag(np.linspace(1, 9, len(w)))
    for act_order in (False, True):
        codes, steps = gptq.gptq_codes(w, H, 32, act_order, damping=0.0)
        nearest = quantize_int4(jnp.float32(w), 32)
        np.testing.assert_array_equal(codes, nearest.integers())
        np.testing.assert_array_equal(steps, nearest.scales)


@pytest.mark.parametrize("group", [24, 96, 256])
@pytest.mark.quick("96")
def test_gptq_is_that_of_one_input_at_a_time(group):
    """Blocks of 128 inputs give what updating all inputs behind at once does."""
    w, _, H = correlated(K=768 if group == 256 else 288, N=5, tokens=900)
    U, left = inverse_cholesky(H, 0.01), w.copy()
    codes, steps = gptq.gptq_codes(w, H, group)
    different = 0
    for i in range(len(w)):
        if i % group == 0:
            step = np.asarray(gptq.group_steps(jnp.asarray(left[i : i + group])), np.float64)
            np.testing.assert_allclose(steps[i // group], step, rtol=0.02)
        code = np.clip(np.round(left[i] / step), -8, 7)
        different += np.sum(code != codes[i])
        left[i:] -= U[i, i:, None] * (left[i] - code * step) / U[i, i]
    assert different <= 0.01 * w.size  # of a tie that another BLAS breaks otherwise


def test_the_factor_is_that_of_the_inverse():
    _, _, H = correlated()
    H[3] = H[:, 3] = 0
    with jax.enable_x64(True):
        U = gptq.inverse_factor(jnp.asarray(H), 0.01)
    assert U.dtype == np.float64
    np.testing.assert_allclose(U, inverse_cholesky(H, 0.01), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(U, np.triu(U))


def test_inputs_that_are_always_zero_are_left_out():
    w, _, H = correlated()
    H[3] = H[:, 3] = 0
    codes, steps = gptq.gptq_codes(w, H, 32)
    assert not codes[3].any() and jnp.isfinite(steps).all()
    zero = gptq.gptq_codes(np.zeros((32, 4)), np.zeros((32, 32)), 32)
    assert not zero[0].any() and not zero[1].any()
