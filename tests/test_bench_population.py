"""The benchmark of populations: its models, its record and its table."""

import importlib
import json

import jax
import pytest
from tiny import QUICK, assignments

from benchmarks import population, tables
from benchmarks.population import configuration
from jaxtrain.estimate.workload import load_workload

main = importlib.import_module("benchmarks.__main__").main
TINY = ["train.batch_size=4", "train.sequence_length=16", "model.width=32", "model.head_dim=8",
        "data.tokenizer.name=bytes", *assignments(**QUICK)]  # fmt: skip


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


@pytest.mark.parametrize("depth", [4, 6])
def test_its_models_are_those_of_the_verdicts(depth):
    name, overrides = configuration(None, depth)
    w = load_workload(name, overrides)
    assert (w.config.model.depth, w.config.model.width) == (depth, 64 * depth)
    assert (w.tokens, w.config.model.attention, w.vocab_size) == (32 * 512, "xla", 8192)


@pytest.mark.slow
def test_a_record_has_both_sides_and_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(population, "WINDOW_SECONDS", 0.01)
    monkeypatch.setattr(population, "PAIRS", 2)
    ask = ["population", "--config", "quickstart", "--depth", "1", "--note", "a test"]
    ask += ["--steps", "10", *TINY, "--members", "1", "3"]
    assert main([*ask, "--record", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert (record["config"], record["note"], record["steps"]) == (
        "quickstart_depth1",
        "a test",
        10,
    )
    assert [row["members"] for row in record["rows"]] == [1, 3]
    row = record["rows"][1]
    assert row["ratio_lowest"] <= row["ratio"] <= row["ratio_highest"]
    assert row["error"] < 1e-4 and row["peak_bytes"] > row["peak_bytes_alone"]
    assert tables.tabulate("population", [record], [])[1][1][1] == "3 members"
