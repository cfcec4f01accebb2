"""Supervised fine-tuning of a checkpoint: transformers' loss; a run hands on its chat."""

import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from chat_cases import CONVERSATIONS, PLAIN, TEMPLATES, make_tokenizer, write_lines
from hf_cases import weights
from safetensors.numpy import save_file
from tiny import begin, mesh_of, run_overrides, stacked

from jaxtrain.cli import main as interop
from jaxtrain.config import load_config
from jaxtrain.data import DEFAULT_TEMPLATE, prepare
from jaxtrain.data.batches.packing import assemble
from jaxtrain.data.batches.planning import Piece
from jaxtrain.inference import generate
from jaxtrain.interop.load import load_checkpoint, open_checkpoint
from jaxtrain.main import main
from jaxtrain.model import Transformer, resolve_model, split
from jaxtrain.optim import make_optimizer
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.train.step import StepSpec, train_step

pytestmark = pytest.mark.slow

GOLDEN = json.loads(Path(__file__).with_name("golden_chat.json").read_text())["llama"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The golden llama as a folder of Hugging Face's, with its tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("sft") / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GOLDEN["config"]))
    save_file(weights(GOLDEN["shapes"]), folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text(make_tokenizer())
    bos = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "clean_up_token": None}
    settings = bos | {"chat_template": TEMPLATES["generation"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


def chat_overrides(folder, checkpoint, conversations, **changes):
    keep = [
        x for x in run_overrides(folder, **changes)
        if not x.startswith(("model.", "data.tokenizer", "data.cache_dir"))
    ]  # fmt: skip
    chat = [
        "data.train.name=chat",
        f"data.train.path={write_lines(folder / 'c.jsonl', conversations)}",
    ]
    optim = ["optim.name=adamw", "optim.learning_rate=1e-3"]
    keep += [f"data.cache_dir={folder / 'cache'}", f"train.init_from={checkpoint}"]
    return [*chat, *optim, *keep]


def test_the_loss_is_that_of_transformers_packed_or_not_and_accumulated_or_not(
    checkpoint, tmp_path
):
    config = load_config(None, chat_overrides(tmp_path, checkpoint, CONVERSATIONS))
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"validation": {"name": "none"}})}
    )
    store = prepare(config.data.model_validate(config.data.model_dump(warnings=False))).train
    source = open_checkpoint(checkpoint)
    model = resolve_model(config.model, 256)
    graphdef, specs = split(Transformer(model, source.config["vocab_size"]))
    optimizer = make_optimizer(config.optim, specs, 10)
    bytes_V = jnp.ones(source.config["vocab_size"])
    task = StepSpec(graphdef, specs, optimizer, jnp.dtype("float32"), bytes_V)
    state = begin(task, mesh_of())._replace(
        params=jax.tree.map(jnp.asarray, load_checkpoint(source, specs))
    )
    step = jax.jit(lambda batch: train_step(task, state, batch, optimizer.hyperparams)[1])
    pieces = [Piece(i, True, 0, int(n)) for i, n in enumerate(store.lengths)]
    packed = assemble([(store, pieces)], 256, segments=True)
    alone = assemble([*((store, [piece]) for piece in pieces), (store, [])], 128, segments=True)
    for batch in (stacked(packed, 1), stacked(alone, 2)):
        assert batch.weights_BT.sum() == GOLDEN["count"]
        metrics = step(batch)
        np.testing.assert_allclose(metrics["loss"], GOLDEN["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], GOLDEN["gradient_norm"], rtol=1e-4)


@pytest.fixture(scope="module")
def tuned(checkpoint, tmp_path_factory):
    """A run of two steps on conversations, from the checkpoint."""
    folder = tmp_path_factory.mktemp("tuned")
    many = [
        [dict(m, content=m["content"] + str(i)) for m in c] for i in range(9) for c in CONVERSATIONS
    ]
    changes = {"train__steps": 2, "train__sequence_length": 128, "sample__prompts": "[Hi, '']"}
    assert (
        main(chat_overrides(folder, checkpoint, many, data__validation__fraction=0.3, **changes))
        == 0
    )
    return folder / "tiny"


def test_a_run_takes_over_template_tokens_and_fitting_defaults(tuned):
    tree = yaml.safe_load((tuned / "config.yaml").read_text())
    source = tree["data"]["train"]
    assert source["template"] == TEMPLATES["generation"]
    assert source["special"] == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tree["data"]["packing"]["name"] == "padded" and tree["model"]["document_mask"]
    assert tree["data"]["validation"] == {"name": "documents", "fraction": 0.3}
    kinds = [row["kind"] for row in read_rows(tuned / "metrics.jsonl")]
    assert kinds.count("train") == 2 and kinds.count("validation") == 1
    counted = json.loads((tuned / "data.json").read_text())["train"]
    assert 9 < counted["conversations"] < 27 and counted["truncated"] == 0
    assert "lose their end" in (tuned / "report.html").read_text()
    assert (tuned / "samples" / "step_000002.txt").read_text().startswith("Hi\n> ")


def test_a_run_starts_from_it_with_its_template(tuned, tmp_path):
    start = [f"train.init_from={tuned}", "data.train.name=chat", "data.train.path=x.jsonl"]
    start.append("train.steps=1")
    source = load_config(None, start).data.train
    assert source.template == TEMPLATES["generation"]
    assert source.special == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "own.jinja").write_text(TEMPLATES["qwen2"])
    own = f"data.train.template={tmp_path / 'own.jinja'}"
    named = "data.train.special={eos_token: x}"
    source = load_config(None, [*start, own, named]).data.train
    assert source.template == TEMPLATES["qwen2"]
    assert source.special == {"bos_token": "<s>", "eos_token": "x"}
    other = [*start, "model.document_mask=false", "data.validation.name=none"]
    c = load_config(None, other)
    assert not c.model.document_mask and c.data.validation.name == "none"
    with pytest.raises(UserError, match="neither Jinja text nor a file"):
        load_config(None, [*start, "data.train.template=none.jinja"])


def test_the_export_talks_as_it_was_trained(tuned, tmp_path):
    assert interop(["export", str(tuned), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATES["generation"]
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "</s>" and "chat_template" not in settings
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = json.loads(make_tokenizer())["added_tokens"]
    end = next(token["id"] for token in tokenizer if token["content"] == "<|im_end|>")
    assert ends == [2, end]


def test_it_talks_in_the_terminal(tuned, monkeypatch, capsys):
    """One question by --prompt; typed ones get the same answer, token by token."""
    options = [str(tuned), "--chat", "--tokens", "6", "--temperature", "0"]
    assert generate.main([*options, "--prompt", "Hello?"]) == 0
    question, answer = capsys.readouterr().out.split("\n> ", 1)
    assert question == "Hello?"
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello?\n/reset\n"))
    assert generate.main(options) == 0
    lines = capsys.readouterr().out.split("\n> ", 1)[1]
    assert lines == f"{answer.rstrip(chr(10))}\n> a new conversation\n> "
    assert generate.main([str(tuned), "--system", "x"]) == 2
    assert "--system needs --chat" in capsys.readouterr().err
    context = load_saved(
        tuned
    ).config.model.context_length  # the model's, not the length of its rows
    assert generate.main([str(tuned), "--chat", "--tokens", str(context)]) == 2
    assert f"leaves no room in a context of {context}" in capsys.readouterr().err


def test_a_model_that_cannot_talk_says_so(whole, capsys):
    assert generate.main([str(whole), "--chat", "--prompt", "Hi"]) == 2
    assert "use jaxtrain generate" in capsys.readouterr().err


def test_a_template_of_ones_own_is_exported_too(own_model, tmp_path):
    """Our own models have no template: the built-in one goes along."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in own_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["data"] |= {"packing": {"name": "padded"}, "validation": {"name": "documents"}}
    tree["data"]["train"] = {"name": "chat", "path": "x.jsonl"}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, explicit_end=True))
    assert interop(["export", str(folder), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == DEFAULT_TEMPLATE
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [256] and PLAIN
