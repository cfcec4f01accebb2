"""Sampled softmax: an unbiased estimate of Z, fewer products of the head, evaluation in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    FEW_PARTS,
    PLAIN_MODEL,
    VOCAB,
    assert_same_metrics,
    batch,
    build,
    make_spec,
    resolved,
    run_overrides,
)

from jaxtrain.main import main
from jaxtrain.objectives import LossOptions
from jaxtrain.objectives.next_token import next_token_loss
from jaxtrain.objectives.sampled_softmax import (
    SampledSoftmaxConfig,
    draw_negatives,
    make_sampled_softmax,
)
from jaxtrain.runs.history import read_rows


def loss_of(graphdef, one, options=LossOptions(), **fields):  # noqa: B008
    objective = make_sampled_softmax(SampledSoftmaxConfig(**fields), options)
    assert objective.draws
    return lambda params, key: objective.loss(graphdef, params, one, None, key=key)[0]


@pytest.mark.parametrize("proposal", ["log_uniform", "uniform"])
def test_tokens_are_drawn_as_often_as_is_said(proposal):
    c = SampledSoftmaxConfig(negatives=200_000, proposal=proposal)
    ids, expected = draw_negatives(c, jax.random.key(0), 50)
    counts = np.bincount(ids, minlength=50)
    said = np.zeros(50)
    said[np.asarray(ids)] = np.exp(expected)
    assert said.sum() == pytest.approx(200_000, rel=1e-4)
    np.testing.assert_allclose(counts, said, rtol=0.1)


@pytest.mark.parametrize("proposal", ["log_uniform", "uniform"])
@pytest.mark.quick("log_uniform")
def test_many_negatives_give_the_full_softmax_and_its_gradient(proposal):
    _, graphdef, _, params = build(depth=1)
    one = jax.tree.map(jnp.asarray, batch(4))
    loss = loss_of(graphdef, one, negatives=60_000, proposal=proposal)
    found = jax.jit(jax.value_and_grad(loss))(params, jax.random.key(1))
    full = jax.jit(jax.value_and_grad(lambda p: next_token_loss(graphdef, p, one)))(params)
    np.testing.assert_allclose(found[0], full[0], rtol=5e-3)
    for a, b in zip(*map(jax.tree.leaves, (found[1], full[1])), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b) + 1e-3
    np.testing.assert_allclose(jax.jit(loss)(params, None), full[0], rtol=1e-5)


@pytest.mark.slow
def test_the_head_multiplies_the_sample_alone():
    """FLOPs of the gradient: 3 x 2 x tokens x width for each column of the head less."""
    _, graphdef, _, params = build(depth=1)
    one = jax.tree.map(jnp.asarray, batch(8))

    def flops(negatives):
        loss = loss_of(graphdef, one, negatives=negatives)
        grad = jax.jit(jax.grad(loss)).lower(params, jax.random.key(0)).compile()
        return grad.cost_analysis()["flops"]

    saved, each = flops(512) - flops(8), 3 * 2 * one.tokens_BT.size * 32
    assert saved >= 504 * each
    text = jax.jit(jax.grad(loss_of(graphdef, one, negatives=8)))
    lowered = text.lower(params, jax.random.key(0)).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    assert not any(f"{-(-VOCAB // 16) * 16}xf32" in line for line in products)


@pytest.mark.slow
def test_a_sharded_step_is_that_of_one_device():
    spec, hyperparams = make_spec(resolved(**PLAIN_MODEL))
    objective = make_sampled_softmax(SampledSoftmaxConfig(negatives=16), LossOptions())
    spec = spec._replace(objective=objective, draws=True)
    # The draws are of a microbatch.
    assert_same_metrics(spec, hyperparams, ("loss", "bpb", "grad_norm"), micro=8)


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_learns_and_validates_the_full_softmax(tmp_path):
    objective = "{name: sampled_softmax, negatives: 64}"
    assert main(run_overrides(tmp_path, train__steps=30, objective=objective, **FEW_PARTS)) == 0
    rows = read_rows(tmp_path / "tiny" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    last = [row for row in rows if row["kind"] == "validation"][-1]
    assert last["loss"] < np.log(384) - 0.1
    assert last["loss"] == pytest.approx(losses[-1], abs=0.7)
