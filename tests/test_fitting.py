"""Rows and remat that fit a device: what `train.fit` chooses, keeps and leaves alone."""

import json

import jax
import pytest
import yaml
from tiny import QUICK, run_overrides

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config import load_config
from jaxtrain.estimate import fit as fitting
from jaxtrain.main import main
from jaxtrain.settings import UserError

FIXED, LIMIT = 100, 1000
OF_A_ROW = {"none": 400, "dots": 150, "block": 40, "attention": 300}


@pytest.fixture
def measured(monkeypatch):
    """What was asked of the dry run, which needs FIXED and so much a row."""
    asked = []

    def preflight(name, overrides, devices, kind, memory):
        given = dict(line.split("=") for line in overrides)
        remat = given.get("model.remat", "none")
        rows = int(given.get("train.device_batch_size", 16))
        asked.append((remat, rows))
        total = FIXED + rows * OF_A_ROW[remat]
        metrics = {"total_bytes": total, "device_bytes": memory, "fits": total < 0.9 * memory}
        return {"metrics": metrics, "workload": {"remat": remat, "device_batch_size": rows}}

    monkeypatch.setattr(fitting, "preflight", preflight)
    return asked


@pytest.mark.parametrize(
    ("memory", "overrides", "chosen", "most"),
    [
        (10_000, [], ["model.remat=none"], 1),
        (3_000, [], ["model.remat=none", "train.device_batch_size=4"], 3),
        (600, [], ["model.remat=none", "train.device_batch_size=1"], 2),
        (400, [], ["model.remat=dots", "train.device_batch_size=1"], 4),
        (200, [], ["model.remat=block", "train.device_batch_size=1"], 6),
        (100, [], ["model.remat=block", "train.device_batch_size=1"], 4),  # nothing fits
        (3_000, ["model.remat=block"], [], 1),
        (800, ["train.device_batch_size=4"], ["model.remat=dots"], 2),
        (100, ["train.device_batch_size=4"], ["model.remat=block"], 3),
    ],
)
def test_the_first_remat_with_a_row_that_fits_then_the_most_rows(
    measured, memory, overrides, chosen, most
):
    more, record = fitting.choose(None, overrides, 1, "A100", memory)
    assert more == chosen
    assert record["metrics"]["fits"] == (memory != 100)
    assert len(measured) <= most
    line = fitting.line_of(record)
    assert ("too much" in line) == (memory == 100)
    rows = record["workload"]["device_batch_size"]
    assert line.startswith(f"train.device_batch_size={rows} model.remat=")


def test_what_is_given_wins_and_nothing_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(fitting, "ask", lambda *_: pytest.fail("a dry run begins"))
    both = ["train.fit=true", "train.device_batch_size=2", "model.remat=ffn"]
    config = load_config(None, both)
    assert fitting.fitted(None, both, config, Coordinator()) is config
    file = tmp_path / "c.yaml"
    file.write_text("train: {fit: true, device_batch_size: 2}\nmodel: {remat: ffn}\n")
    config = load_config(file)
    assert fitting.fitted(str(file), [], config, Coordinator()) is config


@pytest.mark.slow
def test_a_run_says_what_was_chosen_and_keeps_it_when_it_goes_on(tmp_path, monkeypatch, capfd):
    asked = []

    def ask(name, overrides, devices, kind, memory):
        asked.append((devices, kind))
        return ["model.remat=block", "train.device_batch_size=1"], "so it is"

    monkeypatch.setattr(fitting, "ask", ask)
    open_ = [
        x
        for x in run_overrides(tmp_path, train__fit=True, train__steps=1, **QUICK)
        if "device_batch" not in x
    ]
    assert main(open_) == 0
    assert "fit      so it is\n" in capfd.readouterr().out
    saved = yaml.safe_load((tmp_path / "tiny" / "config.yaml").read_text())
    assert (saved["model"]["remat"], saved["train"]["device_batch_size"]) == ("block", 1)
    assert main(open_) == 0
    assert asked == [(jax.device_count(), "CPU")]
    line = "train.device_batch_size=1 model.remat=block, as the run began"
    assert f"fit      {line}\n" in capfd.readouterr().out
    other = json.loads((tmp_path / "tiny" / "env.json").read_text()) | {"device_kind": "H100"}
    (tmp_path / "tiny" / "env.json").write_text(json.dumps(other))
    assert fitting.choice_of(tmp_path / "tiny") == {}


@pytest.mark.slow
def test_a_choice_of_the_dry_run_itself(whole):
    """In a process of its own, for two devices; so little memory that fewer rows are taken."""
    start = [f"train.init_from={whole}", "train.batch_size=2", "train.sequence_length=256"]
    more, line = fitting.ask(
        None, [*start, "optim.name=adamw", "train.steps=1"], 1, "T4", 13 * 2**18
    )
    assert more[-1] == "train.device_batch_size=1" and "too much" not in line
    with pytest.raises(UserError, match=r"train.fit: the dry run failed.*batch_size 5 does not"):
        fitting.ask(None, [*start[:1], "train.batch_size=5"], 2, "T4", 2**30)
