"""The benches of plans and of far stores, at tiny sizes."""

import json

import numpy as np
import pytest

from benchmarks import plans, remote_loader
from benchmarks.__main__ import main
from jaxtrain.data.batches import concat, read_ahead
from jaxtrain.data.batches.prefix_sums import PrefixSums
from jaxtrain.data.store import blocks


def test_sums_are_those_of_an_array():
    lengths = np.random.default_rng(0).integers(0, 9, 1000).astype(np.uint32)
    sums = PrefixSums(lengths, lambda x: x.astype(np.int64))
    ends = np.cumsum(lengths, dtype=np.int64)
    places = np.arange(sums.total)
    documents, before = sums.find(places)
    np.testing.assert_array_equal(documents, np.searchsorted(ends, places, side="right"))
    np.testing.assert_array_equal(before, ends[documents] - lengths[documents])
    whole = np.arange(len(lengths) + 1)
    np.testing.assert_array_equal(sums.before(whole), np.concatenate([[0], ends]))


@pytest.mark.slow
def test_plans_of_many_documents(tmp_path, monkeypatch):
    path = tmp_path / "lengths.npy"
    plans.write_lengths(path, 30_000)
    monkeypatch.setattr(plans, "STEPS", 2)
    rows = [plans.planned(path, *case) for case in plans.CASES]
    assert all(row["plan_tokens_per_cpu_s"] > 0 for row in rows)
    assert rows[0]["shape"].startswith("30,000 documents")


@pytest.mark.slow
def test_a_far_store_beside_one_on_the_disk(tmp_path, monkeypatch, capsys):
    for module in (blocks, concat, read_ahead):
        monkeypatch.setattr(module, "BLOCK_TOKENS", 1 << 13)
    for name, value in {"DOCUMENTS": 1500, "WINDOW": 4, "PACE": 1e9, "LATENCY": 0.001}.items():
        monkeypatch.setattr(remote_loader, name, value)
    monkeypatch.setattr(remote_loader.bench_remote_loader, "__defaults__", (None, 1500))
    monkeypatch.setattr(remote_loader, "BATCH", 16 * 256)
    monkeypatch.setattr(remote_loader, "ROWS", 16)
    monkeypatch.setattr(remote_loader, "SEQUENCE", 256)
    assert main(["remote-loader", "--record", "--out", str(tmp_path)]) == 0
    assert "blocks waited for" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["fetched_blocks"] for row in rows[:2]] == [0, 0]
    assert all(row["fetched_blocks"] >= 0 for row in rows)
