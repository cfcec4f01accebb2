"""Training with operands of few bits: elements and blocks are those of ml_dtypes, every product of
a matrix sees them, and evaluation does not."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from tiny import (
    batch,
    begin_random,
    build,
    close,
    make_spec,
    mesh_of,
    random_params,
    resolved,
    tokens,
)

from jaxtrain.model import Forward
from jaxtrain.model.sections import WeightForm
from jaxtrain.parallel import place_batch
from jaxtrain.train.step import gradients, make_step
from jaxtrain.weights import TRAINING_FORMS, WEIGHTS, formats, microscaling
from jaxtrain.weights.contract import matmul

ELEMENTS = {
    "float8_e4m3fn": formats.E4M3, "float8_e5m2": formats.E5M2, "float6_e2m3fn": formats.E2M3,
    "float6_e3m2fn": formats.E3M2, "float4_e2m1fn": formats.E2M1,
}  # fmt: skip
OF_FORM = {
    "mxfp8": ("float8_e4m3fn", "float8_e4m3fn"), "mxfp8_e5m2": ("float8_e4m3fn", "float8_e5m2"),
    "mxfp6_e2m3": ("float6_e2m3fn",) * 2, "mxfp6_e3m2": ("float6_e3m2fn",) * 2,
    "mxfp4": ("float4_e2m1fn",) * 2,
}  # fmt: skip
random = lambda *shape, seed=0: np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(name):
    """All finite numbers of a format, as float32."""
    kind = getattr(ml_dtypes, name)
    every = np.arange(2 ** ml_dtypes.finfo(kind).bits, dtype=np.uint8).view(kind)
    values = every.astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def element(x, name):
    """ml_dtypes' rounding of what the format can hold; larger values are its largest."""
    most = float(ml_dtypes.finfo(getattr(ml_dtypes, name)).max)
    return np.clip(x, -most, most).astype(getattr(ml_dtypes, name)).astype(np.float32)


def mx_blocks(x, name, axis):
    """Blocks of 32 along an axis, one at a time, in ml_dtypes' numbers."""
    emax = int(np.floor(np.log2(float(ml_dtypes.finfo(getattr(ml_dtypes, name)).max))))
    lines = np.moveaxis(x, axis, -1)
    out = np.zeros_like(lines)
    for at in range(0, lines.shape[-1], 32):
        part = lines[..., at : at + 32]
        most = np.abs(part).max(-1, keepdims=True)
        scale = 2.0 ** (np.floor(np.log2(np.where(most > 0, most, 1))) - emax)
        out[..., at : at + 32] = element(part / scale.astype(np.float32), name) * scale
    return np.moveaxis(out, -1, axis)


def nvfp4_blocks(x, rows, columns):
    """Blocks of rows x columns of the last two dims, one at a time."""
    tensor = np.float32(np.abs(x).max() / (448 * 6))
    out = np.zeros_like(x)
    for i in range(0, x.shape[-2], rows):
        for j in range(0, x.shape[-1], columns):
            part = x[..., i : i + rows, j : j + columns] / tensor
            most = np.abs(part).max((-2, -1), keepdims=True)
            scale = element(most / 6, "float8_e4m3fn")
            whole = element(part / np.where(scale > 0, scale, 1), "float4_e2m1fn") * scale
            out[..., i : i + rows, j : j + columns] = whole * tensor
    return out


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_are_those_of_ml_dtypes_bit_for_bit(name):
    """All numbers and ties, their neighbours in float32, subnormals, overflow, both zeros."""
    values, form = numbers(name), ELEMENTS[name]
    ties = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(ties, np.float32(way)) for way in (np.inf, -np.inf)]
    most = float(values[-1])
    odd = [0.0, -0.0, 1e-30, -1e-30, 1.04 * most, -1.5 * most, 2e38, -2e38, np.inf, -np.inf]
    x = np.concatenate([values, ties, *near, random(5000) * most / 3, np.float32(odd)])
    x = np.concatenate([x, -x])
    found = np.asarray(jax.jit(formats.round_to, static_argnums=1)(x, form))
    np.testing.assert_array_equal(found.view(np.uint32), element(x, name).view(np.uint32))
    assert form.largest == most and 2.0**form.max_exponent <= most < 2.0 ** (form.max_exponent + 1)
    assert np.isnan(formats.round_to(jnp.float32(np.nan), form))


def test_scales_are_e8m0():
    """floor(log2 amax) - emax, from the least to the largest that eight bits hold."""
    amax = np.float32([1, 1.999, 2, 0.75, 1e-30, 1.2e-38, 3e38, 448, 447.99])
    for form in ELEMENTS.values():
        shift = np.asarray(formats.mx_exponent(jnp.asarray(amax), form))
        exact = 2.0 ** np.clip(np.floor(np.log2(amax.astype(np.float64))) - form.max_exponent,
                               -127, 127)  # fmt: skip
        np.testing.assert_array_equal(2.0**shift, exact)
        as_stored = exact.astype(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        np.testing.assert_array_equal(as_stored, exact)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.quick("float4_e2m1fn")
def test_stochastic_rounding_is_right_on_average(name):
    """To one of the two neighbours, with the mean of the value; numbers stay as they are."""
    values, form = numbers(name), ELEMENTS[name]
    key = jax.random.key(0)
    np.testing.assert_array_equal(formats.round_to(jnp.asarray(values), form, key), values)
    x = np.float32(values[-3] + (values[-2] - values[-3]) * np.float32([0.1, 0.5, 0.9]))
    many = np.asarray(formats.round_to(jnp.broadcast_to(x, (4000, 3)), form, key))
    assert set(np.unique(many)) == {values[-3], values[-2]}
    share = (many.mean(0) - values[-3]) / (values[-2] - values[-3])
    np.testing.assert_allclose(share, [0.1, 0.5, 0.9], atol=0.03)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.quick("bfloat16")
def test_a_block_that_is_not_finite_is_nan(dtype):
    """The step's guard must see it."""
    x = np.ones((4, 64), dtype)
    x[1, 40], x[2, 3] = np.inf, np.nan
    bad = np.zeros((4, 64), bool)
    bad[1, 32:] = bad[2, :32] = True
    for form, fields in ((formats.E2M1, {}), (formats.E4M3, {})):
        r = microscaling.BlockScaling(form, form, **fields)
        out = microscaling.round_operand(jnp.asarray(x), r, form, (1, 32), None).values
        np.testing.assert_array_equal(np.isnan(np.asarray(out, np.float32)), bad)


# ---- products ------------------------------------------------------------------------------------

NEAREST = {"stochastic_rounding": False, "hadamard": False}


def expected_products(form, x, w, dy):
    """y, dx and dw by hand, of operands in blocks along what each sums over."""
    if form == "nvfp4":
        of = lambda a, axis: nvfp4_blocks(a, *((1, 16) if axis == -1 else (16, 1)))
        both = nvfp4_blocks(w, 16, 16)
        parts = of(x, -1), both, of(dy, -1), both, of(x, -2), of(dy, -2)
    else:
        a, g = OF_FORM[form]
        parts = (
            mx_blocks(x, a, -1), mx_blocks(w, a, 0), mx_blocks(dy, g, -1), mx_blocks(w, a, 1),
            mx_blocks(x, a, -2), mx_blocks(dy, g, -2),
        )  # fmt: skip
    x1, w1, dy1, w2, x2, dy2 = (part.astype(np.float64) for part in parts)
    return x1 @ w1, dy1 @ w2.T, np.einsum("btk,btn->kn", x2, dy2)


@pytest.mark.parametrize(
    "form", [f for f in TRAINING_FORMS if WEIGHTS[f].options >= NEAREST.keys()]
)
@pytest.mark.slow
def test_all_three_products_have_rounded_operands(form):
    """Rows of 40 tokens, 48 channels in and 72 out: the last block of each dim is not full."""
    x, w, dy = random(2, 40, 48), random(48, 72, seed=1), random(2, 40, 72, seed=2)
    x[0, 3] *= 50
    x[1, :, 5] = 0
    encode = lambda w: WEIGHTS[form].encode(w, jax.random.key(0), **NEAREST)
    y, back = jax.vjp(lambda x, w: matmul(x, encode(w)), jnp.asarray(x), jnp.asarray(w))
    for found, expected in zip((y, *back(jnp.asarray(dy))), expected_products(form, x, w, dy)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-4)
        assert found.dtype == jnp.float32
    assert np.linalg.norm(y - x @ w) > 0.01 * np.linalg.norm(y)


def test_the_hadamard_transform_cancels_and_spreads_outliers():
    x, dy = random(2, 24, 5), random(2, 24, 7, seed=1)
    a, b = microscaling.transformed(jnp.asarray(x)), microscaling.transformed(jnp.asarray(dy))
    assert a.shape == (2, 32, 5)
    summed = lambda a, b: np.einsum("btk,btn->kn", a, b)
    np.testing.assert_allclose(summed(a, b), summed(x, dy), atol=1e-4)
    one = jnp.zeros((1, 16, 1)).at[0, 3, 0].set(8.0)
    np.testing.assert_allclose(np.abs(microscaling.transformed(one)), 2.0, rtol=1e-6)


@pytest.mark.slow
def test_the_mean_gradient_of_nvfp4_is_that_of_the_unrounded_one():
    """Over keys, both gradients approach those of a gradient that was not rounded."""
    x, w, dy = random(1, 32, 16), random(16, 32, seed=1), random(1, 32, 32, seed=2)
    given = jnp.asarray(x), jnp.asarray(w)

    def back(key, **options):
        encode = lambda w: WEIGHTS["nvfp4"].encode(w, key, hadamard=False, **options)
        return jax.vjp(lambda x, w: matmul(x, encode(w)), *given)[1](jnp.asarray(dy))

    keys = jax.random.split(jax.random.key(1), 400)
    many = jax.jit(jax.vmap(back))(keys)
    exact = dy @ nvfp4_blocks(w, 16, 16).T, np.einsum("btk,btn->kn", nvfp4_blocks(x, 16, 1), dy)
    for found, expected in zip(many, exact):
        one = distance(found[0], expected)
        assert one > 0.05 and distance(found.mean(0), expected) < 0.25 * one


# ---- a model -------------------------------------------------------------------------------------

SMALL = {"depth": 1, "window_pattern": "L", "value_embeddings": False, "smear": False}


@functools.cache
def step_of(*changes):
    task, _ = make_spec(resolved(**SMALL | dict(changes)))
    return task, jax.jit(lambda p, b, key: gradients(task, p, b, jnp.float32(1), key=key)[:2])


def grads_of(seed=0, **changes):
    task, run = step_of(*changes.items())
    return run(random_params(task.specs), batch(2, micro=2), jax.random.key(seed))


def distance(a, b):
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    return np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b))


@pytest.mark.slow
def test_evaluation_is_the_plain_model():
    _, graphdef, _, params = build(**SMALL, weight_form="nvfp4")
    run = lambda g, mode: nnx.merge(g, params)(jnp.asarray(tokens(2)), mode=mode).states
    plain = run(build(**SMALL)[1], Forward())
    np.testing.assert_array_equal(run(graphdef, Forward()), plain)
    assert np.abs(run(graphdef, Forward(jax.random.key(0))) - plain).max() > 1e-3


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4", "switchback"])
@pytest.mark.slow
def test_gradients_are_near(form):
    """Nearer with more bits."""
    exact, (found, grads) = grads_of(), grads_of(weight_form=form)
    most = 1.2 if form == "nvfp4" else 0.25
    assert 1e-3 < distance(grads, exact[1]) < most
    assert abs(found[0] - exact[0][0]) < 0.1 * exact[0][0]


@pytest.mark.slow
def test_the_draw_is_the_keys():
    """Same key, same bits; another key, another draw; rounding to nearest draws nothing."""
    one = grads_of(weight_form="nvfp4")[1]
    close(grads_of(weight_form="nvfp4")[1], one, 0, 0)
    assert distance(grads_of(1, weight_form="nvfp4")[1], one) > 0.05
    first, second = (grads_of(i, weight_form="mxfp4")[1] for i in (0, 1))
    close(first, second, 0, 0)


@pytest.mark.slow
def test_scan_and_remat_are_near():
    """A last bit before the rounding can move a value to its neighbour."""
    again = grads_of(weight_form="mxfp4", depth=2, scan_layers=True, remat="block")[1]
    assert distance(again, grads_of(weight_form="mxfp4", depth=2)[1]) < 0.02


@pytest.mark.slow
def test_sharded_is_one_device():
    """Draws and blocks are those of the whole arrays."""
    task, hyperparams = make_spec(resolved(**SMALL, weight_form="nvfp4"))

    def step(mesh):
        with jax.set_mesh(mesh):
            state = begin_random(task, mesh)
            rows = place_batch(batch(4, length=64, micro=4), mesh, batch_dim=1)
            state, metrics = make_step(task, mesh)(state, rows, hyperparams)
            return float(metrics["loss"]), float(metrics["grad_norm"])

    mesh = mesh_of(context=2, tensor=2)
    np.testing.assert_allclose(step(mesh), step(mesh_of()), rtol=0.03)


def test_options_are_those_of_the_form():
    with pytest.raises(ValueError, match="fake_int8 has no option hadamard"):
        WeightForm.model_validate({"name": "fake_int8", "hadamard": True})
    with pytest.raises(ValueError, match="there is no form fp3; there are fake_int8"):
        WeightForm.model_validate("fp3")
    assert WeightForm.model_validate("nvfp4").options() == {}
