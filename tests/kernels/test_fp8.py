"""Float8 matmuls against NumPy with ml_dtypes: bits of the casts, all products, odd values."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels import (
    Fp8,
    fp8_matmul,
    fp8_quantize,
    fp8_quantize_delayed,
    fp8_unsupported,
    linear_cross_entropy,
)
from jaxtrain_kernels.cross_entropy import reference as loss_reference
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.matmul import fp8
from jaxtrain_kernels.matmul.fp8 import hopper as fp8_hopper
from jaxtrain_kernels.matmul.fp8 import reference as fp8_reference
from jaxtrain_kernels.matmul.fp8 import xla as fp8_xla
from jaxtrain_kernels.matmul.fp8.functions import itself, relu2, relu2_grad

from jaxtrain.cluster.xla_flags import known_options

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Half of the last place, relative; and half of the smallest number, where that is more.
ROUNDING = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
M, K, N = 48, 64, 32


def normal(shape, seed, dtype=jnp.float32, std=1.0):
    """Normal values, the last column much smaller, so that subnormal numbers occur."""
    x = std * np.random.default_rng(seed).standard_normal(shape)
    x[..., -1] *= 2.0**-11
    return jnp.asarray(x, dtype)


def operands(dtype=jnp.float32):
    return (
        normal((M, K), 0, dtype), normal((K, N), 1, dtype, 0.02), normal((M, N), 2, dtype, 1e-5),
    )  # fmt: skip


def numpy_cast(x, dtype):
    """(q, scale) by ml_dtypes; the scale is the least power of two that fits the maximum."""
    x = np.asarray(x, np.float64)
    fraction, exponent = np.frexp(np.abs(x).max() / LARGEST[dtype])
    scale = 2.0 ** (exponent - (fraction == 0.5))
    numpy_dtype = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}[dtype]
    return (x / scale).astype(np.float32).astype(numpy_dtype), scale


def numpy_rounded(x, dtype):
    q, scale = numpy_cast(x, dtype)
    return q.astype(np.float64) * scale


def with_gradients(matmul, x, w, dy, **options):
    y, vjp = jax.vjp(lambda x, w: matmul(x, w, **options), x, w)
    return y, *vjp(dy)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("given", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_the_cast_is_numpys_bit_for_bit(dtype, given, implementation):
    x = normal((M, K), 3, given, 0.3)
    out = fp8_quantize(x, dtype, implementation=implementation)
    q, scale = numpy_cast(x.astype(jnp.float32), dtype)
    assert out.q_MK.dtype == out.q_KM.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out.q_MK).view(np.uint8), q.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(out.q_KM).view(np.uint8), q.T.view(np.uint8))
    assert float(out.scale) == scale
    rounded = fp8_reference.rounded(x, dtype)
    np.testing.assert_array_equal(rounded, numpy_rounded(x.astype(jnp.float32), dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_is_a_power_of_two_that_just_fits(dtype):
    exact = LARGEST[dtype] * 2.0 ** np.arange(-40, 40)
    amax = np.concatenate([exact, np.geomspace(1e-13, 1e20, 301)]).astype(np.float32)
    scale = np.asarray(fp8.fp8_scale(jnp.asarray(amax), dtype))
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (amax / scale <= LARGEST[dtype]).all() and (2 * amax / scale > LARGEST[dtype]).all()


def test_no_amax_makes_a_scale_that_is_not_a_normal_number():
    amax = jnp.asarray([0.0, 1e-40, 1e-30, 1.0, 3e38, jnp.inf, jnp.nan], jnp.float32)
    x, dy = (np.asarray(fp8.fp8_scale(amax, dtype), np.float64) for dtype in (E4M3, E5M2))
    least = float(jnp.finfo(jnp.float32).smallest_normal)
    for scale in (x, dy, 1 / x, 1 / dy, x[:4] * dy[:4]):
        assert (scale >= least).all() and np.isfinite(scale.astype(np.float32)).all()


@pytest.mark.parametrize("given", [jnp.bfloat16, jnp.float32])
@pytest.mark.quick("float32")
def test_all_three_products_are_numpys(given):
    x, w, dy = operands(given)
    y, dx, dw = with_gradients(fp8_matmul, x, w, dy)
    x8, w8 = (numpy_rounded(a.astype(jnp.float32), E4M3) for a in (x, w))
    dy8 = numpy_rounded(dy.astype(jnp.float32), E5M2)
    reference = with_gradients(fp8_reference.fp8_matmul, x, w, dy)
    for out, like, plain, wanted in zip(
        (y, dx, dw), (dy, x, w), reference, (x8 @ w8, dy8 @ w8.T, x8.T @ dy8)
    ):
        assert out.dtype == like.dtype == given and out.shape == like.shape
        tolerance = 4 * float(jnp.finfo(given).eps) * np.abs(wanted).max()
        np.testing.assert_allclose(out.astype(jnp.float32), wanted, atol=tolerance, rtol=0)
        np.testing.assert_allclose(plain.astype(jnp.float32), wanted, atol=tolerance, rtol=0)


def test_the_error_against_the_exact_product_is_what_rounding_allows():
    x, w, dy = operands()

    def parts(a, dtype):
        """|a|, and by how much each entry of its cast may be off."""
        relative, least = ROUNDING[dtype]
        a, scale = np.abs(np.asarray(a, np.float64)), numpy_cast(a, dtype)[1]
        return a, np.maximum(relative * a, least * scale)

    def bound(a, b):
        (a, da), (b, db) = a, b
        return da @ b + a @ db + da @ db

    x_, w_, dy_ = parts(x, E4M3), parts(w, E4M3), parts(dy, E5M2)
    transposed = lambda pair: tuple(a.T for a in pair)
    bounds = bound(x_, w_), bound(dy_, transposed(w_)), bound(transposed(x_), dy_)
    x64, w64, dy64 = (np.asarray(a, np.float64) for a in (x, w, dy))
    exact = x64 @ w64, dy64 @ w64.T, x64.T @ dy64
    for out, wanted, most in zip(with_gradients(fp8_matmul, x, w, dy), exact, bounds):
        error = np.abs(out - wanted)
        assert (error <= 1.0001 * most).all()
        # Errors are independent, so that their sum grows as the root of their number.
        assert 1e-3 < np.linalg.norm(error) / np.linalg.norm(wanted) < 0.08


def test_a_copy_made_before_replaces_the_matrix():
    x, w, dy = operands()
    copy = fp8_quantize(w)
    expected = with_gradients(fp8_matmul, x, w, dy)
    for a, b in zip(with_gradients(fp8_matmul, x, 0 * w, dy, w_fp8=copy), expected):
        np.testing.assert_array_equal(a, b)


def test_zeros_stay_zeros():
    x, w, dy = operands()
    for zeros in ((0 * x, w, dy), (x, 0 * w, dy), (x, w, 0 * dy), (0 * x, 0 * w, 0 * dy)):
        for out in with_gradients(fp8_matmul, *zeros):
            assert np.isfinite(out).all()
    np.testing.assert_array_equal(fp8_matmul(0 * x, w), 0)


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_what_is_not_finite_spreads_as_far_as_in_a_plain_product(bad):
    x, w, dy = operands()
    y, dx, dw = with_gradients(fp8_matmul, x.at[3, 5].set(bad), w, dy)
    assert np.isnan(y[3]).all() and np.isnan(dw[5]).all()
    others = np.delete(np.asarray(y), 3, 0), dx, np.delete(np.asarray(dw), 5, 0)
    assert all(np.isfinite(out).all() for out in others)


def test_delayed_scaling_takes_the_maxima_given_and_returns_those_seen():
    x, w, dy = operands()
    maxima = jnp.stack([jnp.abs(x).max(), jnp.abs(dy).max()])
    run = lambda amax: jax.vjp(lambda x, w, a: fp8_matmul(x, w, amax_2=a), x, w, amax)
    y, vjp = run(maxima)
    dx, dw, seen = vjp(dy)
    np.testing.assert_array_equal(seen, maxima)
    in_slots = run(jnp.broadcast_to(maxima[:, None], (2, 3)))
    np.testing.assert_array_equal(in_slots[0], y)
    np.testing.assert_array_equal(in_slots[1](dy)[2].max(1), maxima)
    for out, current in zip((y, dx, dw), with_gradients(fp8_matmul, x, w, dy)):
        np.testing.assert_array_equal(out, current)
    # What is larger than the history saturates instead of becoming nan.
    y, vjp = run(maxima / 8)
    assert all(np.isfinite(out).all() for out in (y, *vjp(dy)))
    assert float(jnp.abs(fp8_quantize(x, amax=maxima[0] / 8).q_MK).max()) == 448
    np.testing.assert_array_equal(vjp(dy)[2], maxima)  # of the tensors, not of what was left
    assert float(fp8_quantize(x, amax=jnp.float32(0)).scale) == 1.0


@pytest.mark.parametrize("slots", [(), (1,), (4,), (6,), (2, 8)])
def test_amaxes_in_slots_have_the_maximum_of_those_given(slots):
    seen = jnp.asarray([[1.0, 5.0], [2.0, 3.0], [4.0, 0.5]])
    found = fp8.amax_in_slots(seen, slots)
    assert found.shape == slots and found.max() == 5
    if found.size >= 6:  # each has its own
        np.testing.assert_array_equal(found.reshape(-1)[:6], seen.reshape(-1))
    assert fp8.known_amax(jnp.full(slots, 7.0)) == 7


def test_with_slots_no_maximum_is_computed_beside_the_kernels():
    x, dy = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((128, 256), (128, 384)))
    w = jax.ShapeDtypeStruct((256, 384), jnp.bfloat16)
    copy = jax.eval_shape(functools.partial(fp8_quantize, implementation="xla"), w)

    def maxima(*slots):
        def run(x, w, copy, amax_2, dy):
            call = lambda x, w, a: fp8_matmul(x, w, w_fp8=copy, amax_2=a, implementation="mosaic")
            return jax.vjp(call, x, w, amax_2)[1](dy)

        with on_target("cuda", (9, 0)):
            arrays = x, w, copy, jax.ShapeDtypeStruct((2, *slots), jnp.float32), dy
            return str(jax.make_jaxpr(run)(*arrays)).count("reduce_max[")

    inside = maxima(8)  # those of the kernels
    assert maxima() == inside + 2 and maxima(4) == inside + 1  # 4 parts and 6


@pytest.mark.parametrize(
    ("platform", "capability", "works"),
    [("cpu", None, True), ("cuda", (8, 9), True), ("cuda", (9, 0), True), ("cuda", (10, 0), True),
     ("cuda", (7, 5), False), ("cuda", (8, 0), False), ("rocm", None, False), ("tpu", None, False)],
)  # fmt: skip
def test_a_device_without_float8_is_refused_with_the_reason(platform, capability, works):
    reason = fp8_unsupported(Target(platform, capability))
    assert (reason is None) == works
    if works:
        return
    name = "cuda 7.5" if capability == (7, 5) else platform
    assert "compute capability 8.9 or later" in reason and f"this is {name}" in reason
    x, w, _ = operands()
    with on_target(platform, capability), pytest.raises(NotImplementedError, match="float8"):
        fp8_matmul(x, w)


def with_maxima(x, w, dy):
    """The same with delayed scaling by the tensors' own maxima; and those that it saw."""
    maxima = jnp.stack([jnp.abs(x).max(), jnp.abs(dy).max()]).astype(jnp.float32)
    y, vjp = jax.vjp(lambda x, w, a: fp8_matmul(x, w, amax_2=a), x, w, maxima)
    return y, *vjp(dy)


@pytest.mark.parametrize("delayed", [False, True])
def test_every_dot_is_of_float8_along_the_last_dims(delayed):
    """The form that XLA takes for cuBLASLt's float8, both operands along the summed dim."""
    run = with_maxima if delayed else functools.partial(with_gradients, fp8_matmul)
    x, w, dy = (jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in operands())
    with on_target("cuda", (9, 0)):
        traced = jax.jit(run).trace(x, w, dy)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    types = [tuple(re.findall(r"tensor<[0-9x]+(f8\w+|bf16|f32)>", line)) for line in dots]
    assert sorted(types) == [
        ("f8E4M3FN", "f8E4M3FN", "bf16"), ("f8E4M3FN", "f8E5M2", "bf16"),
        ("f8E5M2", "f8E4M3FN", "bf16"),
    ]  # fmt: skip
    assert all("contracting_dims = [1] x [1]" in line for line in dots)
    # Gradients add up in float32 throughout (no fast accumulation).
    assert sum("HIGHEST" in line for line in dots) == 2


def test_a_copy_is_a_pytree_of_arrays():
    copies = jax.vmap(fp8_quantize)(jnp.stack([normal((16, 32), 4), 8 * normal((16, 32), 4)]))
    assert isinstance(copies, Fp8) and copies.q_KM.shape == (2, 32, 16)
    assert float(copies.scale[1] / copies.scale[0]) == 8
    np.testing.assert_array_equal(copies.q_MK[0], copies.q_MK[1])


@pytest.mark.parametrize(("softcap", "name"), [(None, "fp8"), (15.0, "fp8"), (15.0, "fp8_head")])
@pytest.mark.quick("15.0-fp8")
def test_the_loss_has_its_three_matmuls_in_float8(softcap, name):
    tokens, V = 32, 48
    x, w = normal((tokens, 16), 0), normal((16, V), 1, std=0.3)
    random = np.random.default_rng(2)
    labels = jnp.asarray(random.integers(0, V - 5, tokens)).at[3].set(-1)
    weights = jnp.asarray(random.random(tokens), jnp.float32).at[3].set(0)
    given = dict(softcap=softcap, z_loss=1e-3, valid_vocab=V - 5)

    def run(name):
        loss = functools.partial(linear_cross_entropy, implementation=name, **given)
        both = jax.value_and_grad(lambda x, w: 0.25 * loss(x, w, labels, weights), (0, 1))
        return jax.jit(both)(x, w)

    x8, w8 = (numpy_rounded(a, E4M3).astype(np.float32) for a in (x, w))
    of_logits = lambda logits: loss_reference.linear_cross_entropy(
        logits, jnp.eye(V), labels, weights, **given
    )
    total, d = jax.jit(jax.value_and_grad(of_logits))(jnp.asarray(x8 @ w8))
    # The scale that two times the largest weight asks for.
    scale = numpy_cast(np.array([2 * weights.max()]), E5M2)[1]
    d8 = (np.asarray(d) / scale).astype(ml_dtypes.float8_e5m2).astype(np.float32) * scale
    loss, (dx, dw) = run(name)
    np.testing.assert_allclose(loss, 0.25 * total, rtol=1e-5)
    for out, wanted in ((dx, 0.25 * d8 @ w8.T), (dw, 0.25 * x8.T @ d8)):
        # A last bit of d can move it by a step of float8.
        assert np.linalg.norm(out - wanted) < 2e-3 * np.linalg.norm(wanted)
    loss_32, grads_32 = run("reference")
    np.testing.assert_allclose(loss, loss_32, rtol=0.02)
    for a, b in zip((dx, dw), grads_32):
        assert np.linalg.norm(a - b) < 0.15 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("function", "count", "dtype", "saturate"),
    [(itself, 1, E4M3, False), (relu2, 1, E4M3, True), (relu2_grad, 2, E5M2, True)],
)  # fmt: skip
@pytest.mark.quick("relu2_grad-2-float8_e5m2-True")
def test_mosaics_cast_is_xlas_and_the_references_without_races(
    function, count, dtype, saturate, capfd
):
    arrays = tuple(normal((128, 256), seed, jnp.bfloat16) for seed in (5, 8)[:count])
    first = arrays[0].at[70, 3].set(6 if function is relu2 else -6)  # the largest
    arrays = (first, *(x.at[70, 3].set(6) for x in arrays[1:]))
    most = {itself: 6, relu2: 36, relu2_grad: 72}[function]
    factor = jnp.float32(2.0**14 if saturate else 64)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    bits = lambda outs: [np.asarray(out).view(np.uint8) for out in outs]
    given = arrays, factor, dtype, function
    outs = fp8_hopper.cast(*given, saturate=saturate, interpret=interpret)
    *measured, seen = fp8_hopper.cast_measured(*given, interpret=interpret)
    largest = float(jnp.abs(measured[0].astype(jnp.float32)).max())
    assert seen.shape == (2, 2) and seen.max() == most == seen[1, 0] > seen[0].max()
    assert (largest == LARGEST[dtype]) == saturate
    for backend in (fp8_xla, fp8_reference):
        wanted = backend.cast(*given, saturate=saturate)
        np.testing.assert_array_equal(bits(outs)[0], bits(wanted)[0])
        np.testing.assert_array_equal(bits(outs)[1], bits(wanted)[1])
        *wanted, wanted_seen = backend.cast_measured(*given)
        np.testing.assert_array_equal(bits(measured)[0], bits(wanted)[0])
        np.testing.assert_array_equal(bits(measured)[1], bits(wanted)[1])
        assert wanted_seen == most and wanted_seen.dtype == seen.dtype == jnp.float32
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.quick("float8_e4m3fn")
def test_mosaics_cast_lowers_for_hopper(dtype):
    x = jax.ShapeDtypeStruct((4096, 768), jnp.bfloat16)
    with on_target("cuda", (9, 0)):
        run = functools.partial(fp8_quantize, dtype=dtype, implementation="mosaic")
        text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        with pytest.raises(NotImplementedError, match="rows in multiples of 64"):
            fp8_quantize(jnp.ones((60, 128), jnp.bfloat16), implementation="mosaic")
        run = functools.partial(fp8_quantize_delayed, dtype=dtype, implementation="mosaic")
        traced = jax.jit(lambda x, amax: run(x, amax=amax)).trace(x, jnp.float32(1))
        delayed = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in (text, delayed):
        assert kernel.count("mosaic_gpu") and "stablehlo.transpose" not in kernel


@pytest.mark.gpu
def test_on_a_gpu_mosaics_cast_is_xlas():
    x = normal((4096, 768), 6, jnp.bfloat16)
    for dtype in (E4M3, E5M2):
        xla, mosaic = (fp8_quantize(x, dtype, implementation=i) for i in ("xla", "mosaic"))
        for a, b in zip(xla, mosaic):
            assert bool((a.astype(jnp.float32) == b.astype(jnp.float32)).all())
        measured = functools.partial(fp8_quantize_delayed, x, dtype, jnp.float32(3))
        (xla, seen), (mosaic, most) = (measured(implementation=i) for i in ("xla", "mosaic"))
        assert seen == most == jnp.abs(x).max()
        for a, b in zip(xla, mosaic):
            assert bool((a.astype(jnp.float32) == b.astype(jnp.float32)).all())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "K", "N", "delayed"), [(4096, 768, 3072, False), (2048, 1536, 1536, True)]
)
def test_on_a_gpu_all_three_products_are_cublaslts_float8(M, K, N, delayed):
    if reason := fp8_unsupported():
        pytest.skip(reason)
    x, w, dy = (
        normal((M, K), 0, jnp.bfloat16), normal((K, N), 1, jnp.bfloat16, 0.02),
        normal((M, N), 2, jnp.bfloat16, 1e-5),
    )  # fmt: skip
    run = with_maxima if delayed else functools.partial(with_gradients, fp8_matmul)
    # As a step in float8 is compiled: else XLA searches among Triton's, and what it finds varies.
    compiled = jax.jit(run).lower(x, w, dy).compile(known_options(("cublas",)))
    text = compiled.as_text()
    calls = re.findall(r'custom_call_target="(__cublas[^"]*)"', text)
    assert calls == ["__cublas$lt$matmul$f8"] * 3
    assert not re.search(r" dot\(|__triton_gemm", text)
    with jax.default_device(jax.devices("cpu")[0]):
        host = [jax.device_put(np.asarray(a), jax.devices("cpu")[0]) for a in (x, w, dy)]
        expected = with_gradients(fp8_reference.fp8_matmul, *host)
    for out, wanted in zip(compiled(x, w, dy), expected):
        out, wanted = (np.asarray(a, np.float32) for a in (out, wanted))
        # Fast accumulation keeps some 14 bits; the result has 8.
        assert np.abs(out - wanted).max() <= 2**-7 * np.abs(wanted).max()
