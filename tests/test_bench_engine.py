"""The engine's bench: tokens/s beside what reading weights and cache takes."""

import importlib
import json

import jax
import jax.numpy as jnp
import pytest
from tiny import FEW_PARTS, assignments

from benchmarks import engine, engine_profile, timing
from benchmarks.decode_models import random_codes
from benchmarks.profile import Event
from jaxtrain.model.stack import unstack
from jaxtrain.weights import WEIGHTS

main = importlib.import_module("benchmarks.__main__").main
SMALL = [
    "model.depth=2", "model.width=128", "model.head_dim=64", "data.tokenizer={name: bytes}",
    "train.batch_size=8", "train.device_batch_size=1", *assignments(**FEW_PARTS),
]  # fmt: skip


@pytest.mark.slow
def test_rates_and_first_tokens(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine, "REPEATS", 1)
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.001)
    monkeypatch.setattr(engine, "CONCURRENT", 2)
    monkeypatch.setattr(engine, "LONE", 2)
    argv = ["engine", "--config", "gpt_d12", *SMALL, "--batch", "3", "--prompts", "40"]
    assert main([*argv, "--new", "6", "--record", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "engine-gpt_d12-fp32-cpu.json").read_text())
    attention = [row for row in result["rows"] if row["name"] == "paged_attention"]
    rate, first = [row for row in result["rows"] if row not in attention]
    assert (rate["shape"], first["shape"]) == ("3 x (40 + 6)", "2 x 40")
    assert [(row["shape"], row["backend"]) for row in attention] == [
        ("3 x 43", f"{backend}, fp32") for backend in ("xla", "reduce")
    ]
    assert all(0 < row["of_copy"] for row in attention)
    assert rate["of_floor"] == pytest.approx(rate["floor_ms"] / rate["ms"])
    assert 0 < rate["tokens_per_s"] and rate["preemptions"] == 0
    assert rate["programs"] == 4  # eight steps, a prompt, a first token, and texts to the device
    # A token has keys and values of 2 layers of 128 channels, 4 bytes each.
    read = rate["floor_ms"] * result["floor"]["copy_gbps"] * 1e6 - rate["weight_bytes"]
    assert read == pytest.approx(3 * 43 * 2 * 2 * 128 * 4)
    assert 0 < first["alone_ms"] <= first["alone_p99_ms"]
    assert first["median_ms"] <= first["last_ms"]
    assert 0 < first["joining_ms"] <= first["joining_p99_ms"]
    assert (first["alone_steps"], first["joining_steps"]) == (1, 1)
    assert 0 < first["alone_host_ms"] <= first["alone_p99_ms"]
    assert "engine gpt_d12" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_weights_with_random_codes(tmp_path, monkeypatch, form):
    monkeypatch.setattr(engine, "REPEATS", 1)
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.001)
    monkeypatch.setattr(engine, "attention_rows", lambda *_: [{"name": "attention", "shape": ""}])
    argv = ["engine", "--config", "gpt_d12", *SMALL, "--batch", "1", "--prompts", "20"]
    assert main([*argv, "--new", "6", "--weights", form, "--record", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / f"engine-gpt_d12-{form}-cpu.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["engine", "attention"]
    rate = rows[0]
    assert 0 < rate["ms"] and rate["preemptions"] == 0


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_random_codes_have_the_deviation_of_random_weights(form):
    like = jax.ShapeDtypeStruct((2, 256, 64), jnp.bfloat16)
    w = random_codes(like, form)
    assert jax.tree.structure(w) == jax.tree.structure(jax.eval_shape(WEIGHTS[form].encode, like))
    for layer in unstack(w, 2):
        assert layer.dequantize().shape == (256, 64)
        assert float(jnp.std(layer.dequantize().astype(jnp.float32))) == pytest.approx(
            0.02, rel=0.02
        )


@pytest.mark.slow
def test_a_profile_of_decoding(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine, "REPEATS", 1)
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.001)
    monkeypatch.setattr(engine, "first_tokens", lambda *_: {})
    monkeypatch.setattr(engine, "attention_rows", lambda *_: [])
    argv = ["engine", "--config", "gpt_d12", *SMALL, "--batch", "2", "--prompts", "40"]
    assert main([*argv, "--new", "90", "--profile", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-profile.json")
    assert path.name == "engine-gpt_d12-fp32-cpu-fp32-2-profile.json"
    assert path.with_suffix(".zip").stat().st_size > 0
    table = json.loads(path.read_text())
    assert table["rows"] == 2 and table["steps"] >= 24
    assert sum(kernel["share"] for kernel in table["kernels"]) == pytest.approx(1)
    assert any("sampling.py" in kernel["from"] for kernel in table["kernels"])
    idle, host = table["idle"], table["host"]
    assert 0 < idle["busy_share"] <= 1 and idle["kernels"] > 10
    assert host["ms"] > 0 and 0 < host["calls"] < 1.1 and host["functions"]
    assert "calls of Engine.step" in capsys.readouterr().out


def test_the_time_between_kernels():
    events = [Event("a", "", 0.0, 2e3), Event("b", "", 1e3, 3e3), Event("c", "", 2.4e4, 1e3)]
    idle = engine_profile.idle_of(events, 1)
    assert (idle["kernels"], idle["ms_busy"]) == (3, pytest.approx(5e-3))
    assert idle["busy_share"] == pytest.approx(0.2)
    assert [(g["size"], g["count"]) for g in idle["gaps"]] == [
        ("below 3 us", 0), ("below 10 us", 0), ("below 100 us", 1), ("from 100 us", 0)
    ]  # fmt: skip
    assert idle["gaps"][2]["ms"] == pytest.approx(0.02)


def test_an_option_of_another_bench_is_refused(capsys):
    assert main(["step", "--new", "6"]) == 2
    assert "--new 6 is for bench engine" in capsys.readouterr().err
