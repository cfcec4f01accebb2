"""LoRA on random weights: what a step needs, and that it runs."""

import json

import jax

from jaxtrain.bench import finetune
from jaxtrain.bench.__main__ import main
from jaxtrain.bench.workload import load_workload

TINY = [
    "model.depth=2", "model.width=64", "model.head_dim=16", "model.hidden=128",
    "data.tokenizer={name: bytes}",
]  # fmt: skip


def test_methods_need_less_with_fewer_bits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune, "SHAPES", ((64, 2),))
    few = {name: finetune.METHODS[name] for name in ("LoRA r16", "QLoRA r16, nf4")}
    monkeypatch.setattr(finetune, "METHODS", few)
    code = main(["finetune", "--config", "llama_tiny", "--record", "--out", str(tmp_path), *TINY])
    assert code == 0 and "no peer" in capsys.readouterr().err
    (file,) = tmp_path.glob("finetune-llama_tiny-*.json")
    plain, packed = json.loads(file.read_text())["rows"]
    assert plain["shape"] == packed["shape"] == "T 64, batch 2"
    assert 0 < packed["total_bytes"] < plain["total_bytes"]


def test_a_step_on_random_weights_runs():
    one = ["optim={name: adamw}", "mesh={data: 1, fsdp: 1}"]
    size = ["train.sequence_length=64", "train.batch_size=2", "train.device_batch_size=2"]
    w = load_workload("llama_tiny", [*size, *TINY, *one], jax.devices()[:1])
    row = finetune.figures(finetune.tuned(w, finetune.LORA | {"base": "int8"}), running=True)
    assert row["ms"] > 0 and row["tokens_per_s"] == 1e3 * 128 / row["ms"]
