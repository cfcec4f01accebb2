"""`sweep --ray`: workers on nodes of a cluster, and another in the place of one that is lost."""

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from typing import ClassVar

import pytest
from sweep_cases import ADAMW, RATE, no_runs, write_sweep

from jaxtrain.sweep import command
from jaxtrain.sweep.load import load_sweep


class Worker(command.RemoteProcess):
    """A worker that runs here when it is asked whether it has ended; the first one is lost."""

    begun: ClassVar = []

    def __init__(self, module, arguments, gpus):
        self.returncode, self.line = None, (module, arguments, gpus)
        Worker.begun.append(self)

    def poll(self, timeout=0):
        lost = self is Worker.begun[0]
        self.returncode = -9 if lost else command.main(self.line[1])
        return self.returncode

    def kill(self):
        pass


@pytest.mark.slow
def test_another_worker_takes_the_place_of_a_lost_one(tmp_path, monkeypatch, capsys):
    seen = no_runs(monkeypatch)
    monkeypatch.setattr(Worker, "begun", [])
    monkeypatch.setattr(command, "RemoteProcess", Worker)
    monkeypatch.setattr(command, "gpus_of_cluster", lambda: 8)
    monkeypatch.setattr(command, "ray_cluster", lambda address, show: nullcontext())
    words = [str(write_sweep(tmp_path, workers=2)), "--ray", "auto"]
    assert command.main(words) == 0
    line = ("jaxtrain.sweep.command", [*words, "--worker"], 1)
    assert [worker.line for worker in Worker.begun] == [line] * 3 and sorted(seen) == [0, 1, 2]
    assert "a worker died (exit code -9)" in capsys.readouterr().err
    found = json.loads((tmp_path / "runs" / "lr" / "results.json").read_text())
    assert [row["state"] for row in found["trials"]] == ["finished"] * 3


class Waiting(command.RemoteProcess):
    """A worker that has a core when all others have ended, and then stops as it was told."""

    begun: ClassVar = []

    def __init__(self):
        self.returncode, self.told = None, 0
        Waiting.begun.append(self)

    def poll(self, timeout=0):
        assert timeout is not None, "waited for what cannot begin"
        others = [one for one in Waiting.begun if one is not self and one.returncode is None]
        if self.told and (self is not Waiting.begun[0] or not others):
            self.returncode = -self.told
        return self.returncode

    def send_signal(self, number):
        self.told = number

    def kill(self):
        pass

    def terminate(self):
        self.told = signal.SIGTERM


def test_a_signal_ends_workers_that_have_just_begun(tmp_path, monkeypatch):
    """They die of it, as they do not catch it yet; none begins in their place."""
    monkeypatch.setattr(Waiting, "begun", [])
    monkeypatch.setattr(command.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    c = load_sweep(write_sweep(tmp_path, workers=2), [])
    assert command.supervise(c, Waiting) == 130 and len(Waiting.begun) == 2


def test_an_interrupt_ends_workers_that_wait_for_a_core(tmp_path, monkeypatch):
    sleeps = iter([KeyboardInterrupt])

    def sleep(_):
        for error in sleeps:
            raise error

    monkeypatch.setattr(Waiting, "begun", [])
    monkeypatch.setattr(command.time, "sleep", sleep)
    c = load_sweep(write_sweep(tmp_path, workers=3), [])
    with pytest.raises(KeyboardInterrupt):
        command.supervise(c, Waiting)
    assert [one.returncode for one in Waiting.begun] == [-signal.SIGINT] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_sweep_on_a_cluster_of_this_host_comes_to_its_end(tmp_path):
    """What it finds is what a sweep in one process finds."""
    path = write_sweep(tmp_path, trials=2, parameters=RATE)
    assert command.main([str(path), "name=host", ADAMW]) == 0
    line = [sys.executable, "-m", "jaxtrain.cli", "sweep", str(path), "name=nodes", "workers=1"]
    line += [ADAMW, "--ray", "local"]
    said = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "best trials" in said.stdout and "a worker died" not in said.stderr
    folders = [tmp_path / "runs" / name for name in ("host", "nodes")]
    host, nodes = (json.loads((folder / "results.json").read_text()) for folder in folders)
    figures = [[(row["number"], row["state"], row["values"], row["scores"])
                for row in found["trials"]] for found in (host, nodes)]  # fmt: skip
    assert figures[0] == figures[1] and [row[1] for row in figures[0]] == ["finished"] * 2


def test_a_worker_on_a_node_without_the_folder_begins_no_sweep_of_its_own(tmp_path, capsys):
    words = [str(write_sweep(tmp_path)), "--ray", "auto", "--worker"]
    assert command.main(words) == 2
    said = capsys.readouterr().err
    assert "has no folder" in said and "on a disk that all nodes share" in said
    assert said.count("\n") == 1 and not (tmp_path / "runs" / "lr").exists()
