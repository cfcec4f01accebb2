"""train.autofreeze: layers freeze by the change of their gradient norms, and the run resumes."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from test_train import refused
from tiny import (
    FEW_PARTS,
    QUICK,
    assignments,
    batch,
    begin_random,
    build,
    byte_model,
    close,
    forget_end,
    make_spec,
    mesh_of,
    on_one_device,
    random_params,
    rows_of,
    run_overrides,
    same,
    weights_of,
)

from jaxtrain.estimate.dry_run import preflight
from jaxtrain.estimate.dry_run_report import report
from jaxtrain.finetune.partition import flatten
from jaxtrain.main import main
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.saved import load_saved
from jaxtrain.train.autofreeze import AutoFreezeNorms, converged
from jaxtrain.train.config import AutoFreeze
from jaxtrain.train.gradient_statistics import layer_squares
from jaxtrain.train.step import make_step
from jaxtrain.train.transforms import StepOutcome

FREEZING = QUICK | {
    "train__autofreeze": "{every: 2, percentile: 90, max_layers: 2}", "model__depth": 3,
    "train__steps": 8, "checkpoint__every": 1, "checkpoint__keep": 9, "data__workers": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "percentile", "count"),
    [
        ([0.1, 0.2, 0.9, 0.3], 50.0, 2),
        ([0.9, 0.1, 0.2, 0.3], 50.0, 0),  # what is under a layer that moves goes on
        ([0.1, 0.2, 0.9, 0.3], 90.0, 2),
        ([0.1, 0.2, 0.3, 0.9], 90.0, 3),
        ([0.2, 0.2, 0.2], 50.0, 0),
        ([0.1], 50.0, 0),
    ],
)
def test_layers_below_the_percentile_converge_from_the_bottom_up(changes, percentile, count):
    assert converged(np.array(changes), percentile)[0] == count


def test_norms_are_of_whole_intervals_and_of_finite_steps():
    transform = AutoFreezeNorms(AutoFreeze.model_validate({"every": 2}), 2)
    state = transform.init({}, {})
    seen = [([1, 4], True), ([7, 4], True), ([np.nan, 1], False), ([9, 16], True), ([1, 1], True)]
    for squares, finite in seen:
        given = jnp.array(squares, jnp.float32)
        outcome = StepOutcome(jnp.float32(0), jnp.float32(0), jnp.array(finite), lambda x=given: x)
        state = transform.judge(state, outcome).state
    assert state.before_L.tolist() == [2, 2] and state.last_L.tolist() == [3, 4]
    assert state.sums_L.tolist() == [1, 1] and (int(state.finite), int(state.taken)) == (1, 1)


def test_a_layers_norm_is_of_all_its_parameters():
    _, _, specs, _ = build()
    grads = random_params(specs)
    blocks = [np.asarray(g) for g in flatten(grads["blocks"]).values()]
    expected = [sum((g[layer] ** 2).sum() for g in blocks if len(g) == 2) for layer in range(2)]
    np.testing.assert_allclose(layer_squares(grads, specs), expected, rtol=1e-5)


@pytest.mark.slow
def test_norms_are_the_same_on_eight_devices():
    spec, hyperparams = make_spec(
        **{key.removeprefix("model__"): x for key, x in FEW_PARTS.items()}
    )
    transform = AutoFreezeNorms(AutoFreeze.model_validate({"every": 1}), 2)
    spec = spec._replace(transforms=(transform,))
    found = []
    for mesh in (mesh_of(), mesh_of(data=2, fsdp=2, tensor=2)):
        step, state = make_step(spec, mesh), begin_random(spec, mesh)
        for seed in range(2):
            state, _ = step(state, batch(micro=8, seed=seed), hyperparams)
        found.append(state.extras["autofreeze"])
    assert np.all(np.asarray(found[0].last_L) > 0)
    close(*found, rtol=1e-4)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """A run whose lower layers freeze."""
    directory = tmp_path_factory.mktemp("frozen")
    with on_one_device():
        assert main(run_overrides(directory, **FREEZING)) == 0
    return directory / "tiny"


def test_a_run_whose_first_layer_freezes_says_so(tmp_path):
    freezing = {"train__autofreeze": "{every: 1, percentile: 90, max_layers: 1}"}
    fields = FREEZING | freezing | {"model__depth": 2, "train__steps": 4, "checkpoint__keep": 1}
    assert main(run_overrides(tmp_path, **fields)) == 0
    run = tmp_path / "tiny"
    ((at, layers), *_) = freezes(run)
    assert at >= 2 and layers == 1
    (said,) = [row["freeze"] for row in rows_of(run, "event") if "freeze" in row]
    assert "freeze: the gradient norms of layers 0 to " in said and "percentile 90" in said
    assert said in (run / "report.html").read_text()
    starts = [row for row in rows_of(run, "event") if row.get("event") == "start"]
    assert starts[-1]["flops_per_token"] < starts[0]["flops_per_token"]
    assert load_saved(run).config.model.frozen_layers == 1


def freezes(run):
    """(step, layers frozen) of each decision."""
    rows = read_rows(run / "metrics.jsonl")
    return [(row["step"], row["frozen_layers"]) for row in rows if "frozen_layers" in row]


@pytest.mark.slow
def test_layers_freeze_during_a_run_and_then_stand_still(frozen):
    found = freezes(frozen)
    assert found and found[0][0] >= 4 and found == sorted(found)
    last, layers = found[-1]
    at = lambda step: flatten(load_saved(frozen, step).params)
    (early, late), up = (at(last), at(8)), "blocks/ffn/up"
    assert np.array_equal(early[up][:layers], late[up][:layers])
    assert not np.any(np.all(early[up][layers:] == late[up][layers:], axis=(1, 2)))
    assert not np.any(np.all(at(1)[up] == early[up], axis=(1, 2)))
    counts = [load_saved(frozen, step).config.model.frozen_layers for step in (found[0][0], 8)]
    assert counts == [0, layers]


@pytest.mark.slow
def test_the_decision_is_in_the_metrics_and_in_the_report(frozen):
    (said, *_) = [row["freeze"] for row in rows_of(frozen, "event") if "freeze" in row]
    assert (
        "freeze: the gradient norms of layers 0 to 2 changed by" in said and "percentile 90" in said
    )
    assert said in (frozen / "report.html").read_text()
    starts = [row for row in rows_of(frozen, "event") if row.get("event") == "start"]
    assert starts[-1]["flops_per_token"] < starts[0]["flops_per_token"]


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("after", [-1, 0])
@pytest.mark.slow
def test_a_run_resumes_on_either_side_of_a_freeze(frozen, tmp_path, after):
    last = freezes(frozen)[0][0] + after
    copy = shutil.copytree(frozen, tmp_path / "tiny")
    forget_end(copy, *range(last + 1, 9))
    assert main(run_overrides(tmp_path, **FREEZING)) == 0
    same(weights_of(copy), weights_of(frozen))
    assert rows_of(copy) == rows_of(frozen) and freezes(copy) == freezes(frozen)


@pytest.mark.slow
def test_the_same_layers_freeze_on_another_mesh(frozen, tmp_path):
    mesh = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    assert main(run_overrides(tmp_path, **FREEZING, **mesh)) == 0
    assert freezes(tmp_path / "tiny") == freezes(frozen)
    losses = [[row["loss"] for row in rows_of(run)] for run in (frozen, tmp_path / "tiny")]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_what_does_not_go_with_it_is_refused(tmp_path, capfd):
    phases = FREEZING | {"train__phases": "[{until: 2, model: {frozen_layers: 1}}]"}
    assert "both say when the model changes" in refused(capfd, run_overrides(tmp_path, **phases))
    assert not (tmp_path / "tiny").exists()


@pytest.mark.slow
def test_the_dry_run_says_that_the_time_of_a_freeze_is_not_known():
    fields = ["train.autofreeze={}", "model.vocab_multiple=16", *assignments(**QUICK)]
    text = report(preflight(None, byte_model(32, *fields), 1, "H200"))
    assert "until layers freeze (train.autofreeze); when is not known before" in text
