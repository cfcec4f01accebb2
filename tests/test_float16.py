"""float16: the scale finds its way back, what overflowed is named, statistics are in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from tiny import (
    LLAMA,
    batch,
    begin_random,
    make_spec,
    mesh_of,
    resolved,
    rows_of,
    run_overrides,
)

from jaxtrain.main import main
from jaxtrain.model import path_name
from jaxtrain.model.layers import layer_norm, rms_norm
from jaxtrain.runs.history import read_rows
from jaxtrain.settings import UserError
from jaxtrain.train import loss_scale
from jaxtrain.train import step as step_module
from jaxtrain.train.checks import Checks
from jaxtrain.train.guard import Taken, overflowed
from jaxtrain.train.loss_scale import LossScale
from jaxtrain.train.step import make_step, train_step


def names_of(task):
    return [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(task.specs)[0]]


def scaled(state, scale):
    return state._replace(extras={"loss_scale": LossScale(jnp.float32(scale), jnp.int32(0))})


@pytest.fixture(scope="module")
def half():
    task, hyperparams = make_spec(resolved(**LLAMA | {"depth": 1}), dtype=jnp.float16)
    return task, hyperparams, make_step(task, mesh_of())


@pytest.mark.slow
def test_from_a_scale_far_too_high_training_finds_one_that_fits(half):
    task, hyperparams, step = half
    state = scaled(begin_random(task, mesh_of()), 2.0**30)
    first = jax.device_get(state.params)
    skipped, losses, said = [], [], []
    for i in range(1, 41):
        state, metrics = step(state, batch(micro=8), hyperparams)
        skipped.append(float(metrics["skipped"]))
        losses.append(float(metrics["loss"]))
        taken = Taken(i, i, metrics["loss"], metrics["checks"], metrics["loss_scale"])
        said += filter(None, [overflowed(names_of(task), taken, "stop")])
        if not skipped[-1] and sum(skipped) and len(skipped) > sum(skipped) + 5:
            break
    count = int(sum(skipped))
    assert count > 2 and skipped == [1.0] * count + [0.0] * 6  # once there, it stays
    assert float(state.extras["loss_scale"].scale) == 2.0 ** (30 - count)
    assert losses[-1] < losses[0] and np.isfinite(losses).all()
    assert all((np.asarray(a) != b).any() for a, b in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(first)
    ))  # fmt: skip
    assert len(said) == count
    assert said[0].startswith("step 1: the gradient of ")
    assert "at loss scale 1.07374e+09; skipped, and the scale halved" in said[0]


def test_what_overflowed_is_named_and_what_did_not_is_not(half):
    names = names_of(half[0])
    squares = np.ones(len(names), np.float32)

    def said(squares, loss=2.0, scale=8.0, policy="stop"):
        checks = Checks(np.float32(0), squares, np.zeros(len(names)))
        return overflowed(names, Taken(4, 4, loss, checks, scale), policy)

    assert said(squares) is None
    squares[[names.index(n) for n in ("blocks/attention/v", "blocks/ffn/down")]] = np.inf, np.nan
    assert said(squares) == (
        "step 4: the gradient of blocks/attention/v and of 1 others overflowed float16 at loss "
        "scale 8; skipped, and the scale halved"
    )
    assert said(squares, scale=None) is None  # of another dtype
    for value, scale, why in ((2.0, 1.0, "at loss scale 1"), (np.inf, 8.0, "the loss is inf")):
        with pytest.raises(UserError, match=f"blocks/attention/v .*{why}.*train.precision"):
            said(squares, value, scale)
    assert said(squares, np.inf, policy="skip") is None  # it is treated as asked


# ---- float32 islands ---------------------------------------------------------------------------

ISLANDS = {"exp", "exp2", "log", "log1p", "rsqrt", "sqrt", "cumsum"}


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))
        ):
            inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            if isinstance(inner, Jaxpr):
                yield from equations(inner)


# The speedrun family sums the gradients of its learned scalars in the dtype of the compute.
@pytest.mark.parametrize(
    ("changes", "more"), [(LLAMA, {"reduce_sum"}), ({"depth": 2}, set())], ids=["llama", "speedrun"]
)
@pytest.mark.quick("llama")
def test_norms_softmax_loss_and_optimizer_compute_in_float32(changes, more):
    task, hyperparams = make_spec(resolved(**changes), dtype=jnp.float16)
    state = jax.eval_shape(lambda: step_module.init_state(task, 0))
    closed = jax.make_jaxpr(lambda s, b, k: train_step(task, s, b, k))(
        state, batch(micro=8), hyperparams
    )
    found, half, products = set(), jnp.dtype(jnp.float16), 0
    for e in equations(closed.jaxpr):
        of_half = any(getattr(v.aval, "dtype", None) == half for v in e.invars)
        products += of_half and e.primitive.name == "dot_general"
        if of_half and e.primitive.name in ISLANDS | more:
            found.add(e.primitive.name)
    assert products > 10  # while the matmuls are in float16
    assert not found


def test_statistics_of_numbers_whose_squares_float16_does_not_hold():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)) * 1e4, jnp.float16)
    x32 = x.astype(jnp.float32)
    for norm in (rms_norm, layer_norm):
        y = norm(x, eps=1e-6)
        assert y.dtype == jnp.float16
        np.testing.assert_allclose(y, norm(x32, eps=1e-6), rtol=0, atol=4e-3)


# ---- a run -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_says_what_it_skipped(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 2.0**22)
    changes = {"train__precision": "float16", "train__steps": 12, "checkpoint__every": "null"}
    assert main(run_overrides(tmp_path, **changes)) == 0, capfd.readouterr().err
    rows = rows_of(tmp_path / "tiny")
    skipped = [row["skipped"] for row in rows]
    assert 0 < sum(skipped) < 12 and skipped[0] == 1
    assert rows[-1]["loss_scale"] == 2.0 ** (22 - sum(skipped[:-1]))  # what step 12 began with
    every = read_rows(tmp_path / "tiny" / "metrics.jsonl")
    said = [row["overflow"] for row in every if "overflow" in row]
    assert len(said) == sum(skipped) and "the gradient of" in said[0]
    out = capfd.readouterr().out
    assert said[0] in out and "skipped 100%" in out and "skipped 0%" in out
