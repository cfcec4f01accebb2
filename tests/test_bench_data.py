import json
import re
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from tiny import CACHE

from benchmarks import data, filters, packing, soak
from benchmarks.__main__ import main
from jaxtrain.settings import UserError


@pytest.mark.slow
def test_every_stage_from_text_to_batches_is_measured(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(data, "loader_rows", lambda names: seen.extend(names) or [])
    monkeypatch.setattr(data, "READS", 50)
    monkeypatch.setattr(data, "TRAIN_BYTES", 100_000)
    monkeypatch.setattr(data, "RAW_BYTES", 200_000)
    options = ["data.train.document=paragraph", f"data.cache_dir={tmp_path}"]
    record = data.bench_data(options)
    assert record["bench"] == "data" and seen == ["best_fit", "concat"]
    rows = {row["name"]: row for row in record["rows"]}
    assert len(rows) == 10 and all(row["seconds"] > 0 for row in rows.values())
    for kind in ("sentencepiece", "huggingface"):
        part = {name.split(": ")[1]: row for name, row in rows.items() if name.startswith(kind)}
        assert set(part) == {"train", "the library's batch", "ours, a batch", "prepare",
                             "read at random"}  # fmt: skip
        ours, raw = part["ours, a batch"], part["the library's batch"]
        assert ours["of_raw"] == pytest.approx(raw["seconds"] / ours["seconds"])
        tokens = [row["tokens_per_s"] * row["seconds"] for row in (ours, raw)]
        assert tokens[0] == pytest.approx(tokens[1])  # of the same text
        shapes = [part[name]["shape"].split(", ")[1] for name in ("train", "prepare")]
        assert shapes == ["0 MB", "1 MB"] and raw["shape"] == "tinyshakespeare, 0 MB"
        assert part["prepare"]["tokens_per_s"] > 0 and part["read at random"]["tokens_per_s"] > 0
    with pytest.raises(UserError, match="data.train is a chat: name one source of text"):
        data.bench_data(["data.train.name=chat", "data.train.path=x"])
    monkeypatch.setattr("benchmarks.__main__.bench_data", lambda *_: record)
    assert main(["data", "--record", "--out", str(tmp_path)]) == 0
    assert "MB/CPU s" in capsys.readouterr().out
    assert list(tmp_path.glob("data-*.json"))


@pytest.mark.slow
def test_each_filter_has_a_row_and_so_have_all_together(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(filters, "ALL", ("exact_duplicates", "gopher_quality", "c4"))
    options = ["data.train.document=paragraph", f"data.cache_dir={tmp_path}"]
    record = filters.bench_filters(options, "plays")
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["all", "exact_duplicates", "gopher_quality", "c4"]
    lost = sum(row["documents"] for row in record["rows"][1:])
    assert rows["all"]["documents"] == lost > rows["gopher_quality"]["documents"] > 1000
    assert sum(rows["gopher_quality"]["reasons"].values()) == rows["gopher_quality"]["documents"]
    assert 0 < rows["c4"]["of_bytes"] < rows["all"]["of_bytes"] < 1
    assert all(row["mb_per_s"] > 0 and row["mb_per_cpu_s"] > 0 for row in record["rows"])
    monkeypatch.setattr("benchmarks.__main__.bench_filters", lambda *_: record)
    assert main(["filters", "--record", "--out", str(tmp_path)]) == 0
    assert "documents lost" in capsys.readouterr().out
    assert list(tmp_path.glob("filters-text-plays-*.json"))


@pytest.mark.slow
def test_the_memory_of_the_loader_is_sampled_while_it_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak, "EVERY", 0.1)
    monkeypatch.setattr(soak, "ROWS", 4)
    options = [f"data.cache_dir={CACHE}", "data.tokenizer.vocab_size=384"]
    out = ["--minutes", "0.02", "--record", "--out", str(tmp_path)]
    assert main(["loader", *options, *out]) == 0
    assert "MiB, first minute" in capsys.readouterr().out
    record = json.loads(next(tmp_path.glob("loader-text-*.json")).read_text())
    (row,), curve = record["rows"], record["curve"]
    assert len(curve["rss_mib"]) == len(curve["seconds"]) >= soak.LOOKS
    assert curve["seconds"] == sorted(set(curve["seconds"])) and curve["seconds"][0] == 0
    assert min(curve["rss_mib"]) <= row["first_mib"] <= max(curve["rss_mib"])
    took = 60 * float(re.search(r", ([\d.]+) minutes", row["shape"])[1])
    assert took > 1.19
    read = row["tokens_per_s"] * took
    assert row["epochs"] * record["workload"]["store_tokens"] == pytest.approx(read, rel=0.01)
    assert read > (len(curve["seconds"]) - 0.5) * 4 * 2048  # a batch at least after each look
    assert main(["loader", *options, "--minutes", "0.009"]) == 2
    assert "--minutes 0.009: the memory is looked at every 0.1 s" in capsys.readouterr().err


@pytest.mark.slow
def test_the_memory_is_looked_at_often_enough_where_the_loader_stalls(monkeypatch):
    monkeypatch.setattr(soak, "EVERY", 0.05)
    monkeypatch.setattr(soak, "ROWS", 4)
    monkeypatch.setattr(soak, "resident_mib", lambda: time.sleep(0.2) or 100.0)
    options = [f"data.cache_dir={CACHE}", "data.tokenizer.vocab_size=384"]
    record = soak.bench_loader(options, minutes=0.006)
    assert len(record["curve"]["seconds"]) == soak.LOOKS
    assert record["rows"][0]["first_mib"] == record["rows"][0]["last_mib"] == 100


@pytest.mark.slow
def test_a_stall_is_not_made_up_for_with_looks_at_once(monkeypatch):
    """Here the first of them takes the time of four."""
    waits = iter([0.2])
    monkeypatch.setattr(soak, "EVERY", 0.05)
    monkeypatch.setattr(soak, "ROWS", 4)
    monkeypatch.setattr(soak, "resident_mib", lambda: time.sleep(next(waits, 0)) or 100.0)
    options = [f"data.cache_dir={CACHE}", "data.tokenizer.vocab_size=384"]
    seconds = soak.bench_loader(options, minutes=0.01)["curve"]["seconds"]
    assert min(np.diff(seconds)) > 0.03


def test_a_line_is_drawn_where_all_looks_but_one_came_before_a_stall():
    found = soak.flatness([0.0, 0.1, 0.2, 0.3, 0.4, 3.4], [*5 * [100.0], 101.0])
    assert found["growth_mib_per_minute"] == pytest.approx(20)


def test_a_memory_that_grows_is_told_from_one_that_does_not():
    seconds = np.arange(0, 600, 2.0)
    warm = np.where(seconds < 20, 3 * seconds, 60.0)  # full buffers are no leak
    flat = soak.flatness(seconds.tolist(), (500 + warm).tolist())
    assert flat["first_mib"] == flat["last_mib"] == 560
    assert flat["growth_mib_per_minute"] == pytest.approx(0, abs=1e-6)
    grown = 500 + warm + seconds / 60 * 0.25
    leak = soak.flatness(seconds.tolist(), grown.tolist())
    assert leak["growth_mib_per_minute"] == pytest.approx(0.25)
    assert leak["last_mib"] - leak["first_mib"] == pytest.approx(0.25 * 9, rel=0.01)


def test_memory_counts_the_children():
    hold = "x = b'x' * (64 << 20); print(len(x), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline()
        alone = psutil.Process().memory_info().rss / soak.MIB
        assert soak.resident_mib() - alone > 60
        child.stdin.close()


@pytest.mark.slow
def test_packing_is_measured_beside_a_simulation_of_nanochats(tmp_path, monkeypatch, capsys):
    for name, value in (("DOCUMENTS", 1000), ("LENGTHS", (512,)), ("EPOCHS", 1.0), ("TIMED", 5)):
        monkeypatch.setattr(packing, name, value)
    assert main(["packing", "--record", "--out", str(tmp_path)]) == 0
    assert "never used" in capsys.readouterr().out
    (path,) = tmp_path.glob("packing-random-*.json")
    rows = json.loads(path.read_text())["rows"]
    for shape in {row["shape"] for row in rows if row["name"].startswith("nanochat")}:
        same = {row["name"]: row for row in rows if row["shape"] == shape}
        assert same["best_fit"]["crop"] == same["concat"]["crop"] == 0
        assert all(row.get("unused", 0) < 0.03 for row in same.values())
    assert rows[-1]["farthest"] < 3


@pytest.mark.parametrize(
    ("kind", "length"),
    [(kind, length) for kind in ("short", "all", "long") for length in packing.LENGTHS],
)
@pytest.mark.slow
def test_best_fit_crops_no_more_than_nanochats_packer(monkeypatch, kind, length):
    monkeypatch.setattr(packing, "EPOCHS", 2.0)
    monkeypatch.setattr(packing, "REPEATS", 1)
    lengths = packing.random_lengths()
    lengths = {"short": lengths[lengths <= 512], "all": lengths, "long": lengths[lengths > 1024]}
    found = packing.ours(lengths[kind], packing.PACKINGS["best_fit, cropping"], length)
    assert found["crop"] < 0.5 * packing.peer(lengths[kind], length)["crop"]
