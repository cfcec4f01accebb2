"""Host work on a Ray cluster: the bytes of one host, whatever the nodes, and after losses."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from ray_cases import (
    FILTERS,
    Cluster,
    config,
    documents,
    drive,
    files_of,
    small_blocks,
    write_corpus,
    write_parquet,
    write_rows,
    yaml_of,
)
from tiny import QUICK, byte_model, random_run, rows_of, run_overrides

from jaxtrain.cli import main
from jaxtrain.cluster import ray_cluster as on_ray
from jaxtrain.cluster.ray_process import RemoteProcess
from jaxtrain.compress import calibrate
from jaxtrain.data import prepare
from jaxtrain.data.filters.filtered import filter_into
from jaxtrain.evaluation import score
from jaxtrain.evaluation.remote import RemoteModel
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    yield made
    made.process.communicate(timeout=60)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path)


@pytest.fixture
def small(monkeypatch):
    small_blocks(monkeypatch)


def test_a_store_has_the_same_bytes_after_a_node_was_killed(tmp_path, cluster, small):
    """Of a Parquet file, whose row groups are sent, without the text of an evaluation set."""
    corpus, filters = write_parquet(tmp_path, documents())
    killed = []

    def progress(stage, done, total):
        if stage == "tokens" and done > total / 3 and not killed:
            killed.append(cluster.ask("kill"))

    prepare(config(tmp_path / "host", corpus, filters))
    with on_ray.ray_cluster(cluster.address):
        c = config(tmp_path / "nodes", corpus, filters)
        prepare(c.model_copy(update={"dedup_memory": 1e-4}), progress=progress)  # six partitions
    assert killed == [2] and cluster.ask("add") == 3
    here, there = files_of(tmp_path / "host"), files_of(tmp_path / "nodes")
    assert here == there and sum(name.endswith("record") for name in here) > 3


def test_the_same_command_goes_on_after_its_process_was_killed(tmp_path, cluster, corpus, small):
    """Once while it filters, once while it tokenizes."""
    prepare(config(tmp_path / "host", corpus, FILTERS))
    words = ["prepare", "--config", yaml_of(tmp_path, corpus), "data.cache_dir=cache"]
    words += ["--ray", cluster.address]
    for dies in ("_save", "_commit"):
        assert drive(tmp_path, dies, *words).returncode == -signal.SIGKILL
    assert [*(tmp_path / "cache").rglob("done.json")]
    said = drive(tmp_path, "", *words)
    assert said.returncode == 0, said.stderr
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "host")


def test_what_a_task_raises_is_one_line_and_a_process_that_dies_too(cluster, monkeypatch):
    monkeypatch.setattr(on_ray, "RETRIES", 0)
    with on_ray.ray_cluster(cluster.address) as nodes:
        assert list(nodes.map(abs, range(-20, 0))) == [*range(20, 0, -1)]
        with pytest.raises(RuntimeError, match="bad operand type"):
            list(nodes.map(abs, ["x"]))
        with pytest.raises(UserError, match="a task was lost 1 times"):
            list(nodes.map(os._exit, [3]))


def test_filter_on_a_cluster_of_this_host(tmp_path, corpus, small):
    filter_into(config(tmp_path / "cache", corpus, FILTERS), tmp_path / "host", lambda *_: None)
    words = ["filter", yaml_of(tmp_path, corpus), "--out", tmp_path / "nodes", "--ray", "local"]
    said = drive(tmp_path, "", *words)
    assert said.returncode == 0, said.stderr
    assert files_of(tmp_path / "host") == files_of(tmp_path / "nodes")


# ---- models ------------------------------------------------------------------------------------

T = 48  # the context, in bytes


@pytest.fixture
def run(tmp_path):
    """A run directory with a random model of bytes, whose text is of 60 documents."""
    corpus = write_rows(tmp_path / "text.jsonl", documents()[:60])
    fields = byte_model(T, "data.train.name=jsonl", f"data.train.path={corpus}",
        "data.validation.name=documents", "data.validation.fraction=0.3",
        f"data.cache_dir={tmp_path}/cache")  # fmt: skip
    return random_run(tmp_path / "run", fields)


@pytest.mark.usefixtures("one_device")
def test_scores_are_the_same_after_a_node_was_killed(tmp_path, cluster, run, small, monkeypatch):
    monkeypatch.setattr(score, "JOB_BATCHES", 2)
    killed = []

    def progress(stage, done, total):
        if stage == "score" and done > total / 3 and not killed:
            killed.append(cluster.ask("kill"))

    saved = load_saved(run)
    names, remote = ["perplexity", "el2n"], RemoteModel(str(run), None, (), ())
    score.score(saved, saved.config, names, tmp_path / "host.jsonl.zst")
    with on_ray.ray_cluster(cluster.address):
        out = tmp_path / "nodes.jsonl.zst"
        score.score(saved, saved.config, names, out, progress=progress, remote=remote)
    assert killed == [2] and cluster.ask("add") == 3
    assert (tmp_path / "host.jsonl.zst").read_bytes() == out.read_bytes()


@pytest.mark.usefixtures("one_device")
def test_a_quantized_model_is_the_same_after_a_node_was_killed(tmp_path, cluster, run, monkeypatch):
    """The statistics of two layers, summed over five blocks of 8 sequences."""
    monkeypatch.setattr(calibrate, "BLOCK", 1)
    add, killed = calibrate.combine, []

    def combine(*sums):
        if on_ray.current_cluster() and not killed:
            killed.append(cluster.ask("kill"))
        return add(*sums)

    monkeypatch.setattr(calibrate, "combine", combine)
    words = ["quantize", str(run), "--method", "gptq", "--sequences", "40", "--out"]
    assert main([*words, str(tmp_path / "host")]) == 0 and not killed
    assert main([*words, str(tmp_path / "nodes"), "--ray", cluster.address]) == 0
    assert killed == [2] and cluster.ask("add") == 3
    assert files_of(tmp_path / "host") == files_of(tmp_path / "nodes")


def test_a_process_on_a_node_ends_with_it(cluster, monkeypatch):
    with on_ray.ray_cluster(cluster.address):
        wrong, server = (RemoteProcess("timeit", ["1 +"]), RemoteProcess("http.server", ["0"]))
        assert wrong.wait() == 1 and server.poll() is None
        others = [RemoteProcess("http.server", ["0"]) for _ in range(2)]
        cluster.ask("kill")
        gone = []
        while not gone:
            gone = [one for one in (server, *others) if one.poll(0.1) is not None]
        assert {one.returncode for one in gone} == {-signal.SIGKILL}  # a node may have two
        left = [one for one in (server, *others) if one not in gone]
        left[0].send_signal(signal.SIGTERM)
        assert left[0].wait() == -signal.SIGTERM
        left[1].send_signal(signal.SIGINT)  # a server takes it as its end, if it has begun
        assert left[1].poll(20) in (0, -signal.SIGINT)
    cluster.ask("add")


# ---- training ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_device")
def test_a_job_goes_on_with_the_same_batches_on_the_nodes_that_are_left(tmp_path, cluster):
    """Of three nodes two train; one of those is killed, and another takes its place."""
    fields = {"train__steps": 12, "train__batch_size": 8, "checkpoint__every": 3}
    fields |= {"processes__heartbeat_timeout": 3} | QUICK
    assert main(["train", *run_overrides(tmp_path / "host", **fields)]) == 0
    line = [sys.executable, "-m", "jaxtrain.cli", "launch", "--ray", cluster.address]
    line += ["--nodes", "1:2", "--gpus", "0", "--", *run_overrides(tmp_path / "nodes", **fields)]
    with (tmp_path / "said").open("w") as said:
        job = subprocess.Popen(line, stderr=said, stdout=said)
    saved = tmp_path / "nodes" / "tiny" / "checkpoints"
    while job.poll() is None and not any(saved.glob("[3-9]")):
        time.sleep(0.2)
    cluster.ask("kill")
    assert job.wait(200) == 0, (tmp_path / "said").read_text()
    cluster.ask("add")
    text = (tmp_path / "said").read_text()
    assert re.search("2 processes, on 2 of [23] nodes", text)  # one may still be joining
    assert "of 2 nodes 1 lost; the job goes on" in text
    losses = [[row["loss"] for row in rows_of(path / "tiny")]
              for path in (tmp_path / "host", tmp_path / "nodes")]  # fmt: skip
    assert len(losses[0]) == 12 and np.allclose(*losses, rtol=1e-4)
