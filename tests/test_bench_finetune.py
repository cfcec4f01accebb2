"""LoRA on random weights: what a step needs, and that it runs."""

import json

import pytest

from benchmarks import finetune
from benchmarks.__main__ import main

TINY = [
    "model.depth=1", "model.width=64", "model.head_dim=16", "model.hidden=128",
    "data.tokenizer={name: bytes}",
]  # fmt: skip


@pytest.mark.slow
def test_methods_need_less_with_fewer_bits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune, "SHAPES", ((64, 2),))
    (plain, lora), (packed, qlora) = (next(iter(lot.items())) for lot in finetune.METHODS)
    monkeypatch.setattr(finetune, "METHODS", ({plain: lora}, {packed: qlora}))
    code = main(["finetune", "--config", "llama_tiny", "--record", "--out", str(tmp_path), *TINY])
    assert code == 0 and "no peer" in capsys.readouterr().err
    (file,) = tmp_path.glob("finetune-llama_tiny-*.json")
    plain, packed = json.loads(file.read_text())["rows"]
    assert plain["shape"] == packed["shape"] == "T 64, batch 2"
    assert 0 < packed["total_bytes"] < plain["total_bytes"]


def test_the_peer_is_behind_lora_and_before_the_rest(monkeypatch):
    ours = lambda name, overrides, methods, running: ({"name": method} for method in methods)
    monkeypatch.setattr(finetune, "measured", ours)
    monkeypatch.setattr(finetune, "peer_rows", lambda name: iter([{"name": "peer"}]))
    *_, record = finetune.bench_finetune("llama_tiny", TINY, None)
    names = [row["name"] for row in record["rows"]]
    assert names[:4] == ["LoRA r16", "LoRA r16, dots", "peer", "QLoRA r16, nf4"] and len(names) == 8


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["QLoRA r16, nf4", "peft"], ["peer", "QLoRA r16, nf4"]),
        (["LoRA r16, dots"], ["LoRA r16, dots"]),
    ],
)
def test_only_the_rows_that_were_asked_for(only, expected, monkeypatch):
    ours = lambda name, overrides, methods, running: ({"name": method} for method in methods)
    monkeypatch.setattr(finetune, "measured", ours)
    monkeypatch.setattr(finetune, "peer_rows", lambda name: iter([{"name": "peer"}]))
    *_, record = finetune.bench_finetune("llama_tiny", TINY, None, only)
    assert [row["name"] for row in record["rows"]] == expected


def test_a_row_that_does_not_exist(capsys):
    assert main(["finetune", "--config", "llama_tiny", "--only", "LoRA"]) == 2
    assert "--only LoRA: no such row; there are LoRA r16" in capsys.readouterr().err


@pytest.mark.slow
def test_steps_run_on_weights_that_are_made_once_a_base(monkeypatch):
    made, real = [], finetune.random_frozen
    monkeypatch.setattr(finetune, "random_frozen", lambda w: made.append(w) or real(w))
    monkeypatch.setattr(finetune, "SHAPES", ((64, 2), (32, 2)))
    methods = {"int8": (finetune.LORA | {"base_quantization": "int8"}, [])}
    overrides = ["mesh={data: 1, fsdp: 1}", *TINY]
    rows = list(finetune.measured("llama_tiny", overrides, methods, running=True))
    assert [row["tokens_per_s"] for row in rows] == [
        1e3 * n / r["ms"] for n, r in zip((128, 64), rows)
    ]
    assert len(made) == 1
