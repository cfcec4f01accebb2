"""The decode bench: bytes of the cache over time, beside a copy's rate."""

import importlib
import json

import jax.numpy as jnp
import pytest
from jaxtrain_kernels.shapes import DECODE_BENCH

from benchmarks import decode, timing

main = importlib.import_module("benchmarks.__main__").main


@pytest.mark.slow
def test_decode_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.001)
    monkeypatch.setattr(decode, "SPLITS", (None, 2))
    name = DECODE_BENCH[0].name
    argv = ["decode", name, "dot", "--record", "--out", str(tmp_path)]
    assert main(argv) == 0
    result = json.loads(next(tmp_path.glob("decode-*.json")).read_text())
    rows, copy = result["rows"], result["floor"]["copy_gbps"]
    assert [(row["name"], row["backend"]) for row in rows] == [
        ("decode_fp32", "dot"), ("decode_fp32", "dot, splits 2"),
        ("decode_int8", "dot"), ("decode_int8", "dot, splits 2"),
    ]  # fmt: skip
    cache = 2 * 2 * 256 * 8 * 128 * 4
    for row in rows:
        assert row["of_copy"] == pytest.approx(row["gbps"] / copy)
        assert row["error"] < (0.03 if "int8" in row["name"] else 1e-5)
    read = [row["gbps"] * row["ms"] * 1e6 for row in rows]
    assert cache < read[0] < 1.02 * cache and read[2] == pytest.approx(read[0] * 0.26, rel=0.02)
    assert "of copy rate" in capsys.readouterr().out


def test_inputs_fill_the_cache():
    q, k, v, lengths = decode.decode_inputs(
        decode.small_decode(DECODE_BENCH[1]), jnp.dtype(jnp.float32), True, decode.jax.random.key(0)
    )
    assert q.shape == (2, 32, 128) and k.values_BSKH.shape == (2, 256, 8, 128)
    assert lengths.tolist() == [256, 256] and v.scale_BSK.shape == (2, 256, 8)
