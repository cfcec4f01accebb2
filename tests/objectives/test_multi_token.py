"""Multi-token prediction: against its sum over distances, within rows and documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from tiny import (
    PLAIN_MODEL,
    QUICK,
    batch,
    begin_random,
    build,
    make_spec,
    mesh_of,
    resolved,
    run_overrides,
)

from jaxtrain.main import main
from jaxtrain.objectives import LossOptions, ObjectiveConfig, make_objective
from jaxtrain.objectives.multi_token import ahead
from jaxtrain.objectives.next_token import next_token_loss
from jaxtrain.runs.history import read_rows
from jaxtrain.train.step import make_step

CONFIG = TypeAdapter(ObjectiveConfig).validate_python(
    {"name": "multi_token", "weights": [0.5, 0.25]}
)


def test_labels_further_on_stay_within_the_row_and_the_document():
    targets = jnp.arange(6)[None]
    weights = jnp.array([[1.0, 1, 0, 1, 1, 1]])
    segments = jnp.array([[1, 1, 1, 2, 2, 2]])
    later, counted = ahead(targets, weights, None, 1)
    np.testing.assert_array_equal(later[0], [1, 2, 3, 4, 5, 0])
    np.testing.assert_array_equal(counted[0], [1, 0, 1, 1, 1, 0])
    _, counted = ahead(targets, weights, segments, 2)
    np.testing.assert_array_equal(counted[0], [0, 0, 0, 1, 0, 0])


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.quick("True")
def test_the_loss_is_the_weighted_sum_over_distances(documents):
    _, graphdef, _, params = build(depth=1, document_mask=documents)
    one = jax.tree.map(jnp.asarray, batch(4))
    if documents:
        segments = jnp.repeat(jnp.array([[1] * 11 + [2] * 21]), 4, axis=0)
        one = one._replace(segments_BT=segments)
    objective = make_objective(CONFIG, LossOptions())
    loss, sums = objective.loss(graphdef, params, one, None, step=jnp.int32(0), key=None)
    expected = 0.0
    for distance, weight in enumerate((1.0, 0.5, 0.25)):
        targets, weights = ahead(one.targets_BT, one.weights_BT, one.segments_BT, distance)
        if distance == 0:
            targets, weights = one.targets_BT, one.weights_BT
        moved = one._replace(targets_BT=targets, weights_BT=weights)
        part = next_token_loss(graphdef, params, moved)
        name = "next" if distance == 0 else f"loss_ahead_{distance + 1}"
        np.testing.assert_allclose(sums[name], part, rtol=1e-6)
        expected += weight * part
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_step_is_the_same_in_microbatches():
    spec, hyperparams = make_spec(resolved(**PLAIN_MODEL | {"depth": 1}))
    spec = spec._replace(objective=make_objective(CONFIG, LossOptions()))
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        step = make_step(spec, mesh)
        runs = [step(begin_random(spec, mesh), batch(8, micro=m), hyperparams) for m in (8, 2)]
    (_, one), (_, many) = runs
    for name in ("loss", "loss_ahead_2", "loss_ahead_3", "grad_norm"):
        np.testing.assert_allclose(one[name], many[name], rtol=1e-4)


@pytest.mark.slow
def test_a_step_in_pipeline_stages_is_that_of_one_device():
    spec, hyperparams = make_spec(resolved(**PLAIN_MODEL))
    spec = spec._replace(objective=make_objective(CONFIG, LossOptions()))
    found = []
    for mesh in (mesh_of(), mesh_of(pipeline=2)):
        with jax.set_mesh(mesh):
            state = begin_random(spec, mesh)
            found.append(make_step(spec, mesh)(state, batch(8, micro=4), hyperparams)[1])
    for name in ("loss", "loss_ahead_2", "loss_ahead_3", "grad_norm"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-4)


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_logs_the_losses_further_on_and_validates_the_next_token(tmp_path):
    overrides = run_overrides(tmp_path, train__steps=2, objective__name="multi_token", **QUICK)
    assert main(overrides) == 0
    rows = read_rows(tmp_path / "tiny" / "metrics.jsonl")
    first = next(row for row in rows if row["kind"] == "train")
    assert first["loss"] == pytest.approx(first["loss_ahead_2"], abs=0.2)
    assert first["loss_ahead_3"] < first["loss_ahead_2"] * 1.05  # fewer labels count
    assert any(row["kind"] == "validation" and "bpb" in row for row in rows)
