"""Selective language modeling: which tokens count, with a reference and without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    PLAIN_MODEL,
    QUICK,
    assert_same_metrics,
    batch,
    build,
    forget_end,
    make_spec,
    resolved,
    run_overrides,
    same,
)

from jaxtrain import parallel
from jaxtrain.main import main
from jaxtrain.objectives import LossOptions
from jaxtrain.objectives.next_token import hidden_states, next_token_loss
from jaxtrain.objectives.selective import SelectiveConfig, make_selective, selected
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.saved import load_saved


def objective(keep=0.5):
    return make_selective(SelectiveConfig(keep=keep), LossOptions())


def test_the_labels_with_the_largest_scores_of_each_row_are_selected():
    scores = jnp.array([[3.0, 9, 1, 5, 4], [9, 8, 7, 6, 5]])
    weights = jnp.array([[1.0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    expected = [[1, 0, 0, 1, 1], [0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(selected(scores, weights, 0.75), expected)
    np.testing.assert_array_equal(selected(scores, weights, 0.25).sum(1), [1, 1])
    np.testing.assert_array_equal(selected(scores, weights, 1.0), weights > 0)


def nats(graphdef, params, one):
    h = hidden_states(graphdef, params, one)
    return parallel.token_losses(
        h.x_BTD, h.model.head_DV(), h.targets_BT, softcap=h.model.config.logit_softcap,
        valid_vocab=h.model.vocab_size,
    )  # fmt: skip


@pytest.mark.parametrize("refers", [True, False])
@pytest.mark.quick("True")
def test_the_loss_is_that_of_the_tokens_with_the_largest_excess(refers):
    _, graphdef, _, params = build(depth=1)
    one = jax.tree.map(jnp.asarray, batch(4))
    reference = 3 * np.random.default_rng(1).random(one.tokens_BT.shape, np.float32)
    given = one._replace(reference_BT=jnp.asarray(reference)) if refers else one

    @jax.jit
    def both(p):
        excess = nats(graphdef, p, one) - (reference if refers else 0)
        chosen = selected(excess, one.weights_BT, 0.5)
        theirs = next_token_loss(graphdef, p, one._replace(weights_BT=one.weights_BT * chosen))
        ours, sums = objective().loss(graphdef, p, given, None, step=jnp.int32(0))
        return ours, theirs, sums["all"], next_token_loss(graphdef, p, one), chosen.sum()

    ours, theirs, everything, usual, chosen = both(params)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(everything, usual, rtol=1e-5)
    assert ours < 0.8 * usual
    assert objective().count(one, jnp.ones(61))[0] == chosen


@pytest.mark.slow
def test_a_sharded_step_in_microbatches_is_that_of_one_device():
    spec, hyperparams = make_spec(resolved(**PLAIN_MODEL))

    def given(micro):
        one = batch(8, micro=micro)
        return one._replace(reference_BT=0.1 * one.targets_BT.astype(np.float32))

    spec, names = spec._replace(objective=objective()), ("loss", "loss_selected", "grad_norm")
    assert_same_metrics(spec, hyperparams, names, given=given)


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_with_a_reference_run_and_its_resumption(tmp_path, capsys):
    assert main(run_overrides(tmp_path, **QUICK, train__steps=2, run__name="reference")) == 0
    fields = QUICK | {
        "train__steps": 4, "objective__name": "selective", "checkpoint__every": 2,
        "objective__reference": tmp_path / "reference", "train__batch_size": 16,
    }  # fmt: skip
    assert main(run_overrides(tmp_path, **fields)) == 0
    whole = load_saved(tmp_path / "tiny")
    steps = [r for r in read_rows(tmp_path / "tiny" / "metrics.jsonl") if r["kind"] == "train"]
    assert all(row["loss_selected"] != row["loss"] for row in steps)
    alone = fields | {"run__name": "own", "objective__reference": "null"}
    assert main(run_overrides(tmp_path, **alone)) == 0
    own = [r for r in read_rows(tmp_path / "own" / "metrics.jsonl") if r["kind"] == "train"]
    assert own[0]["loss"] == pytest.approx(steps[0]["loss"], rel=1e-5)
    assert own[0]["loss_selected"] > steps[0]["loss_selected"]  # the largest of all
    forget_end(tmp_path / "tiny", 4)
    assert main(run_overrides(tmp_path, **fields)) == 0
    same(load_saved(tmp_path / "tiny").params, whole.params)
    other = fields | {"run__name": "other", "data__tokenizer__vocab_size": 350}
    assert main(run_overrides(tmp_path, **other)) == 2
    assert "its tokenizer differs from this run's" in capsys.readouterr().err
