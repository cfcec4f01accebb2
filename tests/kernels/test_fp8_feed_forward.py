"""The squared ReLU inside the casts to float8: all products against NumPy, every backend alike."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import jaxprs_in_params
from jaxtrain_kernels import fp8_feed_forward_relu2, fp8_quantize
from jaxtrain_kernels.dispatch import on_target
from jaxtrain_kernels.matmul import fp8
from jaxtrain_kernels.matmul.fp8 import hopper

LARGEST = {ml_dtypes.float8_e4m3fn: 448.0, ml_dtypes.float8_e5m2: 57344.0}
B, T, D, F = 2, 64, 128, 256


def operands(dtype=jnp.bfloat16, rows=(B, T)):
    random = np.random.default_rng(0)
    normal = lambda shape, std: jnp.asarray(std * random.standard_normal(shape), dtype)
    return (
        normal((*rows, D), 1), normal((D, F), 0.1), normal((F, D), 0.05), normal((*rows, D), 1e-5),
    )  # fmt: skip


def run(x, up, down, dy, amax_22=None, **options):
    """(y, dx, d_up, d_down), and with amax_22 the maxima seen."""
    network = lambda x, up, down, a: fp8_feed_forward_relu2(x, up, down, amax_22=a, **options)
    y, pull = jax.vjp(network, x, up, down, amax_22)
    return [out for out in (y, *pull(dy)) if out is not None]


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def rounded(x, dtype):
    """By the least power of two that fits the maximum."""
    fraction, exponent = np.frexp(np.abs(x).max() / LARGEST[dtype])
    scale = 2.0 ** (exponent - (fraction == 0.5))
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


def in_numpy(x, up, down, dy):
    """The results; what was cast: x, the activation, the gradients of hidden layer and output."""
    dtype, e4m3, e5m2 = x.dtype, *LARGEST
    once = lambda a: wide(jnp.asarray(a, dtype))  # a matmul's result in memory
    x, up, down, dy = (wide(a).reshape(-1, a.shape[-1]) for a in (x, up, down, dy))
    x8, up8, down8, dy8 = (
        rounded(a, kind) for a, kind in ((x, e4m3), (up, e4m3), (down, e4m3), (dy, e5m2))
    )
    h = once(x8 @ up8)
    a, da = np.maximum(h, 0) ** 2, once(dy8 @ down8.T)
    dh = da * 2 * np.maximum(h, 0)
    a8, dh8 = rounded(a, e4m3), rounded(dh, e5m2)
    return (a8 @ down8, dh8 @ up8.T, x8.T @ dh8, a8.T @ dy8), (x, a, dh, dy)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.quick("xla-bfloat16")
def test_all_six_products_are_numpys(dtype, implementation):
    given = operands(dtype)
    wanted, _ = in_numpy(*given)
    for out, like, exact in zip(
        run(*given, implementation=implementation), (given[3], *given[:3]), wanted, strict=True
    ):
        assert out.shape == like.shape and out.dtype == dtype
        # A last bit of the hidden layer can move a value by a step of float8.
        error = np.linalg.norm(wide(out).reshape(exact.shape) - exact) / np.linalg.norm(exact)
        assert error < (4e-3 if dtype == jnp.bfloat16 else 1e-3)


def test_delayed_scaling_takes_the_maxima_given_and_returns_those_seen():
    given = operands()
    most_x, most_a, most_dh, most_dy = (np.abs(x).max() for x in in_numpy(*given)[1])
    wanted_22 = np.array([[most_x, most_dh], [most_a, most_dy]])
    *_, seen_22 = run(*given, jnp.asarray(2 * wanted_22, jnp.float32))
    np.testing.assert_allclose(seen_22, wanted_22, rtol=0.01)
    *outs, again = run(*given, seen_22)
    np.testing.assert_array_equal(again, seen_22)
    for out, current in zip(outs, run(*given), strict=True):
        np.testing.assert_array_equal(wide(out), wide(current))
    # What is larger than the history saturates instead of becoming nan.
    assert all(np.isfinite(wide(out)).all() for out in run(*given, seen_22 / 8))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.slow
def test_mosaics_casts_are_the_references_bit_for_bit(delayed, monkeypatch):
    interpret = functools.partial(functools.partial, interpret=plgpu.InterpretGPUParams())
    casts = interpret(hopper.cast), interpret(hopper.cast_measured)
    interpreted = SimpleNamespace(
        supports=lambda target, *arrays: None, cast=casts[0], cast_measured=casts[1]
    )
    monkeypatch.setitem(fp8.BACKENDS, "mosaic", interpreted)
    given = operands()
    # Smaller than what is there for two tensors: they saturate.
    amax_22 = jnp.asarray([[3.0, 1e-4], [4.0, 2e-5]]) if delayed else None
    outs, wanted = (run(*given, amax_22, implementation=i) for i in ("mosaic", "reference"))
    assert len(outs) == 4 + delayed
    for out, like in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(wide(out), wide(like))


@pytest.mark.slow
def test_copies_made_before_replace_the_matrices_and_placement_is_pinned():
    x, up, down, dy = operands(rows=(2, 32))
    pinned = []
    options = dict(
        copies=(fp8_quantize(up), fp8_quantize(down)),
        constrain=lambda h: pinned.append(h.shape) or h,
    )
    for a, b in zip(run(x, 0 * up, 0 * down, dy, **options), run(x, up, down, dy), strict=True):
        np.testing.assert_array_equal(wide(a), wide(b))
    assert pinned == [(2, 32, F)] * 2  # the hidden layer, and the activation's gradient


def equations(jaxpr):
    """All equations, those of inner jaxprs included but for a kernel's own."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.params.get("name") != "_cast":
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.quick("False")
def test_on_hopper_neither_the_activation_nor_its_gradient_is_written(delayed):
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands()]
    amax_22 = [jax.ShapeDtypeStruct((2, 2), jnp.float32)] * delayed
    with on_target("cuda", (9, 0)):
        traced = jax.jit(run).trace(*given, *amax_22)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    types = [tuple(re.findall(r"tensor<[0-9x]+(f8\w+|bf16|f32)>", line)) for line in dots]
    assert sorted(types) == sorted(
        2 * [("f8E4M3FN", "f8E4M3FN", "bf16"), ("f8E4M3FN", "f8E5M2", "bf16"),
             ("f8E5M2", "f8E4M3FN", "bf16")]
    )  # fmt: skip
    assert sum("HIGHEST" in line for line in dots) == 4  # gradients add up in float32
    found = list(equations(traced.jaxpr.jaxpr))
    casts = [e for e in found if e.params.get("name") == "_cast"]
    # Of x, the two matrices (whose copies were not given), the activation, and both gradients.
    read = [[v.aval.shape for v in e.invars if v.aval.ndim == 2] for e in casts]
    M = B * T
    assert sorted(read) == sorted(
        [[(M, D)], [(M, D)], [(D, F)], [(F, D)], [(M, F)], [(M, F), (M, F)]]
    )
    # Where the maxima come first, they are found by reductions alone; else there is no such pass.
    hidden = [e.primitive.name for e in found if any(v.aval.shape == (M, F) for v in e.outvars)]
    assert ("square" in hidden) != delayed and ("max" in hidden) != delayed
    assert "mosaic_gpu" in text and "stablehlo.transpose" not in text


@pytest.mark.slow
def test_without_the_hidden_layer_the_backward_keeps_float8_alone():
    """The output and W_down's gradient are the same; the others are off by float8's step, as the
    hidden layer's gradient is anyway."""
    x, up, down, dy = operands(rows=(4, T))
    usual, less = (run(x, up, down, dy, keep_hidden=keep) for keep in (True, False))
    for i, (a, b) in enumerate(zip(usual, less)):
        if i in (0, 3):
            np.testing.assert_array_equal(a, b)
        else:
            error = np.linalg.norm(wide(b) - wide(a)) / np.linalg.norm(wide(a))
            assert 1e-4 < error < 0.05
    _, pull = jax.vjp(lambda *o: fp8_feed_forward_relu2(*o, keep_hidden=False), x, up, down)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size == 4 * T * F]
    assert [leaf.dtype for leaf in kept] == [jnp.float8_e4m3fn]
