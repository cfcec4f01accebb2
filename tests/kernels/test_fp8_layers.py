"""Float8 copies of stacked weights, layer by layer: equal to the casts of each layer by XLA."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtrain_kernels import fp8_quantize
from jaxtrain_kernels.dispatch import Target, on_target, target
from jaxtrain_kernels.matmul.fp8 import layers
from tiny import make_spec, random_params, resolved

from jaxtrain.weights import float8

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
HOPPER = Target("cuda", (9, 0))
# The mode that knows bar.sync, a named barrier of the hardware.
INTERPRET = plgpu.InterpretGPUParams(
    inline_mgpu="_hack_model_inline_mgpu_tokamax", detect_races=True
)


def stacks(L, K, *columns, dtype=jnp.float32):
    """Stacks whose layers' and whose matrices' largest values differ."""
    rng = np.random.default_rng([L, K, *columns])
    sizes = (1 + np.arange(L))[:, None, None]
    return [
        jnp.asarray((n + 1) * sizes * rng.standard_normal((L, K, N)), dtype)
        for n, N in enumerate(columns)
    ]


def floats(tree):
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


def assert_copies(found, given):
    """Bit for bit those of XLA's cast of each layer's concatenation."""
    for copy, w_KN in zip(found, jnp.concatenate(given, axis=2), strict=True):
        wanted = jax.jit(functools.partial(fp8_quantize, implementation="xla"))(w_KN)
        for one, other in zip(floats(copy), floats(wanted), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [((256,), jnp.float32), ((128, 256, 128), jnp.float32), ((384,), jnp.bfloat16)],
    ids=["one", "joined", "bf16"],
)
def test_each_layer_is_cast_as_by_itself_without_races(columns, dtype, capfd, monkeypatch):
    monkeypatch.setattr(layers, "BLOCKS", 1)
    given = stacks(2, 128, *columns, dtype=dtype)
    assert_copies(layers.quantize_layers(*given, interpret=INTERPRET), given)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("K", "columns", "width"),
    [
        (1536, [6144], 256),  # 576 blocks; 384 columns would give 384
        (1536, [1536], 128),
        (4096, [4096, 1024, 1024], 512),
        (6144, [1920], 384),
        (64, [640], 128),
    ],
)
def test_tiles_are_wide_where_they_are_many(K, columns, width):
    assert layers.tile_width(K, columns) == width


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [(384,), (128, 256, 128), (1536,)], ids=str)
def test_layers_on_a_gpu(columns):
    given = stacks(2, 256, *columns)
    if reason := layers.supports(target(), *given):
        pytest.skip(reason)
    assert_copies(jax.jit(layers.quantize_layers)(*given), given)


@pytest.mark.parametrize("columns", [(6144,), (1536, 1536, 1536)], ids=str)
def test_lowers_for_cuda_in_one_kernel_a_layer(columns):
    """It reads its layer out of the stack, and of several stacks without a concatenation."""
    given = [jax.ShapeDtypeStruct((4, 1536, N), jnp.float32) for N in columns]
    with on_target("cuda", (9, 0)), jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(layers.quantize_layers).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("call @cast_layer") == 4 and text.count("custom_call @mosaic_gpu") == 1
    assert not any(f"tensor<1536x{N}xf32>" in text for N in (*columns, sum(columns)))
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize(
    ("device", "shape", "reason"),
    [
        (HOPPER, (2, 1536, 6144), None),
        (HOPPER, (2, 1536, 96), "columns of 128, got (1536, 96)"),
        (Target("cuda", (8, 9)), (2, 64, 64), "compute capability 9.0"),
        (Target("cpu"), (2, 64, 64), "needs an NVIDIA GPU, this is cpu"),
    ],
)
def test_reasons(device, shape, reason):
    found = layers.supports(device, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert found is None if reason is None else reason in (found or "")


# ---- in the model --------------------------------------------------------------------------------


def interpreted(monkeypatch):
    """The kernels of layers, on a CPU; returns the shapes of the stacks of each call."""
    calls = []

    def quantize_layers(*stacks):
        calls.append([w_LKN.shape for w_LKN in stacks])
        return jax.block_until_ready(layers.quantize_layers(*stacks, interpret=INTERPRET))

    backend = SimpleNamespace(supports=lambda *_: None, quantize_layers=quantize_layers)
    monkeypatch.setattr(float8, "layers", backend)
    return calls


def model():
    """(parameters in float32, their specs)."""
    fields = {"depth": 2, "width": 128, "head_dim": 64, "hidden": 256}
    task, _ = make_spec(resolved(**fields, fp8="blocks"))
    params = random_params(task.specs)
    return jax.tree.map(lambda p: p.astype(jnp.float32), params), task.specs


def test_unrolled_layers_have_the_same_copies(monkeypatch):
    params, specs = model()
    plain, calls = float8.fp8_weights(params, specs), interpreted(monkeypatch)
    found = float8.fp8_weights(params, specs, unrolled=True)
    for one, other in zip(floats(found), floats(plain), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(calls) == 6
    float8.fp8_weights(params, specs, joined=True)
    assert len(calls) == 6


def test_projections_that_are_one_matmul_have_one_copy(monkeypatch):
    """The matmul's values are those of the matrices cast when they are concatenated."""
    params, specs = model()
    calls = interpreted(monkeypatch)
    copies = float8.fp8_weights(params, specs, unrolled=True, joined=True)
    assert [len(shapes) for shapes in calls] == [1, 3, 1, 1]  # out; q, k and v; down, up
    attention = float8.with_fp8(params, copies, specs)["blocks"]["attention"]
    q, k, v = (jax.tree.map(lambda x: x[1], attention[name]) for name in float8.JOINED)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64, 128)), jnp.float32)
    alone = [float8.Fp8Weight(w.w_KN, None) for w in (q, k, v)]
    found, wanted = q.matmul_joined(x, [k, v]), alone[0].matmul_joined(x, alone[1:])
    assert found is not None and wanted is not None
    np.testing.assert_array_equal(found.y, wanted.y)
    assert q.joined is not None and q.fp8 is k.joined is None
    # The matmul reads the copy: with twice its scale it has twice the values.
    twice = dataclasses.replace(q, joined=q.joined._replace(scale=2 * q.joined.scale))
    doubled = twice.matmul_joined(x, [k, v])
    assert doubled is not None
    np.testing.assert_array_equal(doubled.y, 2 * found.y)
    # Another matmul of one of them casts it.
    np.testing.assert_array_equal(k.matmul(x), alone[1].matmul(x))
