"""The benches of runs that were not made: on paper, and of hosts that are simulated."""

import pytest

from benchmarks import at_scale, simulate
from benchmarks.at_scale import ASSUMED, GPUS, HOSTS, PRICES, RATES, rows_of


def test_a_run_on_paper_is_in_proportion_to_its_tokens():
    rates = dict.fromkeys(RATES, 1e6)
    one, ten = ({row["name"]: row for row in rows_of(n, rates, 10**9)} for n in (10**12, 10**13))
    assert all(ten[name]["hours"] == pytest.approx(10 * one[name]["hours"]) for name in one
               if "read" not in name and "process" not in name)  # fmt: skip
    training = one["training"]
    assert training["tokens_per_s"] == GPUS * 1e6 * ASSUMED["step_efficiency"]
    assert training["dollars"] == training["hours"] * GPUS * PRICES["gpu_hour"]
    assert one["tokenize"]["core_hours"] == pytest.approx(10**12 / 1e6 / 3600)
    assert one["blocks read by all hosts"]["terabytes"] == HOSTS * 4
    assert one["checkpoints to an object store"]["checkpoint_gb"] == 12


def test_a_rate_is_the_best_record_of_its_row():
    rate = at_scale.Rate("data", "jsonl", "a", "mb_per_s")
    record = lambda file, x: {"bench": "data", "config": "jsonl", "device_count": 4, "file": file,
                              "rows": [{"name": "a", "mb_per_s": x}, {"name": "b"}]}  # fmt: skip
    assert at_scale.rate_of([record("x", 1), record("y", 3)], rate) == (3.0, "y")
    with pytest.raises(at_scale.UserError, match="no record of data jsonl has mb_per_s"):
        at_scale.rate_of([record("x", 1)], rate._replace(row="b"))


@pytest.mark.slow
def test_processes_of_a_job_in_few_of_this_machine(monkeypatch):
    monkeypatch.setattr(simulate, "EACH", 3)
    monkeypatch.setattr(simulate, "BEATING", 0.1)
    monkeypatch.setattr(simulate, "FILES", 30)
    found = simulate.bench_simulate(["4"])
    meeting, sums = found["rows"]
    assert meeting["shape"] == "4 processes" and sums["shape"] == "30 files of 64 bytes"
    assert all(meeting[name] > 0 for name in ("meet_s", "compare_s", "stop_s", "cpu_s"))
    assert sums["list_bytes"] > 30 * 30
