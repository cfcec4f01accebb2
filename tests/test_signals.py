"""The whole command stopped by signals: what is saved then, and that the same command goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import (
    QUICK,
    assert_same_run,
    on_one_device,
    rows_of,
    run_overrides,
    steps_of,
    whole_overrides,
)

from jaxtrain.main import main
from jaxtrain.runs.metrics import MetricsWriter

ROOT = Path(__file__).parents[1]

THIRTY = {"train__steps": 30, "eval__every": "null", "sample__every": "null"} | QUICK


def started(directory, gate, step, **changes):
    """The command in a process of its own, whose steps after `step` wait for the file `gate`."""
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "gated.py")]
    return subprocess.Popen(
        [*command, *run_overrides(directory, **THIRTY | changes)],
        cwd=ROOT, env=os.environ | {"GATE": str(gate), "GATE_STEP": str(step)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(process, condition):
    """Until the condition holds; fails if the process ends before."""
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    directory = tmp_path_factory.mktemp("long")
    with on_one_device():
        assert main(run_overrides(directory, **THIRTY, checkpoint__every=5)) == 0
    return directory / "tiny"


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(long, tmp_path):
    run_dir, changes = tmp_path / "tiny", {"checkpoint__every": "null"}
    process = started(tmp_path, tmp_path / "gate", 5, **changes)
    wait_for(process, lambda: run_dir.is_dir() and "loss" in metrics_text(run_dir))
    process.send_signal(signal.SIGTERM)
    (tmp_path / "gate").touch()
    out, err = process.communicate()
    assert process.returncode == 0, err
    (step,) = steps_of(run_dir)
    assert 0 < step < 30
    hint = out.partition(f"stopped  at step {step} of 30, saved; go on with:\n  ")[2].splitlines()[
        0
    ]
    assert " train run.directory=" in hint
    assert f"run.directory={tmp_path}" in out
    assert rows_of(run_dir, "event")[-1]["status"] == "stopped"
    assert (run_dir / "report.html").is_file()
    assert main(run_overrides(tmp_path, **THIRTY | changes)) == 0
    assert_same_run(run_dir, long)


INTERRUPT = pytest.param(signal.SIGINT, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, INTERRUPT], ids=lambda n: n.name)
def test_a_signal_stops_after_the_step_in_hand(whole, tmp_path, monkeypatch, number):
    real = MetricsWriter.push

    def push(self, step, values):
        if step == 4:
            os.kill(os.getpid(), number)
        return real(self, step, values)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "push", push)
        assert main(whole_overrides(tmp_path / "tiny")) == 0
    assert steps_of(tmp_path / "tiny") == [3, 4]
    assert not (tmp_path / "tiny" / "model").exists()
    assert main(whole_overrides(tmp_path / "tiny")) == 0
    assert_same_run(tmp_path / "tiny", whole)


@pytest.mark.slow
def test_a_second_signal_is_final(tmp_path, monkeypatch, capsys):
    def push(self, step, values):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(MetricsWriter, "push", push)
    # A shell that starts the tests in the background makes them ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(whole_overrides(tmp_path / "tiny")) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert "the same command resumes" in capsys.readouterr().err
    assert rows_of(tmp_path / "tiny", "event")[-1]["status"] == "interrupted"


def metrics_text(run_dir):
    file = run_dir / "metrics.jsonl"
    return file.read_text() if file.is_file() else ""


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_sigkill_in_the_middle_of_a_save_resumes_from_the_checkpoint_before(long, tmp_path):
    run_dir = tmp_path / "tiny"
    process = started(tmp_path, tmp_path / "gate", 5, checkpoint__every=1)
    # The folder of a checkpoint appears under another name first, and is filled then.
    fourth = re.compile(r"4(\D.*)?").fullmatch
    wait_for(process, lambda: any(map(fourth, names_in(run_dir))))
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert 2 <= max(steps_of(run_dir)) <= 5
    assert main(run_overrides(tmp_path, **THIRTY, checkpoint__every=5)) == 0
    assert_same_run(run_dir, long)
    assert all(name.isdigit() for name in names_in(run_dir))  # no remains


def names_in(run_dir):
    folder = run_dir / "checkpoints"
    return [p.name for p in folder.iterdir()] if folder.is_dir() else []
