"""Float8 copies of stacked weights, layer by layer: equal to the casts of each layer by XLA."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import fp8_quantize
from jaxtrain_kernels.dispatch import Target, on_target, target
from jaxtrain_kernels.matmul.fp8 import layers
from tiny import make_spec, random_params, resolved

from jaxtrain.weights import float8

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
HOPPER = Target("cuda", (9, 0))


def stack(L, K, N, dtype=jnp.float32):
    """A stack whose layers have different largest values."""
    normal = np.random.default_rng([L, K, N]).standard_normal((L, K, N))
    return jnp.asarray((1 + np.arange(L))[:, None, None] * normal, dtype)


def floats(tree):
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


def assert_copies(found, w_LKN):
    """Bit for bit those of XLA's cast of each layer."""
    for copy, w_KN in zip(found, w_LKN, strict=True):
        wanted = fp8_quantize(w_KN, implementation="xla")
        for one, other in zip(floats(copy), floats(wanted), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_each_layer_is_cast_as_by_itself(dtype):
    w_LKN = stack(3, 128, 192, dtype)
    assert_copies(layers.quantize_layers(w_LKN, interpret=True), w_LKN)


@pytest.mark.gpu
def test_layers_on_a_gpu():
    w_LKN = stack(2, 1536, 6144)
    if reason := layers.supports(target(), w_LKN):
        pytest.skip(reason)
    assert_copies(jax.jit(layers.quantize_layers)(w_LKN), w_LKN)


def test_lowers_for_cuda_in_one_kernel_a_layer():
    """It reads its layer out of the stack."""
    spec = jax.ShapeDtypeStruct((4, 1536, 6144), jnp.float32)
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(layers.quantize_layers).trace(spec)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("call @cast_layer") == 4 and text.count("@__gpu$xla.gpu.triton") == 1
    assert "stablehlo.transpose" not in text and "tensor<1536x6144xf32>" not in text


@pytest.mark.parametrize(
    ("device", "shape", "reason"),
    [
        (HOPPER, (2, 1536, 6144), None),
        (HOPPER, (2, 1536, 96), "columns in multiples of 64, got (1536, 96)"),
        (Target("cuda", (8, 9)), (2, 64, 64), "compute capability 9.0"),
        (Target("cpu"), (2, 64, 64), "needs an NVIDIA GPU, this is cpu"),
    ],
)
def test_reasons(device, shape, reason):
    found = layers.supports(device, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert found is None if reason is None else reason in (found or "")


# ---- in the model --------------------------------------------------------------------------------


def test_unrolled_layers_have_the_same_copies(monkeypatch):
    fields = {"depth": 2, "width": 128, "head_dim": 64, "hidden": 256}
    task, _ = make_spec(resolved(**fields, fp8="blocks"))
    params = random_params(task.specs)
    plain, calls = float8.fp8_weights(params, task.specs), []

    def quantize_layers(w_LKN):
        calls.append(w_LKN.shape)
        return layers.quantize_layers(w_LKN, interpret=True)

    backend = SimpleNamespace(supports=lambda *_: None, quantize_layers=quantize_layers)
    monkeypatch.setattr(float8, "layers", backend)
    found = float8.fp8_weights(params, task.specs, unrolled=True)
    for one, other in zip(floats(found), floats(plain), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(calls) == 6
    float8.fp8_weights(params, task.specs)
    assert len(calls) == 6
