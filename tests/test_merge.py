"""`jaxtrain merge`: the arithmetic of each method by hand, and models of a real run."""

import numpy as np
import pytest

from jaxtrain.runs import merge
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten

A, B = np.array([[3.0, 0.0], [0.0, 4.0]]), np.array([[0.0, 5.0], [0.0, 0.0]])


def test_the_mean_is_weighted():
    np.testing.assert_allclose(merge.mean([1.0, 1.0])([A, B]), (A + B) / 2)
    np.testing.assert_allclose(merge.mean([3.0, 1.0])([A, B]), 0.75 * A + 0.25 * B)


def test_slerp_stays_on_the_arc():
    """Half of the way between two orthogonal arrays both have the weight sin 45 degrees."""
    np.testing.assert_allclose(merge.slerp(0.5)([A, B]), np.sqrt(0.5) * (A + B))
    np.testing.assert_allclose(merge.slerp(0.0)([A, B]), A)
    np.testing.assert_allclose(merge.slerp(1.0)([A, B]), B, atol=1e-12)
    np.testing.assert_allclose(merge.slerp(0.25)([A, 2 * A]), 1.25 * A)
    zeros = np.zeros((2, 2))
    np.testing.assert_array_equal(merge.slerp(0.25)([zeros, zeros]), zeros)


def test_ties_trims_elects_and_averages():
    base = np.array([1.0, 1.0, 1.0, 1.0])
    first = base + [4.0, 0.1, -2.0, 0.0]  # its two largest changes are kept
    second = base + [2.0, 0.0, 6.0, 0.1]
    found = merge.ties([1.0, 1.0], 0.5, 1.0)([base, first, second])
    # Both raise the first; the third is raised by the heavier sign alone, and not averaged with 0.
    np.testing.assert_allclose(found, base + [3.0, 0.0, 6.0, 0.0])
    doubled = merge.ties([1.0, 1.0], 0.5, 2.0)([base, first, second])
    np.testing.assert_allclose(doubled - base, 2 * (found - base))
    np.testing.assert_array_equal(merge.ties([1.0, 1.0], 0.5, 1.0)([base, base, base]), base)
    heavy = merge.ties([9.0, 1.0], 0.5, 1.0)([base, first, second])
    np.testing.assert_allclose(heavy, base + [3.8, 0.0, -2.0, 0.0])


def test_checkpoints_of_a_run_become_one(whole, tmp_path, capsys):
    early, late = (flatten(load_saved(whole, step).params) for step in (3, 6))
    command = [f"{whole}@3", f"{whole}@6", "--weights", "1", "3", "--out"]
    assert merge.main([*command, str(tmp_path / "mean")]) == 0
    assert "merged   2 models by mean" in capsys.readouterr().out
    found = flatten(load_saved(tmp_path / "mean").params)
    for name, x in found.items():
        assert x.dtype == np.asarray(late[name]).dtype
        wanted = 0.25 * np.float64(early[name]) + 0.75 * np.float64(late[name])
        np.testing.assert_allclose(np.float64(x), wanted, rtol=1e-6, atol=1e-9)
    ties = [str(whole), "--method", "ties", "--base", f"{whole}@3", "--density", "1", "--out"]
    assert merge.main([*ties, str(tmp_path / "ties")]) == 0
    again = flatten(load_saved(tmp_path / "ties").params)
    np.testing.assert_allclose(again["embed"], late["embed"], rtol=1e-5, atol=1e-7)
    assert merge.main([*ties, str(tmp_path / "ties")]) == 2
    assert "holds a model already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN"], "name two models or more"),
        (["RUN", "RUN", "--weights", "1"], "--weights has 1 numbers for 2 models"),
        (["RUN", "RUN", "--weights", "1", "-1"], "must be a number above 0"),
        (["RUN", "RUN", "RUN", "--method", "slerp"], "slerp merges two models, not 3"),
        (["RUN", "RUN", "--method", "ties"], "ties needs --base"),
        (["RUN", "RUN", "--base", "RUN"], "--base applies only to --method ties"),
        (["RUN", "RUN@5"], "no checkpoint of step 5; there are 3, 6"),
    ],
)
def test_what_cannot_be_merged_is_one_line(whole, tmp_path, capsys, arguments, message):
    named = [a.replace("RUN", str(whole)) for a in arguments]
    assert merge.main([*named, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_models_of_other_structures_are_refused(whole):
    model = load_saved(whole)
    wider = model.config.model.model_copy(update={"qk_scale": 3.0})
    other = model._replace(config=model.config.model_copy(update={"model": wider}))
    with pytest.raises(
        UserError, match=r"b has model.qk_scale 3.0, a 1.2; only models of the same"
    ):
        merge.merged([model, other], ["a", "b"], merge.mean([1.0, 1.0]))
