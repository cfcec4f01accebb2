"""Stored forms by hand: codes, scales, bytes, and the matrix that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.compress.awq import scaled_int4
from jaxtrain.settings import UserError
from jaxtrain.weights.float8_storage import quantize_e4m3
from jaxtrain.weights.int4 import quantize_int4, quantize_offset_int4
from jaxtrain.weights.quantized import quantize_int8, quantize_nf4
from jaxtrain.weights.stored import STORED, arrays_of, form_of, rebuild, stored_bytes, stored_shape
from jaxtrain.weights.w8a8 import quantize_dynamic_int8, quantize_w8a8

# Of the inputs of `matrix`: powers of two, so that dividing by them rounds nothing.
INPUT_SCALES = jnp.exp2(jnp.arange(256.0) % 2)
ENCODE = {
    "int8": quantize_int8, "int4": quantize_int4, "nf4": quantize_nf4, "float8": quantize_e4m3,
    "int4_offset": quantize_offset_int4,
    "int4_scaled": lambda w: scaled_int4(w, INPUT_SCALES, 128),
    "w8a8": lambda w: quantize_w8a8(w, jnp.full(256, 2.0)),  # inputs of ones are rounded to ones
    "dynamic_int8": quantize_dynamic_int8,
}  # fmt: skip
BITS = {
    "int8": 8 + 32 / 256, "int4": 4 + 16 / 128, "nf4": 4.2, "float8": 8 + 32 / 256,
    "int4_scaled": 4 + 16 / 128 + 16 / 64, "w8a8": 8 + 32 / 256 + 16 / 64,
    "dynamic_int8": 8 + 32 / 256, "int4_offset": 4 + 48 / 128,
}  # fmt: skip
# Of a form, relative to the matrix.
ERROR = {
    "int8": 0.01, "float8": 0.03, "int4": 0.12, "nf4": 0.1, "int4_scaled": 0.2, "w8a8": 0.02,
    "dynamic_int8": 0.01, "int4_offset": 0.11,
}  # fmt: skip


def matrix(K=256, N=64):
    return jnp.asarray(np.random.default_rng(0).normal(size=(K, N)), jnp.float32)


def test_int4_by_hand():
    """In groups of 4 inputs: 7 steps are the largest magnitude; the even input in the low half."""
    w = np.zeros((8, 2), np.float32)
    w[:4, 0], w[4:, 0], w[:4, 1] = [7, -3.4, 1, 0], [0.5, -0.25, 0, 0.5], [-14, 2, 4, 6]
    found = quantize_int4(jnp.asarray(w), 4)
    np.testing.assert_allclose(found.scales.astype(np.float32), [[1, 2], [0.0714, 0]], rtol=4e-3)
    codes = [[7, -3, 1, 0, 7, -4, 0, 7], [-7, 1, 2, 3, 0, 0, 0, 0]]
    np.testing.assert_array_equal(found.integers().T, codes)
    packed = [[15 | 5 << 4, 9 | 8 << 4, 15 | 4 << 4, 8 | 15 << 4]]
    np.testing.assert_array_equal(found.codes[:, :1].T, packed)
    steps = np.repeat(np.float32(found.scales), 4, axis=0)
    np.testing.assert_allclose(found.dequantize(), np.array(codes).T * steps, rtol=1e-6)
    assert np.abs(np.asarray(found.dequantize()) - w).max() <= 0.51 * steps.max()


def test_int4_with_zero_points_by_hand():
    """In groups of 4 inputs: 16 steps from the least value to the largest, all of one sign too."""
    w = np.zeros((8, 2), np.float32)
    w[:4, 0], w[4:, 0], w[:4, 1] = [5, 20, 6, 9.4], [-1, -1, -1, -1], [-30, 0, -2, -4]
    found = quantize_offset_int4(jnp.asarray(w), 4)
    np.testing.assert_array_equal(found.scales.astype(np.float32), [[1, 2], [0, 0]])
    np.testing.assert_array_equal(found.offsets, [[13, -14], [-1, 0]])
    expected = [[5, 20, 6, 9, -1, -1, -1, -1], [-30, 0, -2, -4, 0, 0, 0, 0]]
    np.testing.assert_array_equal(found.dequantize().T, expected)


@pytest.mark.parametrize("form", STORED)
@pytest.mark.slow
def test_a_form_is_its_arrays_and_is_as_small_as_it_says(form):
    w = matrix()
    found = ENCODE[form](w)
    assert form_of(found).form == form and stored_shape(found) == w.shape
    assert 8 * stored_bytes(found) / w.size <= BITS[form]
    again = rebuild("q", form_of(found), arrays_of("q", found))
    assert jax.tree.structure(again) == jax.tree.structure(found)
    np.testing.assert_array_equal(again.dequantize(), found.dequantize())
    assert found.astype(jnp.bfloat16).dequantize().dtype == jnp.bfloat16
    error = np.linalg.norm(found.dequantize() - w) / np.linalg.norm(w)
    assert error < ERROR[form]
    x = jnp.ones((2, 3, 256))
    np.testing.assert_allclose(found.matmul(x), x @ found.dequantize(), rtol=1e-5, atol=1e-4)
    experts = jax.tree.map(lambda *leaves: jnp.stack(leaves), found, ENCODE[form](2 * w))
    assert stored_shape(experts) == (2, *w.shape)
    np.testing.assert_allclose(experts.dequantize()[0], found.dequantize(), rtol=1e-6)


def test_shapes_that_do_not_fit_are_one_line():
    with pytest.raises(
        UserError, match=r"groups of 128, which a matrix of 192 .*: --group-size 96"
    ):
        quantize_int4(matrix(192, 2))
    with pytest.raises(UserError, match="a matrix of 5 inputs does not allow: int8 takes any"):
        quantize_int4(matrix(5, 2))
    assert quantize_int4(matrix(64, 2)).scales.shape == (1, 2)  # smaller than a group
    with pytest.raises(UserError, match="there is no q/scales"):
        rebuild("q", form_of(quantize_int4(matrix(64, 2))), {"q/codes": np.zeros(1)})
