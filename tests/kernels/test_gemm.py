"""The feed-forward network with the squared ReLU, and the Hopper matmul that computes its parts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels import feed_forward, feed_forward_relu2
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.feed_forward import (
    Placement,
    hopper,
    matmul_relu2_grad,
    reference,
    relu2_matmul,
    xla,
)
from jaxtrain_kernels.matmul.hopper import gemm
from jaxtrain_kernels.matmul.hopper.gemm import GemmTiling

from jaxtrain import parallel
from jaxtrain.parallel import MeshConfig, make_mesh
from jaxtrain.settings import UserError

# The mode that knows that TMA's copies are asynchronous.
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TURNS = GemmTiling(64, 64, stages=3, parts=2, cluster=1, group=2, blocks=2)
SHARED = TURNS._replace(columns=128, shared=True, stages=2)
BF16 = jnp.bfloat16


def arrays(M: int, K: int, N: int, dtype=BF16):
    """x [M, K], w [K, N], dy [M, K], w [N, K], h [M, N]."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape)
    x, dy = normal(M, K), normal(M, K)
    w, w_NK = normal(K, N) / np.sqrt(K), normal(N, K) / np.sqrt(K)
    h = np.square(np.maximum(normal(M, N), 0))
    return [jnp.asarray(a, dtype) for a in (x, w, dy, w_NK, h)]


def assert_equals_reference(M, K, N, tiling, dtype=BF16):
    x, w, dy, w_NK, h = arrays(M, K, N, dtype)
    wide = lambda *given: [a.astype(jnp.float32) for a in given]
    ours = (
        hopper.relu2_matmul(x, w, tiling=tiling, interpret=INTERPRET),
        hopper.matmul_relu2_grad(dy, w_NK, h, tiling=tiling, interpret=INTERPRET),
    )
    expected = (
        reference.relu2_matmul(*wide(x, w)),
        reference.matmul_relu2_grad(*wide(dy, w_NK, h)),
    )
    eps = float(jnp.finfo(dtype).eps)
    for out, right in zip(ours, expected):
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(jnp.float32), right, atol=eps, rtol=eps)


@pytest.mark.parametrize(
    ("M", "K", "N", "dtype", "tiling"),
    [
        (192, 128, 128, BF16, TURNS._replace(rows=128, blocks=1)),
        (200, 128, 192, jnp.float16, SHARED),
        (128, 64, 64, BF16, TURNS._replace(stages=2, cluster=2)),
    ],
    ids=["turns", "shared", "cluster"],
)
@pytest.mark.slow
def test_mosaic_equals_reference_without_races(M, K, N, dtype, tiling, capfd):
    assert_equals_reference(M, K, N, tiling, dtype)
    assert "RACE" not in "".join(capfd.readouterr())


def test_each_tile_is_worked_on_once():
    for down, across, group in ((5, 3, 2), (4, 4, 8), (1, 6, 1)):
        tiling = TURNS._replace(group=group)
        plan = gemm.GemmPlan(64 * down, 64 * across, 64, BF16, False, lambda x: x, False, tiling, 1)
        seen = [gemm.tile_of(plan, np.int32(n)) for n in range(down * across)]
        expected = [(i, j) for i in range(down) for j in range(across)]
        assert sorted((int(i), int(j)) for i, j in seen) == expected


def plain(x, w_up, w_down):
    return jnp.square(jax.nn.relu(x @ w_up)) @ w_down


def network(dtype, x_shape=(2, 5, 8)):
    rng = np.random.default_rng(1)
    shapes = x_shape, (x_shape[-1], 12), (12, x_shape[-1]), x_shape
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.quick("float32-xla")
def test_gradients_are_those_of_autodiff(implementation, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        *operands, dy = network(dtype)
        ours = functools.partial(feed_forward_relu2, implementation=implementation)
        for out, right in zip(*(jax.tree.leaves(results(f, operands, dy)) for f in (ours, plain))):
            assert out.dtype == dtype
            tolerance = 50 * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(out, right, rtol=tolerance, atol=10 * tolerance)


def results(f, operands, dy):
    y, pullback = jax.vjp(f, *operands)
    return y, pullback(dy)


@pytest.mark.slow
def test_bfloat16_gradients_are_hardly_further_off_than_autodiff():
    """From h in bfloat16, made of u in bfloat16, instead of that u."""
    *operands, dy = network(BF16, (64, 32))
    wide = [x.astype(jnp.float32) for x in operands]
    exact = results(plain, wide, dy.astype(jnp.float32))[1]
    errors = {}
    for name, f in (("ours", feed_forward_relu2), ("plain", plain)):
        pairs = zip(results(f, operands, dy)[1], exact)
        off = [jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b) for a, b in pairs]
        errors[name] = np.asarray(off)
    assert (errors["ours"] < 1.2 * errors["plain"]).all(), errors


def test_only_the_input_and_the_activation_are_saved():
    x, w_up, w_down, _ = network(jnp.float32)
    _, pullback = jax.vjp(feed_forward_relu2, x, w_up, w_down)
    saved = sorted(a.shape for a in jax.tree.leaves(pullback) if a.ndim)
    assert saved == sorted([x.shape, (2, 5, 12), w_up.shape, w_down.shape])
    h = jnp.square(jax.nn.relu(x @ w_up))
    assert any(np.array_equal(a, h) for a in jax.tree.leaves(pullback))


def test_the_placement_of_the_hidden_layer_and_of_its_gradient_is_the_callers():
    x, w_up, w_down, dy = network(jnp.float32)
    seen = {"gather": [], "constrain": [], "matmul": []}

    def note(name):
        return lambda a, *b: seen[name].append(a.shape) or (a @ b[0] if b else a)

    placement = Placement(*map(note, seen))
    f = lambda *o: feed_forward_relu2(*o, placement=placement)
    found = results(f, (x, w_up, w_down), dy)
    hidden = [(2, 5, 12)] * 2
    assert seen == {"gather": [x.shape] * 2, "constrain": hidden, "matmul": hidden}
    expected = results(feed_forward_relu2, (x, w_up, w_down), dy)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", [None, "mosaic"])
@pytest.mark.quick("mosaic")
def test_a_mesh_changes_nothing(implementation, monkeypatch):
    """Split over batch rows and hidden units, by XLA or by hand."""
    monkeypatch.setitem(feed_forward.BACKENDS, "mosaic", xla)
    *operands, dy = network(jnp.float32, (4, 5, 8))
    f = functools.partial(parallel.feed_forward_relu2, implementation=implementation)
    expected = results(plain, operands, dy)
    mesh = parallel.make_mesh(parallel.MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        out = jax.jit(lambda operands, dy: results(f, operands, dy))(operands, dy)
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_asking_a_cpu_for_the_kernel_is_one_clear_error():
    x, w_up, w_down, _ = network(jnp.float32)
    with pytest.raises(
        UserError, match=r"model\.kernels\.ffn: .* needs an NVIDIA GPU, this is cpu"
    ):
        parallel.feed_forward_relu2(x, w_up, w_down, "mosaic")


@pytest.mark.parametrize(("D", "dtype"), [(768, BF16), (1536, jnp.float16)])
@pytest.mark.quick("768-bfloat16")
def test_lowers_for_hopper(D, dtype):
    x = jax.ShapeDtypeStruct((4, 512, D), dtype)
    up, down = jax.ShapeDtypeStruct((D, 4 * D), dtype), jax.ShapeDtypeStruct((4 * D, D), dtype)
    loss = lambda *operands: feed_forward_relu2(*operands, implementation="mosaic").sum()
    with on_target("cuda", (9, 0)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, up, down)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2
    assert text.count("stablehlo.dot_general") == 3  # dx, dW_up, dW_down; y itself is not asked for


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "reason"),
    [
        (("cpu", None), (64, 64), BF16, "needs an NVIDIA GPU, this is cpu"),
        (("cuda", (8, 0)), (64, 64), BF16, "needs compute capability 9.0"),
        (("cuda", (9, 0)), (64, 64), jnp.float32, r"needs bfloat16 or float16 .* got \['float32'"),
        (("cuda", (9, 0)), (64, 40), BF16, r"in multiples of 64 above it, got \[64, 40\]"),
        (("cuda", (9, 0)), (64, 64), BF16, r"in multiples of 64 above it, got \[64, 64\]"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason_and_goes_to_xla(
    device, shape, dtype, reason
):
    x, w = jnp.ones(shape, dtype), jnp.ones((shape[1], 64), dtype)
    with on_target(*device):
        with pytest.raises(NotImplementedError, match=reason):
            relu2_matmul(x, w, implementation="mosaic")
        np.testing.assert_array_equal(relu2_matmul(x, w), reference.relu2_matmul(x, w))
        du = matmul_relu2_grad(x, w.T, jnp.ones((shape[0], 64), dtype))
        np.testing.assert_array_equal(du, 2 * shape[1] * jnp.ones_like(du))


@pytest.mark.parametrize(
    ("mesh", "rows", "fused"),
    [
        ({"data": 1, "fsdp": 1}, 8, True),
        ({"data": 8, "fsdp": 1}, 8, True),
        ({"data": 2, "fsdp": 4}, 8, True),
        ({"data": 4, "tensor": 2}, 8, True),
        ({"data": 4, "tensor": 2}, 4, False),  # `tensor` shards the sequence: XLA's
    ],
    ids=str,
)
@pytest.mark.quick("{'data': 8, 'fsdp': 1}-8-True", "{'data': 4, 'tensor': 2}-4-False")
def test_devices_that_split_rows_run_the_fused_feed_forward(mesh, rows, fused):
    x = jax.ShapeDtypeStruct((rows, 128, 256), jnp.bfloat16)
    up, down = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 1024), (1024, 256)))
    devices = jax.devices()[: math.prod(mesh.values())]
    mesh = make_mesh(MeshConfig.model_validate(mesh), devices)
    with on_target("cuda", (9, 0)), jax.set_mesh(mesh):
        traced = str(jax.make_jaxpr(parallel.feed_forward_relu2)(x, up, down))
    assert ("Exported(fun_name=matmul" in traced) == fused  # our kernel, from the export cache
