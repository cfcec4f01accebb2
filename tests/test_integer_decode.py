"""Decoding with integer layers: the kernel reads a layer's codes in their stack, without a copy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.integers.triton import kernels
from tiny import build

from benchmarks.decode_rate import next_token
from jaxtrain.compress.quantize import quantize_params
from jaxtrain.model import Prefill, cast
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.quantized import IntegerWeight, quantize_int8

# Pallas, which attends to the cache, asks for the device when it lowers.
H100 = AbstractMesh(
    (),
    (),
    abstract_device=AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu"),
)


def opaque(plan, operands):
    """In the kernel's place, so that no GPU is needed to see what it is given."""
    x_MK, codes, scales, *_ = operands
    out = jax.ShapeDtypeStruct((len(x_MK), scales.shape[-1]), x_MK.dtype)
    return [jax.ffi.ffi_call("kernel", out)(x_MK, codes, scales)]


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.quick("int4")
def test_a_decode_step_copies_no_codes_of_a_layer(monkeypatch, method):
    monkeypatch.setattr(kernels, "call", opaque)
    c, graphdef, specs, params = build()
    small = cast(quantize_params(params, specs, method), specs, jnp.dtype(jnp.bfloat16))
    stacks = [x for x in flatten(small).values() if isinstance(x, IntegerWeight)]
    token_B = jnp.zeros(1, jnp.int32)
    prompt = jnp.zeros((1, 8), jnp.int32), Prefill(jnp.ones(1, jnp.int32), 128, None)
    whole = lambda p: nnx.merge(graphdef, p)(prompt[0], mode=prompt[1]).cache
    cache = jax.eval_shape(whole, small)
    with on_target("cuda", (9, 0)):
        step = lambda p, cache: next_token(graphdef, p, token_B, cache)
        with jax.sharding.use_abstract_mesh(H100):
            traced = jax.jit(step).trace(small, cache)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@kernel(") == sum(len(x.codes) for x in stacks) > c.depth
    kind = "i8" if method == "int8" else "ui8"
    for x in stacks:
        of_layer = "x".join(map(str, x.codes.shape[1:]))
        assert not re.search(rf"tensor<(1x)?{of_layer}x{kind}>", text), of_layer


@pytest.mark.slow
@pytest.mark.parametrize("encode", [quantize_int8, quantize_int4])
@pytest.mark.quick("quantize_int4")
def test_a_matrix_in_its_stack_is_the_one_alone(encode):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32, 16)), jnp.float32)
    each = [encode(matrix) for matrix in w]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    layers = stack.layers(3)
    x = jnp.ones((2, 32))
    for own, layer in zip(each, layers, strict=True):
        assert layer.codes is stack.codes and not layer.is_experts()
        assert jax.tree.structure(layer.alone()) == jax.tree.structure(own)
        np.testing.assert_array_equal(layer.alone().codes, own.codes)
        np.testing.assert_array_equal(layer.dequantize(), own.dequantize())
        np.testing.assert_allclose(layer.product(x), own.product(x), rtol=1e-6)
        (dx,), (mine,) = (jax.vjp(m.matmul, x)[1](jnp.ones((2, 16))) for m in (own, layer))
        np.testing.assert_array_equal(dx, mine)
    assert stack.is_experts()  # no layer is chosen: a matrix each
