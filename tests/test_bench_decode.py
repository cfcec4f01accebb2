"""The decode bench: bytes of the cache over time, beside a copy's rate."""

import importlib
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtrain_kernels.shapes import DECODE_BENCH

from benchmarks import decode, decode_models, tables, timing

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


SMALL = [
    "model.depth=2", "model.width=128", "model.head_dim=64", "data.tokenizer={name: bytes}",
    "train.batch_size=8", "train.device_batch_size=1",
]  # fmt: skip


@pytest.mark.slow
def test_a_whole_model_beside_what_reading_it_takes(tmp_path, monkeypatch, capsys):
    """Of bytes: the weights without embeddings, and keys and values of the tokens that are held."""
    monkeypatch.setattr(decode_models, "REPEATS", 1)
    argv = ["decode", "--config", "gpt_d12", *SMALL, "one_head_adjacent", "--prompts", "32"]
    argv += ["--cache-dtypes", "compute", "int8", "--batches", "2", "--record"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "decode_rate-gpt_d12-fp32-cpu.json").read_text())
    rows, copy = result["rows"], result["floor"]["copy_gbps"]
    name = "model.kv_heads=1 model.share_kv=adjacent"
    assert [(row["name"], row["backend"]) for row in rows] == [(name, "fp32"), (name, "int8")]
    # Of two layers with the keys and values of one head of 64; int8 has a scale for each.
    sizes = [2 * 64 * 4, 2 * (64 + 4)]
    assert [row["cache_bytes_per_token"] for row in rows] == sizes
    matrices = 2 * 2 * 128 * 128 + 2 * 128 * 64 + 2 * 2 * 128 * 512 + 128 * 320
    assert 4 * matrices < rows[0]["weight_bytes"] < 4 * matrices + 1000  # and scalars, a gate
    for row, size in zip(rows, sizes):
        assert row["shape"] == "2 x 32"
        read = row["weight_bytes"] + 2 * (32 + 40) * size
        assert row["floor_ms"] == pytest.approx(read / copy / 1e6)
        assert row["of_floor"] == pytest.approx(row["floor_ms"] * row["tokens_per_s"] / 2000)
    out = capsys.readouterr().out
    assert f"{name} 2 x 32 int8 {rows[1]['tokens_per_s']:,.0f} tokens/s" in out
    header, cells = tables.tabulate("decode_rate", [result | {"file": "x.json"}], [])
    assert header == ["switches", "2 x 32, fp32", "2 x 32, int8", "device", "figures"]
    shown = [f"{row['tokens_per_s']:,.0f} ({row['of_floor']:.0%})" for row in rows]
    assert cells == [[name, *shown, "cpu", "x.json"]]


@pytest.mark.slow
def test_every_variant_of_the_page_decodes(monkeypatch):
    monkeypatch.setattr(decode_models, "REPEATS", 1)
    asked = "gpt_d12", SMALL, None, (32,), (1,), ("float8",)
    *_, last = decode_models.bench_decode_models(*asked)
    assert len(last["rows"]) == 7 and all(row["ms"] > 0 for row in last["rows"])


def test_the_variants_are_those_of_the_page_on_sharing():
    page = (Path(__file__).parents[1] / "docs" / "howto" / "sharing.md").read_text()
    table = page.split("## Bytes of the KV cache")[1].split("\n\n")[2]
    switches = [line.strip("| ").split(" | ")[0] for line in table.splitlines()[2:]]
    ours = ["` `".join(v).join("``") if v else "none" for v in decode_models.VARIANTS.values()]
    assert ours == switches


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "gpt_d12", "nothing"], "bench decode has no nothing; it has none, adjacent"),
        (["--batches", "2"], "--batches is for bench decode with --config"),
    ],
)
def test_what_no_model_can_be_asked_for(argv, message, capsys):
    assert main(["decode", *argv]) == 2
    assert message in capsys.readouterr().err
