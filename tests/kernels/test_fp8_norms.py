"""Norms that write float8: every backend against a norm and a cast by themselves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtrain_kernels import fp8_feed_forward_relu2, fp8_matmul, fp8_quantize_delayed
from jaxtrain_kernels.dispatch import Target, on_target
from jaxtrain_kernels.rows import fp8, mixed_norm, residual_norm
from jaxtrain_kernels.rows import hopper as norms
from jaxtrain_kernels.rows.fp8 import hopper, norm_quantized, reference, xla

EPS, E4M3, BF16 = 1e-6, jnp.float8_e4m3fn, jnp.bfloat16
# The mode that knows bar.sync, a named barrier of the hardware.
INTERPRET = plgpu.InterpretGPUParams(
    inline_mgpu="_hack_model_inline_mgpu_tokamax", detect_races=True
)
SCALES = jnp.float32(1.1), jnp.float32(0.3)
# The norm's largest value is about 4; with this multiplier some values saturate.
MULTIPLIER = jnp.float32(256)


def given(name, B=1, T=128, D=256, dtype=BF16) -> Any:
    """(x, y, x0, scales) of a norm: after a branch, of a layer's start, of the first layer."""
    rng = np.random.default_rng(0)
    x, y, x0 = (jnp.asarray(rng.standard_normal((B, T, D)), dtype) for _ in range(3))
    if name == "residual":
        return x, y, None, None
    return x, y if name == "mixed" else None, x0, SCALES


def floats(tree: Any) -> list[Any]:
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


def by_itself(x, y, x0, scales, interpret: Any = False) -> Any:
    """(s, h, x0) of the kernel that writes h in 16 bits."""
    if scales is None:
        made: Any = norms.residual_norm(x, y, eps=EPS, interpret=interpret)
        return *made, None
    return norms.mixed_norm(x, y, x0, *scales, eps=EPS, interpret=interpret)


def ours(x, y, x0, scales) -> Any:
    return hopper.norm_quantized(x, y, x0, scales, MULTIPLIER, eps=EPS, interpret=INTERPRET)


def with_gradients(run, arrays, x_scale):
    """Outputs and gradients; of s, h and x0 as cotangents that tell positions apart."""
    x, y, x0, scales = arrays
    out, pull = jax.vjp(run, x, y, x0, scales)
    weight = lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    grads = pull(jax.tree.map(lambda x: (weight(x) * x_scale).astype(x.dtype), out))
    return floats(out), floats(grads)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("residual", (2, 96, 128)), ("mixed", (1, 128, 256)), ("mixed_alone", (1, 64, 640))],
)
@pytest.mark.quick("residual-shape0")
def test_mosaic_is_the_norm_and_its_cast_bit_for_bit_without_races(name, shape, capfd):
    """Values, gradients and the maximum; rows of one batch entry end inside of a tile."""
    arrays = given(name, *shape)
    s, h, x0, q_MK, q_KM, seen = ours(*arrays)
    plain = by_itself(*arrays, interpret=INTERPRET)
    for found, wanted in zip(floats((s, h, x0)), floats(plain), strict=True):
        np.testing.assert_array_equal(found, wanted)
    wide = np.asarray(plain[1], np.float32).reshape(-1, shape[-1])
    cast = jnp.asarray(np.clip(wide * float(MULTIPLIER), -448, 448)).astype(E4M3)
    np.testing.assert_array_equal(*floats((q_MK, cast)))
    np.testing.assert_array_equal(*floats((q_KM, cast.T)))
    assert seen.max() == np.abs(wide).max() and np.abs(floats(q_MK)[0]).max() == 448
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["residual", "mixed", "mixed_alone"])
@pytest.mark.slow
def test_mosaics_gradients_are_the_norms(name):
    arrays = given(name, 1, 64, 128)
    plain = functools.partial(by_itself, interpret=INTERPRET)
    first = lambda x, y, x0, scales: ours(x, y, x0, scales)[:3]
    found, wanted = (with_gradients(run, arrays, 1e-2) for run in (first, plain))
    for one, other in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.abs(one).max() > 0


@pytest.mark.parametrize("name", ["residual", "mixed"])
def test_xla_and_reference_are_a_norm_and_a_cast(name):
    x, y, x0, scales = given(name, 1, 6, 48, jnp.float32)
    amax = jnp.float32(2)
    for by in ("xla", "reference"):
        made = norm_quantized(x, y, x0, scales, amax, eps=EPS, implementation=by)
        if scales is None:
            plain = *residual_norm(x, y, eps=EPS, implementation=by), None
        else:
            plain = mixed_norm(x, y, x0, *scales, eps=EPS, implementation=by)
        assert floats(made[:3])[0].shape == x.shape
        for found, wanted in zip(floats(made[:3]), floats(plain), strict=True):
            np.testing.assert_array_equal(found, wanted)
        cast = fp8_quantize_delayed(plain[1].reshape(6, 48), E4M3, amax, implementation=by)
        for found, wanted in zip(floats(made.cast), floats(cast), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("reason", "shape", "dtype"),
    [
        ("tokens in multiples of 64, got 96", (1, 96, 256), BF16),
        ("a width in multiples of 128 up to 2048, got 200", (1, 64, 200), BF16),
        ("needs bfloat16 or float16", (1, 64, 256), jnp.float32),
    ],
)
def test_what_mosaic_cannot_do_is_refused_with_the_reason(reason, shape, dtype):
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert reason in (hopper.supports(Target("cuda", (9, 0)), x) or "")
    assert "needs an NVIDIA GPU" in (hopper.supports(Target("cpu"), x) or "")
    assert hopper.supports(Target("cuda", (9, 0)), jax.ShapeDtypeStruct((1, 64, 256), BF16)) is None


@pytest.mark.parametrize("name", ["residual", "mixed"])
@pytest.mark.quick("mixed")
def test_it_lowers_for_hopper_at_the_models_sizes(name):
    struct = lambda x: jax.ShapeDtypeStruct((16, 2048, 1536) if x.ndim else (), x.dtype)
    arrays = jax.tree.map(struct, given(name))

    def run(x, y, x0, scales):
        amax = jnp.float32(4)
        made = norm_quantized(x, y, x0, scales, amax, eps=EPS, implementation="mosaic")
        return made.s_BTD, made.cast

    with on_target("cuda", (9, 0)):
        text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1 and "stablehlo.transpose" not in text


def results(run, *arrays):
    out, pull = jax.vjp(run, *arrays)
    return floats((out, pull(1e-3 * out)))


@pytest.mark.parametrize("network", [False, True])
def test_a_matmul_reads_the_cast_and_not_its_input(network):
    """Its values and its gradients, the input's too, are those with its own cast."""
    rng = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x, up, down = normal(32, 64), normal(64, 128), normal(128, 64)
    amax = jnp.asarray([[3.0, 1e-2], [40.0, 1e-2]])
    cast = fp8.Fp8Input(*fp8_quantize_delayed(x, E4M3, amax[0, 0]))

    def product(x, up, down, amax, cast=None):
        if network:
            return fp8_feed_forward_relu2(x, up, down, amax_22=amax, x_cast=cast)
        return fp8_matmul(x, up, amax_2=amax[0], x_cast=cast)

    plain = results(product, x, up, down, amax)
    found = results(
        functools.partial(product, cast=cast), jnp.full_like(x, jnp.nan), up, down, amax
    )
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["residual", "mixed", "mixed_alone"])
def test_on_a_gpu_mosaic_is_the_norm_and_its_cast(name):
    """At gpt_d24's width, with more tiles than a GPU runs at once: bit for bit."""
    arrays = given(name, 16, 2048, 1536)
    found = jax.jit(
        functools.partial(norm_quantized, eps=EPS, implementation="mosaic")
    )(*arrays, jnp.float32(2.0))  # fmt: skip
    plain = jax.jit(by_itself)(*arrays)
    for one, other in zip(floats(found[:3]), floats(plain), strict=True):
        np.testing.assert_array_equal(one, other)
    cast = jax.jit(functools.partial(fp8_quantize_delayed, dtype=E4M3))
    wanted = cast(plain[1].reshape(-1, 1536), amax=jnp.float32(2.0))
    with_maximum = found.cast._replace(seen=jnp.max(found.cast.seen))
    for one, other in zip(floats(with_maximum), floats(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_table_has_every_backend():
    assert fp8.BACKENDS == {"mosaic": hopper, "xla": xla, "reference": reference}
