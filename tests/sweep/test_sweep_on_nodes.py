"""`sweep --ray`: workers on nodes of a cluster, and another in the place of one that is lost."""

import json
import subprocess
import sys
from contextlib import nullcontext
from typing import ClassVar

import pytest
from sweep_cases import no_runs, write_sweep

from jaxtrain.sweep import command


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


@pytest.mark.slow
def test_a_sweep_on_a_cluster_of_this_host_comes_to_its_end(tmp_path):
    """What it finds is what a sweep in one process finds."""
    path = write_sweep(tmp_path, trials=3)
    assert command.main([str(path), "name=host"]) == 0
    line = [sys.executable, "-m", "jaxtrain.cli", "sweep", str(path), "name=nodes", "workers=2"]
    line += ["--ray", "local"]
    said = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "best trials" in said.stdout and "a worker died" not in said.stderr
    folders = [tmp_path / "runs" / name for name in ("host", "nodes")]
    host, nodes = (json.loads((folder / "results.json").read_text()) for folder in folders)
    figures = [[(row["number"], row["state"], row["values"], row["scores"])
                for row in found["trials"]] for found in (host, nodes)]  # fmt: skip
    assert figures[0] == figures[1] and [row[1] for row in figures[0]] == ["finished"] * 3
