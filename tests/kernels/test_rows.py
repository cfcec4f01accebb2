"""Row passes: backends against the reference, the Hopper kernels interpreted and lowered."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels import rows
from jaxtrain_kernels.cross_entropy import fp8, linear_cross_entropy
from jaxtrain_kernels.cross_entropy.hopper.rows import loss_rows
from jaxtrain_kernels.cross_entropy.hopper.transpose import fp8_transpose
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.rows import hopper, reference, xla
from jaxtrain_kernels.rows.hopper.norm import sum_rows
from tiny import batch, build

from jaxtrain.model import ModelConfig, resolve_model
from jaxtrain.model.fused_ops import fastest
from jaxtrain.model.sections import FusedOps
from jaxtrain.objectives.next_token import next_token_loss

# The mode that knows bar.sync, a named barrier of the hardware.
INTERPRET = plgpu.InterpretGPUParams(
    inline_mgpu="_hack_model_inline_mgpu_tokamax", detect_races=True
)
EPS = 1e-6
BF16, E5M2 = jnp.bfloat16, jnp.float8_e5m2
HOPPER = ("cuda", (9, 0))


def angles(b: int, T: int, H: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and signed sines as the model gives them; each row at its own positions."""
    position = np.arange(T)[None, :, None] + 7 * np.arange(b)[:, None, None]
    angle = position * 100.0 ** -(np.arange(H // 2) / (H // 2))
    cos, sin = np.cos(angle), np.sin(angle)
    return (
        jnp.asarray(np.concatenate([cos, cos], -1), jnp.float32),
        jnp.asarray(np.concatenate([-sin, sin], -1), jnp.float32),
    )


def case(name: str, dtype: Any):
    """(op, function of a backend's module, differentiable arguments)."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    a, b = jnp.float32(1.1), jnp.float32(0.3)
    if name == "residual":
        return lambda m, **k: functools.partial(m.residual_norm, eps=EPS, **k), (
            normal(2, 6, 384), normal(2, 6, 384),
        )  # fmt: skip
    if name == "mixed":
        return lambda m, **k: functools.partial(m.mixed_norm, eps=EPS, **k), (
            normal(1, 8, 512), normal(1, 8, 512), normal(1, 8, 512), a, b,
        )  # fmt: skip
    if name == "mixed_alone":
        without = lambda m, **k: lambda x, *rest: m.mixed_norm(x, None, *rest, eps=EPS, **k)
        return without, (normal(1, 8, 256), normal(1, 8, 256), a, b)
    if name.startswith("rope"):
        b, T, H = (2, 32, 64) if name == "rope_packed" else (1, 16, 128)
        cos, sin = angles(b, T, H)
        turned = lambda m, **k: lambda q, k_: m.rope_norm(q, k_, cos, sin, eps=EPS, **k)
        return turned, (normal(2, T, 2, H), normal(2, T, 1, H))
    return lambda m, **k: functools.partial(m.relu2, **k), (normal(1, 16, 512),)


CASES = ("residual", "mixed", "mixed_alone", "rope", "rope_packed", "relu2")


def results(make: Any, module: Any, arguments: tuple, cotangents: Any = None, **options: Any):
    """The outputs and all gradients, in float32, of cotangents that tell positions apart."""

    def both(*arguments):
        out, pull = jax.vjp(make(module, **options), *arguments)
        weight = lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).astype(BF16)
        return out, pull(jax.tree.map(lambda x: weight(x).reshape(x.shape).astype(x.dtype), out))

    return jax.tree.map(lambda x: np.asarray(x, np.float32), jax.jit(both)(*arguments))


def assert_close(got: Any, expected: Any, eps: float, factor: float = 4.0):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=factor * eps * max(1.0, np.abs(y).max()))


@pytest.mark.parametrize("name", CASES)
def test_xla_equals_reference(name):
    make, arguments = case(name, jnp.float32)
    assert_close(results(make, xla, arguments), results(make, reference, arguments), 2e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick("relu2")
def test_mosaic_equals_reference_without_races(name, capfd):
    make, arguments = case(name, BF16)
    wide = [x.astype(jnp.float32) for x in arguments]
    expected = results(make, reference, wide)
    got = results(make, hopper, arguments, interpret=INTERPRET)
    # The scales' gradients are sums over all elements, each off by a rounding.
    factor = 2.0 if name.startswith("mixed") else 1.0
    assert_close(got, expected, float(jnp.finfo(BF16).eps), factor)
    assert "RACE" not in "".join(capfd.readouterr())


def test_the_gradient_of_x0_is_summed_through_the_layers():
    rng = np.random.default_rng(1)
    x, x0 = (jnp.asarray(rng.standard_normal((1, 2, 128)), jnp.float32) for _ in range(2))

    def layers(chained, x, x0):
        first = x0
        for scale in (0.5, 0.25):
            x, h, x0 = xla.mixed_norm(x, None, x0, jnp.float32(1.1), jnp.float32(scale), eps=EPS)
            x0 = x0 if chained else first
            x = x + h
        return jnp.sum(x * jnp.cos(x))

    chained, apart = (jax.grad(functools.partial(layers, c), 1)(x, x0) for c in (True, False))
    np.testing.assert_allclose(chained, apart, atol=1e-6)


def test_mosaic_keeps_one_activation_for_the_squared_relu():
    x = jnp.ones((1, 8, 512), BF16)
    saved = jax.eval_shape(lambda x: jax.vjp(functools.partial(hopper.relu2), x)[1], x)
    assert [leaf.shape for leaf in jax.tree.leaves(saved)] == [x.shape]


@pytest.mark.parametrize(("R", "most"), [(12, 12), (32768, 16384), (49152, 16384), (32771, 32771)])
def test_rows_are_summed_in_parts_that_take_one_kernel(R, most):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, R)), jnp.float32)
    np.testing.assert_allclose(sum_rows(x), np.asarray(x, np.float64).sum(1), rtol=1e-3)
    shape = jax.ShapeDtypeStruct((2, R), jnp.float32)
    sums: list[Any] = [
        e.invars[0].aval
        for e in jax.make_jaxpr(sum_rows)(shape).eqns
        if e.primitive.name == "reduce_sum"
    ]
    assert [x.shape[-1] for x in sums] == [most]


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("residual_norm", [(2, 64, 768)] * 2),
        ("mixed_norm", [(2, 64, 1536)] * 3 + [(), ()]),
        ("rope_norm", [(2, 64, 6, 128), (2, 64, 6, 128), (1, 64, 128), (1, 64, 128)]),
        ("rope_norm", [(2, 64, 4, 256), (2, 64, 1, 256), (2, 64, 256), (2, 64, 256)]),
        ("relu2", [(2, 64, 3072)]),
    ],
)
@pytest.mark.quick(
    "residual_norm-shapes0", "mixed_norm-shapes1", "rope_norm-shapes3", "relu2-shapes4"
)
def test_lowers_for_hopper_forward_and_backward(op, shapes):
    wide = lambda n: op == "rope_norm" and n > 1
    arguments = [
        jax.ShapeDtypeStruct(s, jnp.float32 if wide(n) or s == () else BF16)
        for n, s in enumerate(shapes)
    ]
    options = {} if op == "relu2" else {"eps": EPS}
    f = functools.partial(getattr(rows, op), implementation="mosaic", **options)

    def both(*arguments):
        out, pull = jax.vjp(f, *arguments)
        return pull(jax.tree.map(jnp.ones_like, out))

    with on_target(*HOPPER):
        text = jax.jit(both).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == (1 if op == "rope_norm" else 2)


@pytest.mark.parametrize(
    ("device", "op", "shape", "dtype", "reason"),
    [
        (("cpu", None), "relu2", (1, 8, 512), BF16, "needs an NVIDIA GPU, this is cpu"),
        (("cuda", (8, 0)), "relu2", (1, 8, 512), BF16, "needs compute capability 9.0"),
        (HOPPER, "relu2", (1, 8, 512), jnp.float32, "needs bfloat16 or float16"),
        (HOPPER, "relu2", (1, 8, 512), jnp.float16, "needs bfloat16, got float16"),
        (HOPPER, "relu2", (1, 7, 512), BF16, "a multiple of 4096 elements, got 3584"),
        (HOPPER, "residual_norm", (1, 8, 200), BF16, "in multiples of 128 up to 2048, got 200"),
        (HOPPER, "residual_norm", (1, 7, 256), BF16, "tokens in multiples of 4, got 7"),
        (HOPPER, "rope_norm", (1, 16, 1, 96), BF16, "a head dim of 32, 64, 128 or 256, got 96"),
        (HOPPER, "rope_norm", (1, 24, 1, 128), BF16, "a length in multiples of 16, got 24"),
    ],
)
def test_what_mosaic_cannot_serve_is_refused_with_the_reason(device, op, shape, dtype, reason):
    arrays = [jnp.ones(shape, dtype)] * (1 if op == "relu2" else 2)
    if op == "rope_norm":
        arrays += angles(1, *shape[1::2])
    options = {} if op == "relu2" else {"eps": EPS}
    with on_target(*device), pytest.raises(NotImplementedError, match=reason):
        getattr(rows, op)(*arrays, implementation="mosaic", **options)


def test_the_default_is_xla():
    x = jnp.asarray([[[-2.0, 3.0]]], BF16)
    with on_target(*HOPPER):
        np.testing.assert_array_equal(rows.relu2(x).astype(jnp.float32), [[[0, 9]]])


# ---- the loss --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("C", "V", "softcap", "z_loss", "valid", "blocks"),
    [
        (5, 4096, 15.0, 0.0, None, 2),
        (3, 8192, None, 0.1, 8001, 1),
        (2, 4096, 50.0, 0.1, 3000, 1),
    ],
    ids=["softcap", "padded_vocab", "all"],
)
@pytest.mark.slow
def test_loss_rows_equal_the_reference_without_races(C, V, softcap, z_loss, valid, blocks, capfd):
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.standard_normal((C, V)) * 4, BF16)
    labels = jnp.asarray(rng.integers(0, valid or V, C), jnp.int32).at[0].set(-1)
    weights = jnp.asarray(rng.random(C), jnp.float32).at[0].set(0)
    options = {"softcap": softcap, "z_loss": z_loss, "valid_vocab": valid}

    def loss(logits):
        capped = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        capped = capped[:, :valid]
        lse = jax.nn.logsumexp(capped, -1)
        nll = lse - capped[jnp.arange(C), jnp.maximum(labels, 0)]
        return jnp.sum(weights * (nll + z_loss * lse**2))

    expected, gradient = jax.value_and_grad(loss)(logits.astype(jnp.float32))
    run = functools.partial(loss_rows, blocks=blocks, interpret=INTERPRET, **options)
    nll, lse, got = jax.jit(run)(logits, labels, weights)
    assert got.dtype == BF16
    np.testing.assert_allclose(jnp.sum(weights * (nll + z_loss * lse**2)), expected, rtol=1e-5)
    np.testing.assert_allclose(got.astype(jnp.float32), gradient, rtol=2**-7, atol=1e-9)
    assert not np.asarray(got[0], np.float32).any()
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("C", "V", "softcap", "z_loss", "valid", "blocks"),
    [(9, 4096, 15.0, 0.0, None, 2), (3, 8192, None, 0.1, 8001, 1)],
    ids=["softcap", "padded_vocab"],
)
@pytest.mark.quick("softcap")
def test_loss_rows_write_the_gradient_in_float8(C, V, softcap, z_loss, valid, blocks, capfd):
    """In memory of its own: that of the bfloat16 kernel before its rounding."""
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.standard_normal((C, V)) * 4, BF16)
    labels = jnp.asarray(rng.integers(0, valid or V, C), jnp.int32).at[0].set(-1)
    # The last row's is past float8's largest number.
    scale = 2.0**14 * jnp.ones(C).at[-1].set(2.0**4)
    weights = scale * jnp.asarray(rng.random(C), jnp.float32).at[0].set(0)
    options = {"softcap": softcap, "z_loss": z_loss, "valid_vocab": valid}
    run = functools.partial(loss_rows, blocks=blocks, interpret=INTERPRET, **options)
    nll, lse, got = jax.jit(functools.partial(run, gradient_dtype=E5M2))(logits, labels, weights)
    *wanted, gradient = fp8.row_pass(logits, labels, weights, **options)[:3]
    assert got.dtype == E5M2
    for x, y in zip((nll, lse), wanted):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    got, gradient = (np.asarray(x, np.float32) for x in (got, gradient))
    # A last bit of float32 can move it by a step of float8, seldom.
    assert (got != gradient).mean() < 1e-3
    np.testing.assert_allclose(got, gradient, rtol=0.25, atol=2.0**-15)
    assert not got[0].any() and np.abs(got).max() == 57344
    assert "RACE" not in "".join(capfd.readouterr())


def test_float8_is_transposed_without_races(capfd):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((256, 384)), E5M2)
    got = jax.jit(functools.partial(fp8_transpose, interpret=INTERPRET))(x)
    np.testing.assert_array_equal(*(np.asarray(a).view(np.uint8) for a in (got, x.T)))
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(("V", "softcap"), [(32768, 15.0), (8192, None)])
@pytest.mark.quick("8192-None")
def test_the_loss_lowers_for_hopper_with_the_logits_in_place(V, softcap):
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((64, 64), BF16), ((64, V), BF16), ((64,), jnp.int32))
    ]
    weights = jax.ShapeDtypeStruct((64,), jnp.float32)
    f = functools.partial(linear_cross_entropy, softcap=softcap, implementation="mosaic", chunk=32)
    with on_target(*HOPPER):
        traced = jax.jit(jax.grad(f, (0, 1))).trace(*arrays, weights)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    assert "output_operand_alias" in call


@pytest.mark.parametrize(
    ("V", "dtype", "reason"),
    [
        (50304, BF16, "a vocabulary in multiples of 4096, got 50304"),
        (65536, BF16, "a vocabulary of 65536"),
        (4096, jnp.float32, "needs bfloat16 or float16"),
    ],
)
def test_a_vocabulary_that_loss_rows_cannot_serve_goes_to_xla(V, dtype, reason):
    x, w = jnp.ones((2, 2), dtype), jnp.ones((2, V), dtype)
    labels, weights = jnp.zeros(2, jnp.int32), jnp.ones(2)
    with on_target(*HOPPER), pytest.raises(NotImplementedError, match=reason):
        linear_cross_entropy(x, w, labels, weights, implementation="mosaic")


# ---- in the model ----------------------------------------------------------------------------

ALL = {name: "reference" for name in FusedOps.model_fields if name != "ffn"}  # or relu2: not both


@pytest.mark.slow
def test_the_switches_change_neither_the_loss_nor_its_gradient():
    def run(**changes):
        _, graphdef, _, params = build(depth=2, window_pattern="SL", **changes)
        return jax.jit(jax.value_and_grad(next_token_loss, 1), static_argnums=0)(
            graphdef, params, batch(4)
        )

    plain = run()
    other = run(kernels=ALL, scan_layers=True, remat="block")
    for x, y in zip(jax.tree.leaves(other), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * max(1.0, float(jnp.abs(y).max())))


def test_kernels_are_the_default_where_they_serve():
    c = resolve_model(ModelConfig.model_validate({"depth": 2, "width": 256, "ffn": "relu2"}), 256)
    x = jax.ShapeDtypeStruct((2, 256, 256), BF16)
    with on_target(*HOPPER):
        joined = c.kernels.model_copy(update={"qkv": "mosaic"})
        assert fastest(c.kernels, c, x) == joined
        odd = jax.ShapeDtypeStruct((2, 255, 250), BF16)
        left = fastest(c.kernels, c, odd)
        assert (left.norm, left.rope) == ("xla", "xla")
        gains = c.model_copy(update={"norm_gain": True, "qk_norm_gain": True})
        left = fastest(c.kernels, gains, x)
        assert (left.norm, left.rope) == ("xla", "xla")
        named = FusedOps.model_validate({"norm": "mosaic", "rope": "reference"})
        assert fastest(named, gains, x) == named.model_copy(update={"qkv": "xla"})
    with on_target("cuda", (8, 0)):
        left = fastest(c.kernels, c, x)
        assert (left.norm, left.rope, left.ffn, left.loss) == ("xla", "xla", None, None)


def test_one_name_is_for_all_passes():
    c = ModelConfig.model_validate({"kernels": "xla"})
    assert c.kernels.model_dump() == {
        "norm": "xla", "rope": "xla", "qkv": None, "relu2": None, "ffn": "xla", "loss": "xla",
    }  # fmt: skip
    with pytest.raises(ValueError, match="there is no backend fast"):
        ModelConfig.model_validate({"kernels": "fast"})
    with pytest.raises(ValueError, match="kernels.norm needs norm: rms"):
        ModelConfig.model_validate({"kernels": {"norm": "mosaic"}, "norm_gain": True})


def test_layers_share_one_lowered_kernel():
    x = jax.ShapeDtypeStruct((1, 8, 256), BF16)

    def layers(x, y):
        for _ in range(3):
            x, y = rows.residual_norm(x, y, eps=EPS, implementation="mosaic")
        return jnp.sum(x + y)

    with on_target(*HOPPER):
        traced = jax.jit(jax.grad(layers)).trace(x, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("call @_backward") == 3
    assert text.count("@mosaic_gpu") < 6  # forwards, of which some results go unused, and backwards
