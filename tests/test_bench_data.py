import pytest

from jaxtrain.bench import data
from jaxtrain.bench.__main__ import main


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
        assert part["prepare"]["tokens_per_s"] > 0 and part["read at random"]["tokens_per_s"] > 0
    monkeypatch.setattr("jaxtrain.bench.__main__.bench_data", lambda *_: record)
    assert main(["data", "--record", "--out", str(tmp_path)]) == 0
    assert "MB/CPU s" in capsys.readouterr().out
    assert list(tmp_path.glob("data-*.json"))
