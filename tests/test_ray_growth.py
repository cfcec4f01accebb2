"""An elastic job on a real cluster that gains a node: it goes on there, with the same batches."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ray_cases import ONE_DEVICE, Cluster
from tiny import QUICK, rows_of, run_overrides

from jaxtrain.cluster import ray_job
from jaxtrain.main import main


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_a_job_moves_to_a_node_that_joins(tmp_path, monkeypatch, capfd):
    fields = {"train__steps": 12, "train__batch_size": 8, "checkpoint__every": 3} | QUICK
    assert main(run_overrides(tmp_path / "host", **fields)) == 0
    monkeypatch.setattr(ray_job, "GROW", 1.0)
    monkeypatch.chdir(Path(__file__).parent)  # where the nodes find the module
    saved, cluster = tmp_path / "nodes" / "tiny" / "checkpoints", Cluster([ONE_DEVICE])

    def grow():
        while not any(saved.glob("3")):
            time.sleep(0.2)
        cluster.ask("add")

    threading.Thread(target=grow, daemon=True).start()
    try:
        words = run_overrides(tmp_path / "nodes", **fields)
        bounds = ray_job.Bounds(1, 2, gpus=0)
        assert ray_job.run_job(cluster.address, bounds, "waits_for_nodes", words) == 0
    finally:
        cluster.process.communicate(timeout=60)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("launch")]
    assert said == [
        "launch   1 processes, on 1 of 1 nodes",
        "launch   of 1 nodes more are there; the job goes on from its last checkpoint",
        "launch   2 processes, on 2 of 2 nodes",
    ]
    losses = [[row["loss"] for row in rows_of(path / "tiny")]
              for path in (tmp_path / "host", tmp_path / "nodes")]  # fmt: skip
    assert len(losses[0]) == 12 and np.allclose(*losses, rtol=1e-4)
