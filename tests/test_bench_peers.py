"""Peers that scripts measure: how their rows are read, and where they stand."""

import importlib
import json

import jax
import pytest
from jaxtrain_kernels.shapes import ATTENTION_BENCH, AttentionShape

from benchmarks import attention, huggingface, kernels, nanochat, peers, tables
from benchmarks.race import race
from jaxtrain.runs.compare import read_run
from jaxtrain.runs.saved import load_resolved
from jaxtrain.settings import UserError

command = importlib.import_module("benchmarks.__main__")
PACKED = AttentionShape("packed", 3, 64, 1, 1, 8, documents=(30, 1, 20))
NOISE = "print('a line of its own')\n"
ECHO = "import json, sys\nprint(json.dumps({'got': sys.argv[1:]}), flush=True)\n"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "BENCHMARKS", tmp_path)
    return tmp_path


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "clone" / "nanochat").mkdir(parents=True)
    (tmp_path / "clone" / "nanochat" / "gpt.py").write_text("")
    return tmp_path / "clone"


def test_rows_are_the_json_lines_and_a_failure_ends_them(scripts):
    (scripts / "peer.py").write_text(NOISE + ECHO + ECHO + "sys.exit('out of memory')\n")
    rows = list(peers.rows_of("peer.py", "a", "b", needs=("json",)))
    assert rows == [{"got": ["a", "b"]}] * 2


def test_what_is_missing_is_said(scripts, capsys):
    (scripts / "peer.py").write_text(ECHO)
    assert not list(peers.rows_of("peer.py", needs=("json", "no_such_package")))
    assert not list(peers.rows_of("another.py", needs=("json",)))
    assert capsys.readouterr().err.splitlines() == [
        "  no peer: no_such_package is missing",
        "  no peer: another.py is missing",
    ]


def test_nanochat_gets_the_configurations_size(scripts, checkout, monkeypatch):
    (scripts / "peer_nanochat.py").write_text(ECHO)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    (plain,) = peers.nanochat_step(checkout, "gpt_d24", ["train.sequence_length=1024"])
    assert plain["got"] == [str(checkout), "24", "16", "1024"]
    (narrow,) = peers.nanochat_step(checkout, "gpt_d12", ["model.fp8=blocks"])
    assert narrow["got"] == [str(checkout), "12", "32", "2048", "fp8"]


# The end of a command: its error.
REFUSED = {
    "gpt_d12 --peer .": "no checkout of nanochat, it has no nanochat/gpt.py",
    "llama_8b --peer clone": "llama_8b is no gpt with train.device_batch_size",
    "gpt_d12 data.tokenizer.vocab_size=300 --peer clone": "gpt_d12 has a vocabulary of 300",
    "gpt_d12 model.width=256 --peer clone": "or a width of its own",
    "gpt_d12 train.batch_size=64 --peer clone": "train.batch_size is 64, of one step of 32",
    "gpt_d12 --flags --peer clone": "--peer does not go with --flags",
}


@pytest.mark.parametrize("end", REFUSED)
def test_what_is_no_peer_is_one_line(end, checkout, capsys):
    *options, folder = end.split()
    assert command.main(["step", "--config", *options, str(checkout.parent / folder)]) == 2
    assert REFUSED[end] in capsys.readouterr().err


def test_a_step_beside_its_peer(checkout, tmp_path, monkeypatch, capsys):
    peer = {"peer": "nanochat, FA4, batch 32", "metrics": {"ms": 117.8, "tokens_per_s": 556370.6}}
    step = {"bench": "step", "config": "gpt_d12", "variant": "bf16", "device": "NVIDIA H200"}
    step |= {"device_count": 1, "workload": {"batch_size": 32}, "peers": [], "floor": {}}
    monkeypatch.setattr(command, "nanochat_step", lambda *_: [peer])
    monkeypatch.setattr(command, "bench_step", lambda *_: [step | {"metrics": {"ms": 102.5}}])
    argv = ["step", "--peer", str(checkout), "--record", "--out", str(tmp_path)]
    assert command.main(argv) == 0
    assert "nanochat, FA4, batch 32, same call" in " ".join(capsys.readouterr().out.split())
    (path,) = tmp_path.glob("step-*.json")
    record = json.loads(path.read_text())
    assert record["beside"] == [peer]
    _, rows = tables.tabulate("step", [record | {"file": path.name}], [])
    assert [(row[0], row[-1]) for row in rows] == [
        ("jaxtrain, bf16, batch 32", path.name),
        ("nanochat, FA4, batch 32, same call", path.name),
    ]


def test_documents_are_told_by_length_row_by_row():
    assert peers.lengths(PACKED) == [[30, 1, 20, 13], [1, 20, 30, 13], [20, 30, 1, 13]]


def test_flash_attention_is_rated_as_ours_are(monkeypatch):
    """Of shapes with a softcap it has no rows, as its backward has none on Hopper."""
    sent = []

    def rows_of(script, settings, needs):
        sent.extend(json.loads(settings))
        for s in sent:
            yield {"name": "attention_forward", "shape": s["name"], "ms": 2.0}
            yield {"name": "attention_forward_backward", "shape": s["name"], "ms": None}

    monkeypatch.setattr(peers, "rows_of", rows_of)
    dense = next(s for s in ATTENTION_BENCH if s.window is None and not s.documents)
    capped = dense._replace(name="capped", softcap=50.0)
    found = list(attention.flash_attention_rows([dense, PACKED, capped]))
    assert [(s["name"], s["lengths"] is None) for s in sent] == [
        (dense.name, True), ("packed", False),
    ]  # fmt: skip
    pairs = dense.T * (dense.T + 1) / 2
    assert found[0]["tflops"] == pytest.approx(4 * dense.B * dense.N * dense.H * pairs / 2.0 / 1e9)
    assert found[0]["tflops_visited"] > found[0]["tflops"]
    assert "tflops" not in found[1]


def test_without_a_gpu_there_is_no_row_of_it(monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    monkeypatch.setattr(attention, "flash_attention", lambda shapes: pytest.fail("was asked"))
    names = [ATTENTION_BENCH[0].name, peers.FLASH_ATTENTION]
    assert not list(attention.attention_rows(names, jax.numpy.float32))


TRAINER = """
import json, sys
from pathlib import Path
import numpy as np
checkout, folder = map(Path, sys.argv[1:])
s = json.loads((folder / "settings.json").read_text())
rows, held_out = np.load(folder / "train.npy"), np.load(folder / "validation.npy")
say = lambda **row: print(json.dumps(row), flush=True)
say(kind="peer", attention="none", rows=rows.shape, dtype=str(rows.dtype), settings=s,
    held_out=[len(held_out), int(np.load(folder / "labels.npy").sum())],
    first=rows[:, 0].tolist(), bytes=len(np.load(folder / "bytes.npy")),
    head=np.load(folder / "weights.npz")["lm_head.weight"].shape)
say(kind="train", step=2, time=1.0, loss=3.0, tokens_per_s=128.0)
say(kind="validation", step=2, time=1.0, bpb=2.5)
"""


ON_ROWS = [
    "data.tokenizer.vocab_size=300", "model.depth=1", "train.sequence_length=32",
    "train.batch_size=4", "train.device_batch_size=2", "train.steps=2", "eval.every=2",
    "data.validation={name: documents, fraction: 0.1}",
]  # fmt: skip


def on_rows(folder):
    """Overrides of a run of two steps, on documents of a folder."""
    text = folder / "text.jsonl"
    documents = [{"text": f"{i} " + "a line of text, " * 20} for i in range(60)]
    text.write_text("".join(json.dumps(d) + "\n" for d in documents))
    return [
        *ON_ROWS, f"run.directory={folder}", "run.name=beside", f"data.train.path={text}",
        f"data.cache_dir={folder / 'cache'}",
    ]  # fmt: skip


@pytest.mark.slow
def test_nanochat_trains_on_our_rows_and_leaves_a_run(scripts, checkout, tmp_path, monkeypatch):
    """The rows are those of the loader, the rates the configuration's; `race` reads it."""
    (scripts / "peer_nanochat_train.py").write_text(TRAINER)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(peers, "VOCABULARY", 300)
    overrides = on_rows(tmp_path)
    folder = nanochat.train_nanochat(checkout, "gpt_d12", overrides)
    run = read_run(folder)
    peer = run.env["peer"]
    assert peer["rows"] == [8, 33] and peer["dtype"] == "uint16" and peer["bytes"] == 300
    assert peer["head"] == [320, 128]  # [V, D] as nanochat has it
    assert len(set(peer["first"])) == 1  # BOS, as nanochat's loader begins every row
    assert peer["held_out"][0] % 2 == 0 and peer["held_out"][1] > 100
    c = load_resolved(folder / "config.yaml")
    told = peer["settings"]
    assert told["embedding_lr"] == pytest.approx(
        c.optim.embedding_lr * (c.model.width / 768) ** 0.5
    )
    assert (told["steps"], told["batch_size"], told["device_batch_size"]) == (2, 4, 2)
    assert [row["kind"] for row in run.rows] == ["train", "validation"]
    assert race([folder], "beside")["runs"][0]["curve"] == [[2, 256, 2.0, 2.5]]
    with pytest.raises(UserError, match="is there already"):
        nanochat.train_nanochat(checkout, "gpt_d12", overrides)


GPT2_TRAINER = """
import json, sys
from pathlib import Path
import numpy as np
folder = Path(sys.argv[1])
say = lambda **row: print(json.dumps(row), flush=True)
say(kind="peer", settings=json.loads((folder / "settings.json").read_text()), compiled=False)
say(kind="train", step=2, time=1.0, loss=3.0, tokens_per_s=128.0)
say(kind="validation", step=2, time=1.0, bpb=2.5)
say(kind="peer", peak_bytes=len(np.load(folder / "train.npy")))
"""
ADAMW = (
    "optim={name: adamw, learning_rate: 2e-3, clip_norm: 1, "
    "schedule: {name: cosine, warmup_steps: 1}}"
)


def test_transformers_gpt2_trains_on_our_rows_and_leaves_a_run(scripts, tmp_path, monkeypatch):
    (scripts / "peer_huggingface_train.py").write_text(GPT2_TRAINER)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    overrides = on_rows(tmp_path)
    with pytest.raises(UserError, match="AdamW and a cosine alone: set optim="):
        huggingface.train_huggingface("gpt_d12", overrides)
    folder = huggingface.train_huggingface("gpt_d12", [*overrides, ADAMW])
    run = read_run(folder)
    told = run.env["peer"]["settings"]
    assert (told["learning_rate"], told["b2"], told["warmup_steps"]) == (2e-3, 0.95, 1)
    assert (told["depth"], told["width"], told["heads"], told["hidden"]) == (1, 128, 1, 512)
    assert told["vocab_size"] == 320 and run.env["peer"]["peak_bytes"] == 8
    assert race([folder], "beside")["runs"][0]["bpb"] == 2.5


def test_quack_is_rated_as_ours_are(monkeypatch):
    """Floating point operations and bytes of the op, over the script's milliseconds."""
    asked = []

    def rows(script, text, needs):
        assert script == "peer_quack.py" and needs == ("torch", "quack")
        (one,) = json.loads(text)
        asked.append(one)
        row = {"name": one["op"], "shape": one["shape"], "backend": peers.QUACK}
        yield row | ({"ms": None, "failed": "no memory"} if one["op"] == "bad" else {"ms": 2.0})

    monkeypatch.setattr(peers, "rows_of", rows)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (row,) = kernels.quack_rows("relu2", "d12", (4, 5, 6), flops=8e9)
    assert row["tflops"] == 4.0 and "gbps" not in row
    assert next(kernels.quack_rows("norm", "d12", (4, 5), size=3e6))["gbps"] == 1.5
    assert next(kernels.quack_rows("bad", "d12", (4,), flops=1.0))["failed"] == "no memory"
    assert asked[0] == {"op": "relu2", "shape": "d12", "sizes": [4, 5, 6]}
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert not list(kernels.quack_rows("relu2", "d12", (4, 5, 6), flops=1.0))
