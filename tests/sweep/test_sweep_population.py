"""Trials that train at once as one population."""

import json

import pytest
from sweep_cases import ADAMW, RATE, write_sweep

from jaxtrain.sweep.command import main

pytestmark = pytest.mark.usefixtures("one_device")  # as a population trains on one


@pytest.mark.slow
def test_trials_of_a_population_are_run_directories_of_their_own(tmp_path, capsys):
    path = write_sweep(tmp_path, parameters=RATE, trials=3, seeds=2, population=2)
    assert main([str(path), "train.steps=3", "mesh.data=1", ADAMW]) == 0
    folder = tmp_path / "runs" / "lr"
    found = json.loads((folder / "results.json").read_text())["trials"]
    assert [row["state"] for row in found] == ["finished"] * 3
    assert len({row["scores"][0] for row in found}) == 3
    logs = sorted(path.parent.name for path in folder.glob("*/train.log"))
    assert logs == ["trial-0000-seed1", "trial-0002-seed1"]  # of two and one trials
    assert len([*folder.glob("trial-*-seed?/metrics.jsonl")]) == 6
    assert (
        main([str(path), "train.steps=3", "mesh.data=1", ADAMW]) == 0
        and "best trials" in capsys.readouterr().out
    )


def test_what_members_may_not_differ_in_stops_the_sweep(tmp_path, capsys):
    depth = {"train.z_loss": {"name": "choice", "values": [0.0, 1e-4]}}
    sampler = {"name": "grid"}
    path = write_sweep(tmp_path, parameters=depth, sampler=sampler, trials=None, population=2)
    assert main([str(path), "mesh.data=1"]) == 2
    assert "train.z_loss: trial-0001-seed1 has 0.0001" in capsys.readouterr().err
