"""Linear + cross-entropy against the reference, its memory, its dtypes."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels.cross_entropy import (
    fp8,
    fp8_head,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
)
from jaxtrain_kernels.cross_entropy.xla import default_chunk
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul.fp8.reference import rounded
from jaxtrain_kernels.shapes import LOSS_SMALL, LossShape

by_name = functools.partial(pytest.mark.parametrize, "shape", ids=lambda shape: shape.name)


def inputs(shape, dtype: Any = np.float64):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((shape.N, shape.D))
    w = rng.standard_normal((shape.D, shape.V))
    labels = rng.integers(0, shape.valid_vocab or shape.V, shape.N)
    weights = rng.uniform(0.5, 1.5, shape.N)
    weights[1::5] = 0
    labels[1::5] = -1
    return x.astype(dtype), w.astype(dtype), labels.astype(np.int32), weights.astype(np.float32)


def options(shape):
    return dict(softcap=shape.softcap, z_loss=shape.z_loss, valid_vocab=shape.valid_vocab)


def loss_and_gradients(shape, x, w, labels, weights, scale=1.0, **more):
    f = functools.partial(linear_cross_entropy, **options(shape), **more)
    arrays = [jnp.asarray(a) for a in (x, w, labels, weights)]
    scaled = jax.value_and_grad(lambda *a: f(*a) * scale, (0, 1))
    loss, (dx, dw) = jax.jit(scaled)(*arrays)
    return loss, dx, dw


@functools.cache
def truth(shape):
    with jax.enable_x64(True):
        got = loss_and_gradients(shape, *inputs(shape), implementation="reference")
        return [np.asarray(x) for x in got]


@by_name(LOSS_SMALL)
@pytest.mark.quick("all")
def test_xla_equals_reference(shape):
    got = loss_and_gradients(shape, *inputs(shape, np.float32), chunk=24)
    for x, y in zip(got, truth(shape)):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


@by_name([s for s in LOSS_SMALL if s.softcap])
@pytest.mark.parametrize(("size", "tolerance"), [(1.0, 3e-5), (2000.0, 1e-2)])
@pytest.mark.quick("1.0-3e-05-softcap", "2000.0-0.01-large_softcap")
def test_the_softcap_of_a_gpu_is_a_tanh_however_large_the_logits(shape, size, tolerance):
    x, *rest = inputs(shape, np.float32)
    with jax.enable_x64(True):
        given = (size * x.astype(np.float64), rest[0].astype(np.float64), *rest[1:])
        expected = loss_and_gradients(shape, *given, implementation="reference")
    with on_target("cuda"):
        got = loss_and_gradients(shape, size * x, *rest, chunk=24)
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@by_name(LOSS_SMALL)
@pytest.mark.quick("all", "one_token")
def test_the_loss_alone_equals_the_differentiated_one(shape):
    arrays = [jnp.asarray(a) for a in inputs(shape, np.float32)]
    loss = jax.jit(functools.partial(linear_cross_entropy, **options(shape)))(*arrays)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, truth(shape)[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.quick("bfloat16")
def test_16_bits_are_as_exact_as_the_reference_in_16_bits(dtype):
    shape = LOSS_SMALL[-2]
    x, w, labels, weights = inputs(shape)
    errors = []
    for implementation in ("xla", "reference"):
        arrays = jnp.asarray(x, dtype), jnp.asarray(w, dtype), labels, weights
        got = loss_and_gradients(shape, *arrays, implementation=implementation)
        assert [a.dtype for a in got] == [jnp.float32, dtype, dtype]
        pairs = zip(got, truth(shape))
        errors.append([np.abs(np.asarray(a, np.float64) - b).mean() for a, b in pairs])
    for ours, naive in zip(*errors):
        assert ours <= 2 * naive


@pytest.mark.slow
def test_float16_keeps_small_gradients_for_the_loss_scale():
    """Gradients far under float16's smallest number, before a loss scale of 2^16."""
    shape = LossShape("", 32, 16, 64)
    x, w, labels, _ = inputs(shape, np.float16)
    weights = np.full(32, 1e-7, np.float32)
    w = w * np.float16(0.1)
    half = loss_and_gradients(shape, x, w, labels, weights, scale=2.0**16)
    x, w = x.astype(np.float32), w.astype(np.float32)
    full = loss_and_gradients(shape, x, w, labels, weights, scale=2.0**16)
    for a, b in zip(half[1:], full[1:]):
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)


def test_tokens_of_weight_zero_have_no_gradient_and_all_zero_is_finite():
    shape = LOSS_SMALL[0]
    for dtype in (np.float32, np.float16):
        x, w, labels, weights = inputs(shape, dtype)
        _, dx, _ = loss_and_gradients(shape, x, w, labels, weights)
        assert (dx[1::5] == 0).all() and (dx[0] != 0).any()
        loss, dx, dw = loss_and_gradients(shape, x, w, labels, 0 * weights)
        assert loss == 0 and (dx == 0).all() and (dw == 0).all()


def test_weights_get_no_gradient():
    x, w, labels, weights = (jnp.asarray(a) for a in inputs(LOSS_SMALL[0], np.float32))
    for implementation in ("xla", "reference"):
        f = functools.partial(linear_cross_entropy, x, w, labels, implementation=implementation)
        assert (jax.jit(jax.grad(f))(weights) == 0).all()


@by_name([s for s in LOSS_SMALL if s.name in ("plain", "all", "one_token")])
@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.quick("None-all")
def test_per_token_losses_add_up(shape, implementation):
    x, w, labels, weights = (jnp.asarray(a) for a in inputs(shape, np.float32))
    call = dict(softcap=shape.softcap, valid_vocab=shape.valid_vocab)
    f = functools.partial(linear_cross_entropy_per_token, chunk=24, **call)
    f = functools.partial(f, implementation=implementation)
    nll = jax.jit(f)(x, w, labels)
    assert nll.shape == (shape.N,) and nll.dtype == jnp.float32
    expected = linear_cross_entropy(x, w, labels, weights, implementation="reference", **call)
    np.testing.assert_allclose((nll * weights).sum(), expected, rtol=1e-5)


@pytest.mark.slow
@by_name([s for s in LOSS_SMALL if not s.z_loss])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.quick("float16-softcap")
def test_per_token_losses_have_the_gradient_of_their_sum(shape, dtype):
    """Cotangents take the part of the weights, whatever their signs."""
    x, w, labels, weights = (jnp.asarray(a) for a in inputs(shape, dtype))
    weights = weights * jnp.where(jnp.arange(len(x)) % 3, 1e-3, -1e-3)
    call = dict(softcap=shape.softcap, valid_vocab=shape.valid_vocab)
    f = functools.partial(linear_cross_entropy_per_token, chunk=24, **call)
    got = jax.jit(jax.grad(lambda x, w: f(x, w, labels) @ weights, (0, 1)))(x, w)
    g = functools.partial(linear_cross_entropy, implementation="reference", **call)
    expected = jax.grad(g, (0, 1))(*(a.astype(jnp.float32) for a in (x, w)), labels, weights)
    for a, b in zip(got, expected):
        assert a.dtype == dtype
        tolerance = 1e-6 if dtype == jnp.float32 else 1e-2 * float(jnp.abs(b).max())
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=tolerance)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("differentiated", [False, True])
def test_the_whole_logits_are_never_in_memory(differentiated, per_token):
    N, D, V = 16384, 16, 2048
    shapes = ((N, D), jnp.float32), ((D, V), jnp.float32), ((N,), jnp.int32), ((N,), jnp.float32)
    f = jax.grad(linear_cross_entropy, (0, 1)) if differentiated else linear_cross_entropy
    if per_token:
        each = lambda x, w, y, weights: linear_cross_entropy_per_token(x, w, y) @ weights
        f = jax.grad(each, (0, 1)) if differentiated else each
    compiled = jax.jit(f).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < N * V * 4 / 4


def test_the_differentiated_loss_has_three_matmuls_and_the_loss_alone_one():
    arrays = inputs(LOSS_SMALL[0], np.float32)
    f = functools.partial(linear_cross_entropy, chunk=16)
    assert str(jax.make_jaxpr(f)(*arrays)).count("dot_general") == 1
    assert str(jax.make_jaxpr(jax.grad(f, (0, 1)))(*arrays)).count("dot_general") == 3


def test_chunks_are_equal_and_fit_the_device():
    with on_target("cpu"):
        assert default_chunk(8192, 4096) == 256
        assert default_chunk(100, 512) == 100
    with on_target("cuda", (9, 0)):
        assert default_chunk(65536, 32768) == 8192
        assert default_chunk(8200, 32768) == 4160
        assert default_chunk(300, 32768) == 320  # whole tiles: what is in place has no slice
        assert default_chunk(65536, 128256) == 4096  # 1 GiB of bfloat16 logits


def test_inside_shard_map_the_head_gradient_is_summed():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    shape = LossShape("", 64, 8, 40, softcap=3.0)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(*a):
        return jax.lax.psum(linear_cross_entropy(*a, softcap=3.0, chunk=5), "data")

    tokens = jax.P("data")
    f = jax.shard_map(
        local, mesh=mesh, in_specs=(tokens, jax.P(), tokens, tokens), out_specs=jax.P()
    )
    loss, gradients = jax.jit(jax.value_and_grad(f, (0, 1)))(*inputs(shape, np.float32))
    for x, y in zip((loss, *gradients), truth(shape)):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.quick("5.0")
def test_float8_logits_are_those_of_rounded_operands_and_gradients_go_straight_through(softcap):
    shape = LossShape("", 32, 16, 64, softcap=softcap, valid_vocab=60)
    x, w, labels, weights = inputs(shape, np.float32)
    w = w / 4
    got = loss_and_gradients(shape, x, w, labels, weights, implementation="fp8_logits", chunk=32)
    near = rounded(x, jnp.float8_e4m3fn), rounded(w, jnp.float8_e4m3fn)
    call = options(shape)
    call.pop("z_loss")

    def of_logits(logits):
        one = jnp.eye(shape.V)
        f = functools.partial(linear_cross_entropy, implementation="reference", **call)
        return f(logits, one, jnp.asarray(labels), jnp.asarray(weights))

    loss, dlogits = jax.jit(jax.value_and_grad(of_logits))(near[0] @ near[1])
    for a, b in zip(got, (loss, dlogits @ w.T, x.T @ dlogits)):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.gpu
def test_on_a_gpu_float8_logits_are_near_those_in_sixteen_bits():
    shape = LossShape("", 8192, 768, 32768, softcap=15.0)
    x, w, labels, weights = inputs(shape, jnp.bfloat16)
    arrays = x, (w.astype(np.float32) / 28).astype(jnp.bfloat16), labels, weights
    ours, plain = (
        loss_and_gradients(shape, *arrays, implementation=name) for name in ("fp8_logits", "mosaic")
    )
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-3)
    for a, b in zip(ours[1:], plain[1:]):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)


def relative_norms(got, wanted):
    pairs = [(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in zip(got, wanted)]
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]


@pytest.mark.slow
def test_the_float8_head_of_hopper_has_the_gradient_in_both_layouts():
    """As XLA's row pass. tests/kernels/test_rows.py has the values of both of its kernels."""
    logits = jax.ShapeDtypeStruct((128, 4096), jnp.bfloat16)
    one = lambda dtype: jax.ShapeDtypeStruct((128,), dtype)
    given = logits, one(jnp.int32), one(jnp.float32)
    call = dict(softcap=15.0, z_loss=0.0, valid_vocab=4000)
    interpreted = functools.partial(fp8_head.row_pass, interpret=plgpu.InterpretGPUParams())
    ours, xlas = (
        jax.eval_shape(functools.partial(f, **call), *given) for f in (interpreted, fp8.row_pass)
    )
    assert ours == xlas and [x.shape for x in ours[2:]] == [(128, 4096), (4096, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "softcap"), [(8192, 15.0), (300, None)])
def test_on_a_gpu_the_float8_head_is_that_of_xla(N, softcap):
    """The kernels write XLA's gradient in both layouts, and all three products are cuBLASLt's."""
    shape = LossShape("", N, 768, 32768, softcap=softcap)
    x, w, labels, weights = (jnp.asarray(a) for a in inputs(shape, jnp.bfloat16))
    w = (w.astype(jnp.float32) / 28).astype(jnp.bfloat16)
    logits, call = x @ w, dict(softcap=softcap, z_loss=0.0, valid_vocab=None)
    logits = jnp.pad(logits, ((0, -N % 128), (0, 0)))
    padded = (jnp.pad(a, (0, -N % 128)) for a in (labels, weights * 2.0**14))
    given = (logits, *padded)
    ours, xlas = (jax.jit(functools.partial(m.row_pass, **call))(*given) for m in (fp8_head, fp8))
    for a, b in zip(ours[:2], xlas[:2]):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-2)  # the hardware's tanh
    d_CV, d_VC, xlas_CV = (np.asarray(a).view(np.uint8) for a in (*ours[2:], xlas[2]))
    np.testing.assert_array_equal(d_CV.T, d_VC)
    # The hardware's tanh, off by 5e-4, moves some of them by a step of float8.
    assert (d_CV != xlas_CV).mean() < 0.03
    assert max(relative_norms(ours[2:3], xlas[2:3])) < 0.02
    # As a step in float8 is compiled: else XLA searches among Triton's.
    jit = functools.partial(jax.jit, compiler_options={"xla_gpu_enable_triton_gemm": False})

    def run(name):
        f = functools.partial(linear_cross_entropy, softcap=softcap, implementation=name)
        return jit(jax.value_and_grad(f, (0, 1))).lower(x, w, labels, weights).compile()

    compiled = {name: run(name) for name in ("fp8_head", "fp8", "mosaic")}
    assert compiled["fp8_head"].as_text().count("__cublas$lt$matmul$f8") == 3
    head, fp8s, plain = (c(x, w, labels, weights) for c in compiled.values())
    np.testing.assert_allclose([head[0], fp8s[0]], [plain[0]] * 2, rtol=1e-3)
    assert max(relative_norms(head[1], fp8s[1])) < 0.02
    assert max(relative_norms(head[1], plain[1])) < 0.15


def lowered(implementation, *sizes):
    spec = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
    N, D, V = sizes
    arrays = spec(N, D), spec(D, V), spec(N, dtype=jnp.int32), spec(N, dtype=jnp.float32)
    f = functools.partial(linear_cross_entropy, softcap=15.0, implementation=implementation)
    with on_target("cuda", (9, 0)):
        traced = jax.jit(jax.grad(f, (0, 1))).trace(*arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("V", "kernels"), [(32768, 4), (36864, 2), (8192, 4)])
@pytest.mark.quick("36864-2")
def test_a_float8_head_lowers_for_hopper_with_three_products_in_float8(V, kernels):
    """Kernels: two casts, the pass over the logits, and the transpose; the casts alone where the
    vocabulary does not go with them.
    """
    text = lowered("fp8_head", 300, 128, V)
    assert text.count("@mosaic_gpu") == kernels
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    types = [re.findall(r"tensor<[0-9x]+(f8\w+|bf16|f32)>", line) for line in dots]
    assert types == [
        ["f8E4M3FN", "f8E4M3FN", "bf16"], ["f8E5M2", "f8E4M3FN", "bf16"],
        ["f8E4M3FN", "f8E5M2", "f32"],
    ]  # fmt: skip
    assert all("contracting_dims = [1] x [1]" in line for line in dots)
    assert [line.count("HIGHEST") for line in dots] == [0, 2, 2]


def test_float8_logits_lower_for_hopper_with_one_product_in_float8():
    text = lowered("fp8_logits", 64, 64, 8192)
    assert text.count("@mosaic_gpu") == 1
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert ["f8E4M3FN" in line for line in products] == [True, False, False]
