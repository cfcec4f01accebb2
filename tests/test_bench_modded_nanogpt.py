"""modded-nanogpt as a peer: the module made of its script, and the run that its training leaves."""

import importlib
import json

import pytest

from benchmarks import modded_nanogpt, peers
from benchmarks.race import race
from jaxtrain.runs.compare import read_run
from jaxtrain.settings import UserError

command = importlib.import_module("benchmarks.__main__")

# Laid out as train_gpt.py is; running its data, process group or loop would fail.
SCRIPT = """
from math import sqrt as flex_attention
from typing import Any
END = 50256
def starts(tokens): return tokens == 50256
class Hyperparameters:
    num_iterations = 1695
    train_seq_len = 48*1024
    val_seq_len = 4*64*1024
args = Hyperparameters()
args.train_files = missing_folder
rank = open("no such process group")

model: Any = [50257, max(args.train_seq_len, args.val_seq_len)]
def get_lr(step: int): return step / args.num_iterations
model: Any = tuple(model)
raise SystemExit("the loop")
"""
TRAINER = """
import json, sys
from pathlib import Path
import numpy as np
folder = Path(sys.argv[1])
sys.path.append(str(folder))
import modded_nanogpt as recipe
s = json.loads((folder / "settings.json").read_text())
first = set(np.load(folder / "train.npy")[:, 0].tolist())
say = lambda **row: print(json.dumps(row), flush=True)
say(kind="peer", model=recipe.model, bos=[recipe.END] == list(first), half=recipe.get_lr(1),
    published=[recipe.published_steps, recipe.published_tokens], steps=s["steps"])
say(kind="train", step=2, time=1.0, loss=3.0, tokens_per_s=128.0)
say(kind="validation", step=2, time=1.0, bpb=2.5)
say(kind="peer", peak_bytes=3 * 2**30)
"""
OVERRIDES = [
    "data.tokenizer.vocab_size=300", "model.depth=1", "train.sequence_length=64",
    "train.batch_size=4", "train.device_batch_size=2", "train.steps=2", "eval.every=2",
    "data.validation={name: documents, fraction: 0.1}",
]  # fmt: skip


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A stub checkout, and a stub script that trains on what is written for it."""
    monkeypatch.setattr(peers, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "peer_modded_nanogpt_train.py").write_text(TRAINER)
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "train_gpt.py").write_text(SCRIPT)
    return tmp_path / "clone"


@pytest.fixture
def overrides(tmp_path):
    text = tmp_path / "text.jsonl"
    documents = [{"text": f"{i} " + "a line of text, " * 20} for i in range(60)]
    text.write_text("".join(json.dumps(d) + "\n" for d in documents))
    where = [f"run.directory={tmp_path}", "run.name=beside", f"data.train.path={text}"]
    return [*OVERRIDES, *where, f"data.cache_dir={tmp_path / 'cache'}"]


def test_the_recipe_trains_on_our_rows_and_leaves_a_run(checkout, overrides, monkeypatch):
    """Of its script the parts that make the model are executed, with our tokens, BOS and sizes."""
    monkeypatch.setattr(modded_nanogpt, "SIZE", (1, 128))
    run_dir = modded_nanogpt.train_modded_nanogpt(checkout, "gpt_d12", overrides)
    peer = read_run(run_dir).env["peer"]
    assert peer["model"] == [300, 2 * 64] and peer["bos"]
    assert peer["half"] == 0.5 and peer["steps"] == 2
    assert peer["published"] == [1695, 48 * 1024]
    (entry,) = race([run_dir], "beside")["runs"]
    assert entry["curve"] == [[2, 512, 4.0, 2.5]]
    assert (entry["peer"], entry["peak_bytes"]) == ("modded-nanogpt", 3 * 2**30)


def test_what_is_no_peer_is_one_line(checkout, overrides, tmp_path, capsys):
    def error(folder, *more):
        argv = ["modded-nanogpt", str(folder), "--config", "gpt_d12", *overrides, *more]
        assert command.main(argv) == 2
        *_, line = capsys.readouterr().err.splitlines()
        return line

    assert "has no train_gpt.py" in error(tmp_path)
    assert "12 layers of width 768, not 1 of 128: take gpt_d12" in error(checkout)
    later = SCRIPT.replace("from math import sqrt as flex_attention", "from kernels import get")
    (checkout / "train_gpt.py").write_text(later)
    assert "git checkout 9d9dc96" in error(checkout)
    assert not (tmp_path / "beside").exists()


def test_masks_are_of_whole_blocks(checkout, overrides, monkeypatch):
    monkeypatch.setattr(modded_nanogpt, "SIZE", (1, 128))
    with pytest.raises(UserError, match="64 tokens a microbatch are no multiple of 128"):
        modded_nanogpt.train_modded_nanogpt(
            checkout, "gpt_d12", [*overrides, "train.device_batch_size=1"]
        )
