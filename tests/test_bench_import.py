"""The import bench, on a model of nothing."""

import importlib
import json

import pytest

main = importlib.import_module("benchmarks.__main__").main


@pytest.mark.slow
def test_import_rows(tmp_path, capsys):
    assert main(["import", "tiny", "--record", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("import-tiny-bf16-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["into a run's file", "onto the devices"]
    weights = 2 * (2 * 512 * 64 + 2 * (3 * 64 * 128 + 2 * 64 * 64 + 2 * 64 * 32) + 5 * 64)
    for row in rows:
        assert weights < row["checkpoint_bytes"] < weights + 4000
        assert row["gbps"] * row["seconds"] * 1e9 - row["checkpoint_bytes"] < 1
    assert "host memory" in capsys.readouterr().out
    assert main(["import", "tinier"]) == 2
    assert "there is no shape tinier; there are llama_8b, tiny" in capsys.readouterr().err
