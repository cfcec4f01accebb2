import pytest

from jaxtrain.bench import data, filters
from jaxtrain.bench.__main__ import main
from jaxtrain.settings import UserError


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
    monkeypatch.setattr("jaxtrain.bench.__main__.bench_data", lambda *_: record)
    assert main(["data", "--record", "--out", str(tmp_path)]) == 0
    assert "MB/CPU s" in capsys.readouterr().out
    assert list(tmp_path.glob("data-*.json"))


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
    monkeypatch.setattr("jaxtrain.bench.__main__.bench_filters", lambda *_: record)
    assert main(["filters", "--record", "--out", str(tmp_path)]) == 0
    assert "documents lost" in capsys.readouterr().out
    assert list(tmp_path.glob("filters-text-plays-*.json"))
