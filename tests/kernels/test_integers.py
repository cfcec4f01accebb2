"""Matmuls with integer codes: backends against the reference; which serves which call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.integers import BACKENDS, w4a16_matmul, w8a16_matmul

from jaxtrain.weights.contract import dequantize
from jaxtrain.weights.int4 import quantize_int4, quantize_offset_int4
from jaxtrain.weights.quantized import quantize_int8

HOPPER = ("cuda", (9, 0))


def arguments(op, rows, dtype):
    """x [rows, 64], codes and scales of a matrix [64, 24], int4's in groups of 16."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 64)), dtype)
    w = jnp.asarray(rng.standard_normal((64, 24)), jnp.float32)
    small = quantize_int8(w) if op is w8a16_matmul else quantize_int4(w, 16)
    return x, small


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["dot", "reduce"])
def test_a_backend_equals_the_reference(op, dtype, name):
    rows = 1 if name == "reduce" else 5
    x, w = arguments(op, rows, dtype)
    with on_target(*HOPPER):
        out = op(x, w.codes, w.scales, implementation=name)
    assert out.dtype == dtype
    expected = op(x, w.codes, w.scales, implementation="reference").astype(jnp.float32)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=32 * eps, atol=32 * eps)
    whole = x.astype(jnp.float32) @ dequantize(w.astype(dtype)).astype(jnp.float32)
    np.testing.assert_allclose(expected, whole, rtol=eps, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["dot", "reduce"])
def test_offsets_of_groups_equal_the_reference(dtype, name):
    """A change of the offsets that bfloat16 would not hold changes the product."""
    x, w = arguments(w4a16_matmul, 1, dtype)
    w = quantize_offset_int4(jnp.asarray(w.dequantize()) + 3.0, 16)
    run = lambda offsets, backend: w4a16_matmul(
        x, w.codes, w.scales, offsets, implementation=backend
    ).astype(jnp.float32)
    with on_target(*HOPPER):
        out, expected = (run(w.offsets, backend) for backend in (name, "reference"))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out, expected, rtol=32 * eps, atol=32 * eps)
    np.testing.assert_allclose(
        expected, x.astype(jnp.float32) @ w.dequantize(), rtol=0.01, atol=64 * eps
    )
    assert np.abs(out - run(w.offsets - 3.0, "dot")).max() > 1


@pytest.mark.parametrize("name", ["dot", "reduce"])
@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
def test_a_layer_of_a_stack_is_that_of_its_matrix(op, name):
    x, w = arguments(op, 1, jnp.float32)
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf * 0, leaf]), (w.codes, w.scales))
    with on_target(*HOPPER):
        alone = op(x, w.codes, w.scales, implementation=name)
        for layer in (1, jnp.int32(1)):
            np.testing.assert_array_equal(op(x, *stack, layer=layer, implementation=name), alone)


@pytest.mark.parametrize("op", [w8a16_matmul, w4a16_matmul])
def test_one_row_without_triton_is_no_matmul(op):
    def program(name, rows):
        x, w = arguments(op, rows, jnp.bfloat16)
        run = lambda x, w: op(x, w.codes, w.scales, implementation=name)
        with on_target(*HOPPER):
            traced = jax.jit(run).trace(x, w)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "dot_general" not in program("reduce", 1)
    assert "dot_general" in program("dot", 2)


def test_what_cannot_serve_says_why():
    x, w = arguments(w8a16_matmul, 2, jnp.float32)
    with on_target(*HOPPER), pytest.raises(NotImplementedError, match="needs one row, got 2"):
        w8a16_matmul(x, w.codes, w.scales, implementation="reduce")
    with on_target("cpu"), pytest.raises(NotImplementedError, match="needs a GPU, found cpu"):
        w8a16_matmul(x[:1], w.codes, w.scales, implementation="reduce")
    assert list(BACKENDS) == ["triton", "reduce", "dot", "reference"]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_matrix_multiplies_by_the_op_and_has_the_gradient_of_its_array(form):
    op = w8a16_matmul if form == "int8" else w4a16_matmul
    x, w = arguments(op, 3, jnp.float32)
    out, pull = jax.vjp(w.matmul, x[None])
    np.testing.assert_allclose(out[0], op(x, w.codes, w.scales), rtol=1e-6)
    np.testing.assert_allclose(pull(out)[0][0], out[0] @ dequantize(w).T, rtol=1e-5, atol=1e-5)
