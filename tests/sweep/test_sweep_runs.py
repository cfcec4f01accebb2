"""Real trials of tiny runs: run directories, pruning, divergence, fresh seeds, killed workers."""

import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from sweep_cases import ADAMW, RATE, open_sweep, rows_now, write_sweep

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.runs.history import read_rows
from jaxtrain.sweep import work
from jaxtrain.sweep.command import main
from jaxtrain.sweep.trials import PruneEvent
from jaxtrain.train.step import State
from jaxtrain.train.stop_signal import StopSignal


def events_of(run_dir):
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "event"]


def test_what_is_worse_stops_after_the_step_in_hand():
    event, stop, rows = object.__new__(PruneEvent), StopSignal(Coordinator()), []
    event.prune, event.stopped, event.stop = lambda step, last: last["bpb"] > 2, [], stop
    event.metrics = SimpleNamespace(write=lambda *row: rows.append(row))
    state = State({}, {}, jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), {})
    for step, bpb, stops in ((2, 1.0, False), (4, 3.0, True)):
        event.evaluator = SimpleNamespace(last={"bpb": bpb})
        event.run(step, state)
        assert (stop.wanted, bool(event.stopped), bool(rows)) == (stops,) * 3
    assert event.stopped == [4] and rows[0][:2] == (4, "event")


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_sweep_prunes_notes_what_diverges_and_runs_the_best_on_fresh_seeds(tmp_path, capsys):
    rates = {"optim.learning_rate": {"name": "choice", "values": [3e-3, 1e-12, 1e30]}}
    path = write_sweep(
        tmp_path, parameters=rates, sampler={"name": "grid"}, trials=None,
        pruner={"name": "median", "startup_trials": 1},
        confirm={"best": 1, "seeds": 2, "baseline": False},
    )  # fmt: skip
    words = [str(path), "optim.name=adamw", "model.logit_softcap=null", "eval.every=2"]
    assert main(words) == 0
    folder = tmp_path / "runs" / "lr"
    found = json.loads((folder / "results.json").read_text())
    states = {row["values"]["optim.learning_rate"]: row["state"] for row in found["trials"]}
    assert states == {3e-3: "finished", 1e-12: "pruned", 1e30: "failed"}
    good, pruned, bad = (folder / f"trial-000{i}-seed1" for i in range(3))
    [row] = [row for row in events_of(pruned) if "pruned" in row]
    assert row["step"] < 6 and events_of(pruned)[-1]["status"] == "stopped"
    assert found["trials"][1]["note"] == f"pruned at step {row['step']}"
    run = found["trials"][0]["runs"]["1"]
    assert run["seconds"] > 0 and run["tokens_per_s"] > 0 and run["peak_bytes"] > 1e6
    assert found["trials"][0]["scores"] == [run["bpb"]]
    assert "step" in found["trials"][2]["note"] and "DivergedError" in events_of(bad)[-1]["status"]
    assert events_of(good)[-1]["status"] == "finished" and (good / "report.html").is_file()
    assert "train " in (good / "train.log").read_text()
    [best] = found["confirmed"]
    fresh = [read_rows(folder / f"confirm-0000-seed{s}" / "metrics.jsonl") for s in (2, 3)]
    scores = [[r for r in rows if r["kind"] == "validation"][-1]["bpb"] for rows in fresh]
    assert best["fresh"]["mean"] == pytest.approx(sum(scores) / 2) and scores[0] != scores[1]
    assert best["optimism"] == pytest.approx(best["fresh"]["mean"] - best["searched"])
    page = (folder / "report.html").read_text()
    for word in ("winner's curse", "<svg", "trial 0", "pruned at step", "over learning_rate"):
        assert word in page, word
    assert "http" not in page.replace("http-equiv", "")
    out = capsys.readouterr().out
    assert "sweep    3/3 trial 2: step" in out and "best trials" in out
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl"))
    assert main(words) == 0  # nothing is left, and nothing runs
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")) == before


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_stopped_run_goes_on_in_its_directory(tmp_path, monkeypatch):
    """A signal in the middle of a trial; the same command resumes its checkpoint."""
    path = write_sweep(tmp_path, trials=1)
    c, queues = open_sweep(path)
    after = StopSignal.after
    monkeypatch.setattr(StopSignal, "after", lambda self, step: step == 3 or after(self, step))
    with pytest.raises(KeyboardInterrupt):
        work.work(c, queues)
    assert [row.state for row in rows_now(queues)] == ["waiting"]
    monkeypatch.setattr(StopSignal, "after", after)
    work.work(c, queues)
    assert [row.state for row in rows_now(queues)] == ["finished"]
    queues.close()
    starts = [row for row in events_of(tmp_path / "runs/lr/trial-0000-seed1") if "event" in row]
    assert [row["step"] for row in starts if row["event"] == "start"] == [0, 3]


def test_a_fault_of_every_run_stops_the_sweep_and_spends_no_trial(tmp_path, capsys):
    path = write_sweep(tmp_path)
    assert main([str(path), "data.train.path=missing.txt"]) == 2
    assert "missing.txt" in capsys.readouterr().err
    _, queues = open_sweep(path, "data.train.path=missing.txt")
    assert [row.state for row in rows_now(queues)] == ["waiting"] * 3
    queues.close()


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_killed_worker_loses_nothing(tmp_path, capfd):
    """SIGKILL in the middle of a trial: another one takes its place, and the trials stay."""
    steps = ["train.steps=12", "checkpoint.every=2", ADAMW]
    path = write_sweep(tmp_path, trials=2, parameters=RATE)
    assert main([str(path), "name=whole", *steps]) == 0
    run_dir = tmp_path / "runs" / "killed" / "trial-0000-seed1"

    def kill():
        wait_for(lambda: (run_dir / "checkpoints" / "4").is_dir())
        os.kill(worker_of(run_dir), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert main([str(path), "name=killed", *steps, "workers=2"]) == 0
    killer.join()
    errors = capfd.readouterr().err
    assert "a worker died" in errors and "queued again" in errors
    whole, killed = (
        json.loads((tmp_path / "runs" / name / "results.json").read_text())["trials"]
        for name in ("whole", "killed")
    )
    assert [(t["number"], t["values"], t["state"]) for t in whole] == [
        (t["number"], t["values"], t["state"]) for t in killed
    ]
    assert [t["scores"] for t in whole] == [t["scores"] for t in killed]  # bit for bit
    starts = [row for row in events_of(run_dir) if row.get("event") == "start"]
    assert len(starts) == 2 and starts[1]["step"] >= 4


def worker_of(run_dir):
    """The process that trains a run."""
    lock, *_ = run_dir.glob("lock.*")
    return json.loads(lock.read_text())["pid"]


def wait_for(found):
    """Until a function gives something."""
    for _ in range(6000):
        if found():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")
