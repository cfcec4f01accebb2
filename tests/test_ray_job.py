"""An elastic job on a Ray cluster, without a cluster: how many nodes, and what a loss leads to."""

import pickle
import signal
import time
from contextlib import nullcontext

import pytest

from jaxtrain.cluster import launch, ray_job, ray_worker
from jaxtrain.cluster.ray_job import Attempt, Bounds
from jaxtrain.settings import UserError


def test_a_number_of_nodes_divides_the_largest():
    bounds = Bounds(2, 12, 8)
    assert [bounds.count(n) for n in (0, 1, 2, 3, 5, 6, 7, 11, 12, 40)] == [
        0, 0, 2, 3, 4, 6, 6, 6, 12, 12,
    ]  # fmt: skip
    assert [Bounds(3, 4, 0).count(n) for n in (2, 3, 4)] == [0, 0, 4]


def test_bounds_are_one_number_or_two():
    assert ray_job.read_bounds("4") == (4, 4) and ray_job.read_bounds("2:8") == (2, 8)
    for text in ("0", "8:2", "2:", ":4", "x", "-1:2", ""):
        with pytest.raises(UserError, match=r"expected N, or LEAST:MOST, as in 2:8"):
            ray_job.read_bounds(text)


def test_arguments_of_this_host_and_of_a_cluster_are_apart(capsys):
    for words, line in {
        ("--",): "--processes is required; or --ray and --nodes",
        ("--ray", "auto", "--"): "--ray takes --nodes and --gpus",
        ("--ray", "auto", "--nodes", "2", "--processes", "2", "--"): "--ray takes --nodes and",
        ("--ray", "auto", "--nodes", "9:2", "--"): "--nodes 9:2: expected N, or LEAST:MOST",
    }.items():
        assert launch.main([*words]) == 2
        assert capsys.readouterr().err.startswith(f"error: {line}")


class Stage(ray_job.Job):
    """A cluster whose nodes change from attempt to attempt, and what each attempt comes to."""

    def __init__(self, monkeypatch, *scenes):
        self.scenes, self.started, self.stopped = [*scenes], [], []
        monkeypatch.setattr(ray_job, "ray_cluster", lambda address, show: nullcontext())
        monkeypatch.setattr(ray_job, "ready_nodes", lambda gpus: [*self.scenes[0][0]])
        monkeypatch.setattr(ray_job, "Job", self.start)
        for name in ("LOOK", "GROW", "SETTLE"):
            monkeypatch.setattr(ray_job, name, 0.0)

    def start(self, module, arguments, nodes, gpus):
        self.started.append([module, *arguments, *nodes])
        return self

    def ended(self, seconds):
        """It has, unless this scene is one in which only a signal ends it."""
        nodes, attempt = self.scenes[0]
        if attempt is None:
            self.scenes[0] = nodes, "asked"
            signal.raise_signal(signal.SIGTERM)
        return isinstance(attempt, Attempt)

    def stop(self, number):
        nodes, attempt = self.scenes[0]
        self.stopped.append(number)
        if attempt == "asked":
            self.scenes[0] = nodes, Attempt([0], set())

    def result(self, moved=False):
        attempt = self.scenes.pop(0)[1] if len(self.scenes) > 1 else self.scenes[0][1]
        return Attempt([0], set(), True) if moved else attempt

    def close(self):
        pass


def run(bounds):
    return ray_job.run_job("auto", bounds, "jaxtrain.main", ["--config", "x"])


def test_after_a_loss_the_job_runs_on_what_is_left_and_ends_with_its_code(monkeypatch, capsys):
    lost, done = Attempt([1], {"b"}), Attempt([0, 0], set())
    stage = Stage(monkeypatch, ("abcd", lost), ("acd", done))
    assert run(Bounds(1, 4, 8)) == 0
    line = ["jaxtrain.main", "--config", "x"]
    assert stage.started == [[*line, *"abcd"], [*line, *"ac"]]
    assert "of 4 nodes 1 lost; the job goes on from its last checkpoint" in capsys.readouterr().err


def test_what_fails_without_a_loss_is_not_repeated(monkeypatch):
    stage = Stage(monkeypatch, ("ab", Attempt([2, 2], set())))
    assert run(Bounds(2, 2, 8)) == 2 and len(stage.started) == 1


def test_the_job_moves_to_more_nodes(monkeypatch, capsys):
    stage = Stage(monkeypatch, ("ab", "grows"), ("abcd", Attempt([0], set())))
    monkeypatch.setattr(ray_job, "ready_nodes", lambda gpus: [*("abcd" if stage.started else "ab")])
    assert run(Bounds(1, 4, 8)) == 0
    assert [len(words) - 3 for words in stage.started] == [2, 4]
    assert stage.stopped == [signal.SIGTERM] and "of 2 nodes more are there" in (
        capsys.readouterr().err
    )


def test_a_signal_ends_all_processes(monkeypatch):
    stage = Stage(monkeypatch, ("ab", None))
    assert run(Bounds(2, 2, 8)) == 0 and stage.stopped == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_process_that_is_stopped_before_it_begins_does_not_begin():
    """As that of a node which had no core free."""
    process = ray_worker.JobProcess()
    process.signal(signal.SIGINT)
    begun = time.monotonic()
    reply = process.run(ray_worker.this_caller(), "http.server", ["0"])
    assert pickle.loads(reply) == (-signal.SIGINT, None) and time.monotonic() - begun < 5
    assert process.process is None
