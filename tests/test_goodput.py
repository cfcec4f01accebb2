import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import QUICK, run_overrides

from jaxtrain.main import main
from jaxtrain.runs import goodput as module
from jaxtrain.runs import metrics
from jaxtrain.runs.config import MetricsConfig
from jaxtrain.runs.goodput import DATA, LOST, PRODUCTIVE, REST, goodput
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.metrics import MetricsWriter
from jaxtrain.runs.report import write_report


class Clock:
    """One clock for what runs, and for what a run is told of the time of day."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        fake = SimpleNamespace(perf_counter=lambda: self.now, time=lambda: 1e9 + self.now)
        monkeypatch.setattr(metrics, "time", fake)
        monkeypatch.setattr(module, "time", fake)

    def session(self, run_dir, start, startup=7.0, every=1):
        """A writer whose session began `startup` seconds before."""
        began, self.now = self.now, self.now + startup
        config = MetricsConfig(every=every, tensorboard=False, wandb=False)
        more = {"total_steps": 20, "tokens_per_step": 8, "began": began}
        return MetricsWriter(run_dir, config, start_step=start, **more)

    def steps(self, writer, first, last, seconds=2.0, wait=0.5):
        for step in range(first, last + 1):
            self.now += seconds
            writer.push(step, {"loss": 1.0, "wait_s": wait})

    def kill(self, writer):
        """What is written stays, and no end is."""
        writer._file.close()

    def pause(self, writer, kind, seconds):
        with writer.pause(kind):
            self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def found_in(run_dir):
    rows = read_rows(run_dir / "metrics.jsonl")
    found = goodput(rows)
    assert found is not None
    assert sum(found.parts.values()) == pytest.approx(found.seconds, abs=0.003)  # rows have ms
    return found, {name: round(seconds, 3) for name, seconds in found.parts.items() if seconds}


def test_a_session_says_where_its_time_went(tmp_path, clock):
    with clock.session(tmp_path, 0) as writer:
        clock.steps(writer, 1, 10)
        clock.pause(writer, "validation_s", 5)
        clock.pause(writer, "checkpoint_s", 3)
        clock.steps(writer, 11, 20)
        clock.pause(writer, "samples_s", 4)
        clock.pause(writer, "validation_s", 6)
    found, parts = found_in(tmp_path)
    assert parts == {
        PRODUCTIVE: 19 * 1.5, DATA: 19 * 0.5, "start and compilation": 7 + 2, "validation": 11,
        "samples": 4, "checkpoints, while the run waits": 3,
    }  # fmt: skip
    assert found.seconds == clock.now and found.share == pytest.approx(28.5 / clock.now)
    assert (found.lost_steps, found.idle, found.sessions) == (0, 0.0, 1)


def test_steps_after_the_last_checkpoint_of_a_killed_session_are_lost(tmp_path, clock):
    killed = clock.session(tmp_path, 0)
    clock.steps(killed, 1, 8)
    clock.pause(killed, "checkpoint_s", 3)  # of step 8, and then
    clock.steps(killed, 9, 12)
    clock.kill(killed)
    clock.now += 100  # nobody there
    with clock.session(tmp_path, 8) as writer:
        clock.steps(writer, 9, 20)
    found, parts = found_in(tmp_path)
    # Lost: four steps, and the checkpoint, which is logged with the step after it.
    assert parts[LOST] == 4 * 2 + 3 and found.lost_steps == 4
    assert parts[PRODUCTIVE] == (7 + 11) * 1.5 and parts[DATA] == (7 + 11) * 0.5
    assert parts["start and compilation"] == 2 * (7 + 2)
    assert found.idle == 100 and found.sessions == 2
    assert found.seconds + found.idle == clock.now
    page = write_report(tmp_path).read_text()
    assert "<h2>Goodput</h2>" in page and "4 steps were lost and computed again" in page
    assert "idle for 1m40s" in page and f"<b>{found.share:.1%}</b>" in page


def test_steps_that_a_checkpoint_kept_between_two_rows_are_not_lost(tmp_path, clock):
    killed = clock.session(tmp_path, 0, every=5)
    clock.steps(killed, 1, 10)
    clock.kill(killed)
    with clock.session(tmp_path, 7, every=5) as writer:
        clock.steps(writer, 8, 20)
    found, parts = found_in(tmp_path)
    assert found.lost_steps == 3 and parts[LOST] == 3 * 2  # of 8, 9 and 10
    assert parts[PRODUCTIVE] == 4 * 1.5 + 2 * 2 + 12 * 1.5  # 6 and 7 by their share
    assert found.seconds == clock.now


def test_a_run_killed_before_its_first_checkpoint_has_lost_everything(tmp_path, clock):
    for _ in range(2):
        killed = clock.session(tmp_path, 0)
        clock.steps(killed, 1, 5)
        clock.kill(killed)
        clock.now += 30
    with clock.session(tmp_path, 0) as writer:
        clock.steps(writer, 1, 20)
    found, parts = found_in(tmp_path)
    assert found.lost_steps == 10 and parts[LOST] == 2 * (7 + 5 * 2) and found.idle == 60
    assert found.seconds + found.idle == clock.now


@pytest.mark.parametrize("back", [5, 15])  # the session began at 10
def test_a_rollback_loses_the_steps_that_it_takes_back(tmp_path, clock, back):
    with clock.session(tmp_path, 0) as writer:
        clock.steps(writer, 1, 10)
    clock.now += 50
    with clock.session(tmp_path, 10) as writer:
        clock.steps(writer, 11, 17)
        clock.now += 1  # to restore
        writer.write(back + 1, "event", {"rollback": "nan"} | writer.rewind(back))
        clock.steps(writer, back + 1, 20)
    found, parts = found_in(tmp_path)
    assert found.lost_steps == 17 - back
    assert parts[LOST] == (2 * 2 + 1 if back == 15 else 5 * 2 + 7 + 7 * 2 + 1)
    assert found.seconds + found.idle == clock.now and found.idle == 50 and REST not in parts
    clock.now += 9
    with clock.session(tmp_path, 20):
        pass
    assert found_in(tmp_path)[0].idle == 59


def test_a_run_of_before_has_none(tmp_path):
    rows = [{"step": 0, "kind": "event", "time": 0.0, "event": "start", "total_steps": 1}]
    assert goodput(rows) is None
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert "Goodput" not in write_report(tmp_path).read_text()


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed(tmp_path):
    run_dir, arguments = (
        tmp_path / "tiny",
        run_overrides(tmp_path, train__steps=8, eval__every=2, **QUICK),
    )
    killed = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("gated.py")), *arguments],
        env=os.environ | {"GATE": str(tmp_path / "never"), "GATE_STEP": "5"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    there = lambda: (run_dir / "metrics.jsonl").is_file() and (run_dir / "checkpoints/3").is_dir()
    while not (there() and read_rows(run_dir / "metrics.jsonl")[-1]["step"] == 5):
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert main(arguments) == 0
    found, parts = found_in(run_dir)
    assert found.lost_steps == 2 and parts[LOST] > 0 and found.sessions == 2
    assert parts[PRODUCTIVE] > 0 and parts["validation"] > 0 and 0 < found.share < 1
    assert found.idle > 0 and parts.get(REST, 0.0) < 0.1 * found.seconds
