"""Zeros of each method by hand; the error that is left; a run that is pruned and trained on."""

import json

import numpy as np
import pytest
import tiny

from jaxtrain.compress import arguments, prune, sparsify
from jaxtrain.compress.sparsify import InputStatistics, SparsityTarget
from jaxtrain.main import main as train
from jaxtrain.settings import UserError

HALF, TWO_FOUR = SparsityTarget(0.5), SparsityTarget(0.5, 2, 4)


def correlated(K=48, N=12, tokens=200, seed=0):
    """A matrix, inputs whose channels resemble each other, and their statistics."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(tokens, K)) @ (np.eye(K) + 0.3 * random.normal(size=(K, K)))
    x = x * np.exp(random.normal(size=K))
    return random.normal(size=(K, N)), x, InputStatistics(np.square(x).sum(0), x.T @ x)


def test_masks_by_hand():
    w = np.array([[1.0, -4.0], [-2.0, 3.0], [3.0, -2.0], [4.0, 1.0]])
    inputs = InputStatistics(np.array([100.0, 1.0, 1.0, 1.0]), None)
    by_size = [[0, -4], [0, 3], [3, 0], [4, 0]]
    np.testing.assert_array_equal(sparsify.magnitude_pruning(w, None, HALF)[0], by_size)
    np.testing.assert_array_equal(sparsify.magnitude_pruning(w, None, TWO_FOUR)[0], by_size)
    by_input = [[1, -4], [0, 3], [0, 0], [4, 0]]  # the first input is ten times the others
    np.testing.assert_array_equal(sparsify.wanda(w, inputs, HALF)[0], by_input)
    np.testing.assert_array_equal(sparsify.wanda(w, inputs, TWO_FOUR)[0], by_input)


def test_each_method_leaves_less_error_and_exact_zeros():
    """SparseGPT < Wanda < magnitude in ||X W - X W'||, of half and of 2:4."""
    assert sparsify.METHODS.keys() == arguments.PRUNING_METHODS.keys()
    w, x, inputs = correlated()
    for target in (HALF, TWO_FOUR):
        errors = {}
        for name in sparsify.METHODS:
            new = sparsify.sparsify(name, "w", w, inputs, target)
            errors[name] = np.linalg.norm(x @ (new - w))
            zeros = new.reshape(-1, 4, w.shape[1]) == 0
            assert (new == 0).sum() == w.size // 2
            assert target is HALF or (zeros.sum(1) == 2).all()
        assert errors["sparsegpt"] < 0.9 * errors["wanda"] < errors["wanda"] < errors["magnitude"]
    odd = sparsify.sparsify("sparsegpt", "w", *correlated(K=300, N=7)[::2], SparsityTarget(0.37))
    assert (odd == 0).sum() == round(0.37 * 2100)


def test_sparsegpt_solves_for_the_weights_that_are_left():
    """Of one output and few zeros at the front it is least squares with the mask given."""
    w, x, inputs = correlated(K=8, N=1)
    new, keep = sparsify.sparsegpt(w, inputs, SparsityTarget(0.125))
    (gone,) = np.flatnonzero(~keep[:, 0])
    behind = np.arange(gone + 1, 8)  # what comes before is fixed
    damped = np.vstack([x, np.sqrt(0.01 * np.mean(inputs.square_K)) * np.eye(8)])
    best = np.linalg.lstsq(damped[:, behind], damped[:, gone] * w[gone], rcond=None)[0]
    np.testing.assert_allclose(new[behind, 0], w[behind, 0] + best, rtol=1e-6)
    np.testing.assert_array_equal(new[:gone], w[:gone])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, None), "name one of"),
        ((0.5, "2:4"), "name one of"),
        ((1.5, None), "between 0 and 1"),
        ((None, "4:2"), "N:M, which keeps N weights"),
    ],
)
def test_a_target_that_is_none_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        sparsify.parse_target(*given)
    with pytest.raises(UserError, match="6 inputs, not a multiple of 4"):
        sparsify.check_shape("w", 6, TWO_FOUR)


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_is_pruned_and_trained_on_with_its_masks(whole, tmp_path, capsys):
    out = tmp_path / "pruned"
    asked = [str(whole), "--method", "sparsegpt", "--pattern", "2:4", "--out", str(out)]
    assert prune.main([*asked, "--sequences", "8"]) == 0
    assert f"by sparsegpt into {out}" in capsys.readouterr().out
    facts = json.loads((out / "prune.json").read_text())
    assert facts["before"]["bpb"] != facts["after"]["bpb"]
    assert set(facts["zeros"].values()) == {0.5}
    assert prune.main(asked) == 2
    assert "holds a model already" in capsys.readouterr().err
    wrapper = "[{name: fixed_masks}]"
    more = dict(train__init_from=out, optim__wrappers=wrapper, run__name="recovered")
    assert train(tiny.run_overrides(tmp_path, **more)) == 0
    begin, end = tiny.weights_of(out), tiny.weights_of(tmp_path / "recovered")
    assert tiny.rows_of(tmp_path / "recovered")[-1]["sparsity"] == 0.5
    for name in facts["zeros"]:
        np.testing.assert_array_equal(begin[name] == 0, end[name] == 0)
        assert (begin[name] != end[name]).any()
    del more["train__init_from"]
    assert train(tiny.run_overrides(tmp_path, **more | {"run__name": "none"})) == 2
    assert "train.init_from" in capsys.readouterr().err
