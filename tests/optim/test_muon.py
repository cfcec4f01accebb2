"""Muon: the orthogonalisation against an SVD, and each refinement by what it promises."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.dispatch import on_target

from jaxtrain.model.init import constant
from jaxtrain.optim.muon import MuonConfig, make_muon, muon, num_blocks
from jaxtrain.optim.orthogonalize import (
    COEFFICIENTS,
    LARGEST,
    normalize,
    orthogonalize,
    orthogonalize_flops,
)
from jaxtrain.optim.soap import soap_peaks
from jaxtrain.settings import UserError
from jaxtrain.weights.params import ParamSpec

OFF = {
    "nesterov": False, "equilibrate": False, "renormalize": False, "normuon": False,
    "cautious_decay": False, "weight_decay_schedule": "constant",
}  # fmt: skip
HYPER = {"learning_rate": 0.1, "weight_decay": 0.0, "momentum": 0.9, "b2": 0.9}


def matrices(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def core(x, out):
    """`out` seen from the singular vectors of x: diagonal if it kept them. [..., r, r]"""
    u, _, vt = np.linalg.svd(np.asarray(x), full_matrices=False)
    return u.swapaxes(-1, -2) @ np.asarray(out) @ vt.swapaxes(-1, -2)


def assert_near_polar_factor(x, out, low, high, tolerance=1e-4):
    seen = core(x, out)
    values = np.diagonal(seen, axis1=-2, axis2=-1)
    assert low < values.min() and values.max() < high
    assert np.abs(seen - values[..., None] * np.eye(seen.shape[-1])).max() < tolerance


WIDE, TALL, SQUARE = (3, 16, 48), (48, 16), (2, 2, 16, 16)


@pytest.mark.parametrize(
    ("gram", "name", "shape"),
    [
        (False, "polar_express", TALL), (True, "polar_express", WIDE),
        (False, "polar_express_4", SQUARE), (True, "polar_express_4", TALL),
        (False, "newton_schulz", WIDE), (True, "newton_schulz", SQUARE),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.quick("False-polar_express-(48, 16)", "True-newton_schulz-(2, 2, 16, 16)")
def test_orthogonalize_keeps_singular_vectors_and_brings_values_near_one(shape, name, gram):
    x = matrices(*shape)
    out = orthogonalize(normalize(x), COEFFICIENTS[name], gram, largest=LARGEST.get(name))
    assert out.shape == x.shape and out.dtype == jnp.float32
    assert_near_polar_factor(x, out, *((0.6, 1.3) if name == "newton_schulz" else (0.8, 1.2)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 24, 24), (24, 96)], ids=str)
def test_a_closer_bound_does_the_first_iterations_work(shape):
    """Singular values below 1 after four iterations from it, and after five without."""
    u, _, v = np.linalg.svd(np.asarray(matrices(*shape)), full_matrices=False)
    x = normalize(jnp.asarray(u * np.logspace(0, -2.5, 24) @ v, jnp.float32))
    name = "polar_express_4"
    run = lambda name: orthogonalize(x, COEFFICIENTS[name], largest=LARGEST.get(name))
    low = [np.diagonal(core(x, run(n)), axis1=-2, axis2=-1).min() for n in (name, "polar_express")]
    alone = orthogonalize(x, COEFFICIENTS[name])
    without = np.diagonal(core(x, alone), axis1=-2, axis2=-1).min()
    assert low[0] > 0.6 * low[1] > 1.2 * without
    scaled = orthogonalize(0 * x, COEFFICIENTS[name], largest=1.9)
    np.testing.assert_array_equal(scaled, 0)


def test_polar_express_lifts_small_singular_values():
    """A condition number of 1000, as gradients have."""
    u, _, vt = np.linalg.svd(np.asarray(matrices(16, 16)))
    x = jnp.asarray(u @ np.diag(np.logspace(0, -3, 16)) @ vt, jnp.float32)
    assert_near_polar_factor(
        x, orthogonalize(normalize(x), COEFFICIENTS["polar_express"]), 0.6, 1.2
    )


def gradient_like(rows, columns):
    """Singular values from 1 down to 1e-4, and the polar factor that the iteration comes to."""
    u, _, _ = np.linalg.svd(np.asarray(matrices(rows, rows)))
    v, _, _ = np.linalg.svd(np.asarray(matrices(columns, columns, seed=1)))
    x = jnp.asarray(u * np.logspace(0, -4, rows) @ v[:rows], jnp.float32)
    return x, orthogonalize(normalize(x), COEFFICIENTS["polar_express"], gram=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "gram", "dtype", "error"),
    [
        ((64, 64), False, jnp.bfloat16, 0.2),
        ((48, 192), False, jnp.bfloat16, 0.2),
        ((48, 192), True, jnp.float16, 0.03),
    ],
)
@pytest.mark.quick("shape0-False-bfloat16-0.2")
def test_sixteen_bits_are_near_enough(monkeypatch, shape, gram, dtype, error):
    x, exact = gradient_like(*shape)
    module = sys.modules[orthogonalize.__module__]
    monkeypatch.setattr(module, "matmul_dtype", lambda wanted=jnp.bfloat16: jnp.dtype(wanted))
    out = orthogonalize(normalize(x), COEFFICIENTS["polar_express"], gram)
    assert out.dtype == dtype
    off = np.linalg.norm(np.asarray(out, np.float32) - exact) / np.linalg.norm(exact)
    assert 1e-4 < off < error


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("polar_express", (2, 24, 96)), ("newton_schulz", (96, 24)), ("polar_express_4", (24, 48)),
        ("newton_schulz", (24, 48)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.quick("polar_express-(2, 24, 96)", "newton_schulz-(96, 24)")
def test_the_gram_matrix_iteration_is_the_same_in_float32(shape, name):
    x = normalize(matrices(*shape))
    iterate = functools.partial(orthogonalize, x, COEFFICIENTS[name], largest=LARGEST.get(name))
    plain, gram = (iterate(gram=g) for g in (False, True))
    np.testing.assert_allclose(gram, plain, atol=2e-5)


def test_flops_are_those_of_the_matmuls_that_are_traced():
    def traced(short, long, gram):
        step = lambda x: orthogonalize(x, COEFFICIENTS["polar_express"], gram)
        dots = [e for e in jax.make_jaxpr(step)(jnp.zeros((short, long))).jaxpr.eqns
                if e.primitive.name == "dot_general"]  # fmt: skip
        contracted = lambda e: e.invars[0].aval.shape[e.params["dimension_numbers"][0][0][0]]
        return sum(2 * e.outvars[0].aval.size * contracted(e) for e in dots)

    for shape in ((8, 8, True), (8, 32, True), (8, 32, False), (8, 15, True)):
        short, long, gram = shape
        assert orthogonalize_flops(short, long, 5, gram) == traced(*shape), shape
    assert orthogonalize_flops(8, 32, 5, True) == 60 * 8**3
    assert orthogonalize_flops(8, 32, 5, False) == 90 * 8**3


@pytest.mark.slow
def test_each_matrix_of_a_stack_is_its_own():
    x = matrices(3, 8, 20)
    polar = lambda x: orthogonalize(normalize(x), COEFFICIENTS["polar_express"])
    alone, stacked = jnp.stack([polar(m) for m in 10 * x]), polar(x)
    np.testing.assert_allclose(stacked, alone, rtol=1e-3, atol=1e-4)


# ---- the transformation ----------------------------------------------------------------------


def step(grads, params, state=None, hyper=HYPER, **switches):
    tx = make_muon(MuonConfig.model_validate(OFF | switches))(hyper)
    updates, state = tx.update({"w": grads}, state or tx.init({"w": params}), {"w": params})
    return np.asarray(updates["w"]), state


@pytest.mark.parametrize(("shape", "factor"), [((16, 64), 2.0), ((64, 16), 1.0)], ids=str)
def test_plain_muon_is_the_rate_times_the_polar_factor(shape, factor):
    g, p = matrices(2, *shape), matrices(2, *shape, seed=1)
    moved, _ = step(g, p)
    assert_near_polar_factor(g, moved / (-0.1 * factor), 0.8, 1.2)


def test_momentum_and_nesterov():
    g, other, p = matrices(8, 8), matrices(8, 8, seed=1), matrices(8, 8, seed=2)
    _, state = step(g, p)
    moved, _ = step(other, p, state)
    m = 0.9 * 0.1 * g + 0.1 * other
    expected = lambda x: -0.1 * orthogonalize(normalize(x), COEFFICIENTS["polar_express"])
    np.testing.assert_allclose(moved, expected(m), rtol=1e-4, atol=1e-6)
    ahead, _ = step(other, p, state, nesterov=True)
    np.testing.assert_allclose(ahead, expected(0.9 * m + 0.1 * other), rtol=1e-4, atol=1e-6)


def test_decay_is_decoupled_and_cautious_decay_takes_what_shrinks_anyway():
    g, p, hyper = matrices(8, 8), matrices(8, 8, seed=1), HYPER | {"weight_decay": 0.5}
    free, _ = step(g, p)
    all_decayed, _ = step(g, p, hyper=hyper)
    np.testing.assert_allclose(all_decayed - free, -0.1 * 0.5 * p, rtol=1e-4, atol=1e-6)
    cautious, _ = step(g, p, hyper=hyper, cautious_decay=True)
    towards_zero = free * p <= 0
    assert 0 < towards_zero.sum() < 64
    np.testing.assert_allclose(cautious - free, -0.05 * p * towards_zero, rtol=1e-4, atol=1e-6)


def test_norms_are_of_the_same_sums_as_those_of_lines():
    """XLA for GPUs would read the matrix once more for a sum of sums, if nothing kept the first."""
    g, tx = matrices(16, 48), make_muon(MuonConfig())(HYPER)
    text = jax.jit(lambda g: tx.update(g, tx.init(g), g)).lower(g).as_text()
    assert text.count("stablehlo.optimization_barrier") == 2


@pytest.mark.slow
def test_renormalized_updates_have_the_norm_of_an_orthogonal_matrix():
    moved, _ = step(matrices(3, 16, 48), matrices(3, 16, 48), renormalize=True)
    norms = np.linalg.norm(moved, axis=(-2, -1))
    np.testing.assert_allclose(norms, 0.1 * np.sqrt(3) * np.sqrt(16), rtol=1e-4)


@pytest.mark.slow
def test_normuon_evens_out_the_outputs_and_keeps_the_norm():
    g = matrices(16, 48) * jnp.logspace(0, 2, 48)[None]  # outputs of very different sizes
    p = matrices(16, 48, seed=1)
    plain, _ = step(g, p)
    evened, state = step(g, p, normuon=True)
    spread = lambda u: np.std(np.linalg.norm(u, axis=0)) / np.mean(np.linalg.norm(u, axis=0))
    assert spread(evened) < 0.01 < spread(plain)
    np.testing.assert_allclose(np.linalg.norm(evened), np.linalg.norm(plain), rtol=1e-4)
    assert state.second["w"].shape == (1, 48)


@pytest.mark.slow
def test_equilibration_frees_the_update_from_the_scale_of_an_output():
    g, p = matrices(16, 48), matrices(16, 48, seed=1)
    scaled = g * jnp.logspace(0, 2, 48)[None]
    apart = lambda **switch: np.linalg.norm(step(g, p, **switch)[0] - step(scaled, p, **switch)[0])
    assert apart(equilibrate=True) < 1e-3 < apart()


def test_momentum_and_decay_over_the_run():
    group = muon(MuonConfig())["matrix"]
    schedule = {"total_steps": 2000.0, "decay_steps": 1000.0}
    at = lambda step: group.adjust(group.peaks, jnp.float32(step), schedule)
    momentum = [float(at(step)["momentum"]) for step in (0, 200, 400, 1000, 1500, 2000)]
    np.testing.assert_allclose(momentum, [0.85, 0.91, 0.97, 0.97, 0.935, 0.90], rtol=1e-5)
    decay = [float(at(step)["weight_decay"]) for step in (0, 1000, 2000)]
    np.testing.assert_allclose(decay, [0.28, 0.14, 0.0], atol=1e-6)


@pytest.mark.slow
def test_a_zero_matrix_stays_where_it_is():
    zeros, p = jnp.zeros((2, 8, 8)), matrices(2, 8, 8)
    moved, _ = step(zeros, p, equilibrate=True, renormalize=True, normuon=True)
    np.testing.assert_array_equal(moved, np.zeros(p.shape))


@pytest.mark.slow
def test_soap_muon_orthogonalises_the_momentum_divided_in_the_eigenbasis():
    """The last of some steps, from its state by numpy; the first is plain Muon's."""
    c = MuonConfig.model_validate(OFF | {"soap": {"precondition_frequency": 2}})
    hyper = {**HYPER, **{f"soap_{n}": x for n, x in soap_peaks(c.soap).items()}}
    p = jnp.zeros((2, 6, 8))
    tx, plain = make_muon(c)(hyper), make_muon(MuonConfig.model_validate(OFF))(HYPER)
    states = [tx.init(p)]
    for i in range(5):
        g = matrices(2, 6, 8, seed=i)
        u, state = jax.jit(tx.update)(g, states[-1], p)
        states.append(state)
        if i == 0:
            np.testing.assert_allclose(
                u, plain.update(g, plain.init(p), p)[0], rtol=1e-4, atol=1e-6
            )
    before = states[-2].soap.leaves
    turn = lambda x: before.left.basis.mT @ x @ before.right.basis
    v = (0.9 * before.v + 0.1 * turn(g) ** 2) / (1 - 0.9**4)
    divided = turn(states[-1].momentum) / jnp.sqrt(v)
    divided = before.left.basis @ divided @ before.right.basis.mT
    assert_near_polar_factor(divided, u / -(0.1 * (8 / 6) ** 0.5), 0.8, 1.2, 1e-3)
    assert states[-1].soap.leaves.m is None and int(states[-1].soap.count) == 5


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.quick("2")
def test_blocks_of_heads_are_orthogonalised_by_themselves(heads):
    """q and k by heads, other matrices whole; renormalised to the norm of orthogonal blocks."""
    spec = lambda head_dim: ParamSpec(
        (2, 16, 16), ("layers", None, None), constant(0.0), "matrix", (1,), (2,), "matrix",
        head_dim=head_dim,
    )  # fmt: skip
    specs, grads = (
        {"q": spec(4), "v": spec(None)},
        {"q": matrices(2, 16, 16), "v": matrices(2, 16, 16)},
    )
    c = MuonConfig.model_validate(OFF | {"qk_heads": heads, "renormalize": True})
    tx = make_muon(c)(HYPER)
    moved, _ = tx.update(grads, tx.init(grads), grads, specs=specs)
    updates = jax.tree.map(lambda u: np.asarray(u) / -HYPER["learning_rate"], moved)
    width = 4 * heads
    for start in range(0, 16, width):
        x, u = (tree["q"][..., start : start + width] for tree in (grads, updates))
        assert_near_polar_factor(x, u, 0.7, 1.3)
    np.testing.assert_allclose(np.linalg.norm(updates["q"], axis=(1, 2)), 4, rtol=1e-4)
    assert_near_polar_factor(grads["v"], updates["v"], 0.7, 1.3)
    with pytest.raises(UserError, match=r"qk_heads 3 does not divide 4 heads"):
        num_blocks(spec(4), 3)
    assert num_blocks(spec(16), 2) == 1  # one head of keys


def test_a_tall_update_is_transposed_in_16_bits():
    """As lowered for a GPU: its rows stay together until it is rounded to float16."""
    run = lambda x: orthogonalize(x, COEFFICIENTS["polar_express"], symmetric=False)
    tall, wide = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 512, 192), (2, 192, 512)))
    with on_target("cuda", (9, 0)):
        texts = [jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)) for x in (tall, wide)]
    lines = [text.as_text().splitlines() for text in texts]
    kept = [[line for line in each if "@LayoutConstraint" in line] for each in lines]
    assert [len(each) for each in kept] == [1, 0] and "512x192xf16" in kept[0][0]
