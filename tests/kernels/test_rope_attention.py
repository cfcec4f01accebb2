"""Rotation, norm and attention as one op: backends against the reference, interpreted, lowered."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels.attention import Call
from jaxtrain_kernels.attention.hopper.backward_plan import BackwardTiling
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.rope_attention import hopper, reference, rope_attention, xla
from test_rows import EPS, angles
from tiny import batch, build

from jaxtrain import parallel
from jaxtrain.model import resolve_model
from jaxtrain.model.attention import Attention
from jaxtrain.model.config import ModelConfig
from jaxtrain.model.fused_ops import fastest
from jaxtrain.objectives.next_token import next_token_loss
from jaxtrain.settings import UserError

# The mode that knows bar.sync and bar.arrive, named barriers of the hardware.
INTERPRET = plgpu.InterpretGPUParams(
    inline_mgpu="_hack_model_inline_mgpu_tokamax", detect_races=True
)
BF16 = jnp.bfloat16
HOPPER = ("cuda", (9, 0))


def arrays(B: int, T: int, N: int, K: int, H: int, value: bool, dtype: Any, b: int = 1):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    cos, sin = angles(b, T, H)
    added = normal(B, T, K, H) if value else None
    return normal(B, T, N + 2 * K, H), cos, sin, added, normal(B, T, N, H)


def results(module: Any, given: tuple, heads: int, call: Call, **options: Any):
    """The output and the gradients of the array and of what is added to the values."""
    x, cos, sin, value, dy = given
    run = lambda x, value: module.rope_attention(x, cos, sin, value, heads, EPS, call, **options)
    both = jax.jit(lambda x, value, dy: (lambda y, pull: (y, pull(dy)))(*jax.vjp(run, x, value)))
    out = both(x, value, dy.astype(x.dtype))
    return jax.tree.map(lambda x: np.asarray(x, np.float32), out)


CASES = {
    "joint": ((1, 128, 1, 1, 64), False, Call(window=None, scale=0.1)),
    "gqa_window_value": ((1, 128, 2, 1, 64), True, Call(window=40, scale=0.1)),
    "wide_value": ((1, 128, 1, 1, 128), True, Call(softcap=3.0, scale=0.1)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick("gqa_window_value")
def test_xla_equals_reference(name):
    shape, value, call = CASES[name]
    given = arrays(*shape, value, jnp.float32)
    pairs = zip(*(jax.tree.leaves(results(m, given, shape[2], call)) for m in (xla, reference)))
    for x, y in pairs:
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_mosaic_equals_reference_without_races(name, capfd):
    shape, value, call = CASES[name]
    given = arrays(*shape, value, BF16, b=shape[0])
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    tiling = BackwardTiling(block_q=128 if shape[-1] == 64 else 64, blocks=2)
    options = {"interpret": INTERPRET, "tilings": (None, tiling)}
    got = results(hopper, given, shape[2], call, **options)
    expected = results(reference, wide, shape[2], call)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(x - y).max() < 0.012 * np.abs(y).max() + 0.005
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_packed_documents_equal_the_reference():
    ids = jnp.asarray([[1] * 50 + [2] * 70 + [0] * 8])
    call = Call(segment_ids_BT=ids, scale=0.1)
    given = arrays(1, 128, 1, 1, 64, True, BF16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    options = {"interpret": INTERPRET, "tilings": (None, BackwardTiling(block_q=128, blocks=2))}
    pairs = zip(
        jax.tree.leaves(results(hopper, given, 1, call, **options)),
        jax.tree.leaves(results(reference, wide, 1, call)),
    )
    for x, y in pairs:
        assert np.abs(x - y).max() < 0.012 * np.abs(y).max() + 0.005


@pytest.mark.slow
def test_members_are_those_of_one_at_a_time():
    given = arrays(1, 128, 1, 1, 64, True, BF16)
    more = jax.tree.map(lambda x: jnp.stack([x, x[:, ::-1]]), given)
    options = {"interpret": INTERPRET, "tilings": (None, BackwardTiling(block_q=128, blocks=2))}
    call = lambda x, cos, sin, value: hopper.rope_attention(
        x, cos, sin, value, 1, EPS, Call(scale=0.1), **options
    )

    def run(x, cos, sin, value, dy):
        y, pull = jax.vjp(lambda x, value: call(x, cos, sin, value), x, value)
        return y, pull(dy)

    alone = [jax.jit(run)(*(x[i] for x in more)) for i in range(2)]
    alone = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(jax.vmap(run))(*more), alone)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize(("value", "window"), [(False, None), (True, 256)])
def test_mosaic_equals_the_reference_on_a_gpu(H, value, window):
    given = arrays(2, 1024, 6, 3, H, value, BF16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    call = Call(window=window, scale=1.2 / H**0.5)
    with jax.default_matmul_precision("highest"):
        expected = jax.tree.leaves(results(reference, wide, 6, call))
    ours, naive = (jax.tree.leaves(results(m, given, 6, call)) for m in (hopper, reference))
    off = lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y)
    for x, near, y in zip(ours, naive, expected, strict=True):
        assert off(x, y) < 2 * off(near, y) + 1e-4


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.slow
def test_lowers_for_hopper_in_place(value):
    spec = lambda *shape, dtype=BF16: jax.ShapeDtypeStruct(shape, dtype)
    given = [spec(2, 2048, 18, 128), *[spec(1, 2048, 128, dtype=jnp.float32)] * 2]
    given += [spec(2, 2048, 6, 128)] if value else []
    f = functools.partial(
        rope_attention, heads=6, eps=EPS, scale=0.1, window=768, implementation="mosaic"
    )
    gradients = jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), (0, 3)[: 1 + value])
    with on_target(*HOPPER):
        text = jax.jit(gradients).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    assert len(calls) == 5  # turn, attention, sums of rows, attention's backward, turn back
    written = [line for line in calls if "x18x128xbf16>" in line.rpartition("->")[2]]
    assert len(written) == 3  # turn, attention's backward, turn back: all in place
    assert all("output_operand_alias" in line for line in written)


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.slow
def test_a_mapped_axis_becomes_rows(b):
    """Members of a population: a batch of kernels would share the counter of tiles."""
    spec = lambda *shape, dtype=BF16: jax.ShapeDtypeStruct(shape, dtype)
    f = functools.partial(rope_attention, heads=2, eps=EPS, scale=0.1, implementation="mosaic")
    gradients = jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), (0, 3))
    mapped = jax.jit(jax.vmap(gradients, in_axes=(0, None, None, 0)))
    angle = spec(b, 256, 64, dtype=jnp.float32)
    with on_target(*HOPPER):
        traced = mapped.trace(spec(3, 2, 256, 6, 64), angle, angle, spec(3, 2, 256, 2, 64))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert [x.shape for x in traced.out_info] == [(3, 2, 256, 6, 64), (3, 2, 256, 2, 64)]
    assert "tensor<6x256x6x64xbf16>" in text and text.count("@mosaic_gpu") == 5


@pytest.mark.parametrize(
    ("shape", "scale", "reason"),
    [
        ((1, 128, 3, 96), 0.1, "needs a head dim of 64 or 128, got 96"),
        ((1, 100, 3, 64), 0.1, "a length in multiples of 128, got 100"),
        ((1, 128, 3, 64), -0.1, "a scale above 0, got -0.1"),
    ],
)
def test_what_mosaic_cannot_serve_is_refused_with_the_reason(shape, scale, reason):
    x, (cos, sin) = jnp.ones(shape, BF16), angles(1, shape[1], shape[-1])
    with on_target(*HOPPER), pytest.raises(NotImplementedError, match=reason):
        rope_attention(x, cos, sin, heads=1, eps=EPS, scale=scale, implementation="mosaic")


# ---- in the model ----------------------------------------------------------------------------


def loss_and_gradient(rows: Any, **changes: Any):
    _, graphdef, _, params = build(depth=2, window_pattern="SL", kv_heads=2, **changes)
    run = jax.jit(jax.value_and_grad(next_token_loss, 1), static_argnums=0)
    return run(graphdef, params, rows)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"scan_layers": True, "remat": "block"}], ids=["", "scan"])
def test_one_array_changes_neither_the_loss_nor_its_gradient(more, monkeypatch):
    plain = loss_and_gradient(batch(4))
    monkeypatch.delattr(Attention, "norm_and_rope")  # what turns separate arrays
    other = loss_and_gradient(batch(4), kernels={"qkv": "reference"}, **more)
    for x, y in zip(jax.tree.leaves(other), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * max(1.0, float(jnp.abs(y).max())))


@pytest.mark.parametrize(
    ("changes", "mesh", "chosen"),
    [
        ({}, {}, "mosaic"),
        ({}, {"data": 2}, "mosaic"),
        ({}, {"data": 1, "tensor": 2}, "mosaic"),
        ({}, {"data": 2, "expert": 2}, "mosaic"),
        ({}, {"data": 1, "fsdp": 2}, "xla"),  # its matrices are gathered layer by layer
        ({}, {"data": 1, "tensor": 4}, "xla"),  # two heads
        ({}, {"data": 4, "tensor": 2}, "xla"),  # four rows
        ({"fp8": "blocks"}, {}, "xla"),
        ({"remat_short": "block"}, {}, "xla"),
        ({"attention": "cudnn"}, {}, "xla"),
        ({"qk_norm_gain": True}, {}, "xla"),
        ({"head_dim": 96, "width": 192}, {}, "xla"),
        ({"kernels": "xla"}, {}, "xla"),
        ({"kernels": {"qkv": "reference"}, "fp8": "blocks"}, {}, "reference"),
    ],
    ids=str,
)
def test_one_array_is_the_default_where_it_is_faster(changes, mesh, chosen):
    fields = {"depth": 2, "width": 128, "head_dim": 64, "window_pattern": "SL"} | changes
    c = resolve_model(ModelConfig.model_validate(fields), 128)
    x_BTD = jax.ShapeDtypeStruct((4, 128, c.width), BF16)
    count = math.prod(mesh.values())
    devices = parallel.MeshConfig.model_validate(mesh or {"data": 1})
    made = parallel.make_mesh(devices, jax.devices()[:count])
    with jax.set_mesh(made), on_target(*HOPPER):
        assert fastest(c.kernels, c, x_BTD).qkv == chosen
        dropped = jax.ShapeDtypeStruct((4, 100, c.width), BF16)  # of tokens, some
        assert fastest(c.kernels, c, dropped).qkv == ("xla" if chosen == "mosaic" else chosen)
    assert fastest(c.kernels, c, x_BTD).qkv == ("xla" if chosen == "mosaic" else chosen)  # a CPU


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 1, "expert": 2}], ids=str)
def test_each_device_has_its_own_rows(mesh):
    given = arrays(4, 16, 2, 1, 8, True, jnp.float32)
    x, cos, sin, value, _ = given
    run = lambda x, value: parallel.rope_attention(
        x, cos, sin, value, None, heads=2, eps=EPS, scale=0.3, implementation="reference"
    )
    expected = run(x, value)
    made = parallel.make_mesh(parallel.MeshConfig.model_validate(mesh), jax.devices()[:2])
    with jax.set_mesh(made):
        np.testing.assert_allclose(jax.jit(run)(x, value), expected, atol=1e-6)


def test_asking_a_cpu_for_the_kernel_is_one_clear_error():
    x, cos, sin, _, _ = arrays(1, 128, 1, 1, 64, False, BF16)
    with pytest.raises(UserError, match=r"model\.kernels\.qkv: .* needs an NVIDIA GPU"):
        parallel.rope_attention(
            x, cos, sin, None, None, heads=1, eps=EPS, scale=0.1, implementation="mosaic"
        )


@pytest.mark.parametrize(
    "more", [{"qk_norm_gain": True}, {"qkv_bias": True}, {"deterministic_attention": True}], ids=str
)
def test_a_model_that_it_does_not_fit_is_refused(more):
    with pytest.raises(ValueError, match=r"kernels\.qkv"):
        ModelConfig.model_validate({"kernels": {"qkv": "mosaic"}, **more})
