"""`jaxtrain export --push-to-hub`: the model card of a run, and what is sent where."""

import json

import huggingface_hub
import pytest
import yaml
from page_cases import make_run
from test_families import write_checkpoint
from test_runs import write_tokenizer

from jaxtrain.cli import main
from jaxtrain.runs.model_card import write_card

BASE = {"base_model": "owner/small", "base_model_revision": "1a2b"}


class FakeApi:
    """What was asked of the hub; `fault` is what it says to an upload."""

    def __init__(self, token="a token", fault=None):
        self.token, self.fault, self.asked, self.sent = token, fault, [], {}

    def whoami(self):
        if not self.token:
            raise OSError("Token is required")

    def create_repo(self, name, **options):
        self.asked.append((name, options))

    def upload_folder(self, repo_id, folder_path, commit_message):
        if self.fault:
            raise RuntimeError(self.fault)
        self.sent[repo_id] = {path.name for path in folder_path.iterdir()}


@pytest.fixture
def api(monkeypatch):
    found = FakeApi()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    return found


@pytest.fixture
def imported(tmp_path):
    """A run that an import has made."""
    folder = write_checkpoint(tmp_path / "in", "llama")
    write_tokenizer(folder)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def test_a_checkpoint_and_its_card_are_sent(imported, tmp_path, api, capsys):
    out = tmp_path / "out"
    push = ["export", str(imported), str(out), "--push-to-hub", "me/small"]
    assert main([*push, "--license", "apache-2.0"]) == 0
    assert api.asked == [("me/small", {"private": True, "exist_ok": True})]
    assert {"README.md", "config.json", "model.safetensors"} <= api.sent["me/small"]
    assert "uploaded https://huggingface.co/me/small" in capsys.readouterr().out
    assert '"license": "apache-2.0"' in (out / "README.md").read_text()


def test_what_is_refused_before_anything_is_written(imported, tmp_path, api, capsys):
    out = tmp_path / "out"
    export = ["export", str(imported), str(out)]
    assert main([*export, "--push-to-hub", "small"]) == 2
    assert main([*export, "--push-to-hub", "../etc/x"]) == 2
    assert main([*export, "--public"]) == 2
    assert main([*export, "--format", "gguf", "--push-to-hub", "me/small"]) == 2
    api.token = None
    assert main([*export, "--push-to-hub", "me/small"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and "hf auth login" in lines[-1] and "--public needs" in lines[2]
    assert not out.exists() and api.asked == []


def test_a_refused_upload_leaves_the_checkpoint(imported, tmp_path, api, capsys):
    api.fault = "403 Forbidden: no write access\nmore"
    out = tmp_path / "out"
    push = ["export", str(imported), str(out), "--push-to-hub", "them/small", "--public"]
    assert main(push) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "403 Forbidden" in line and f"hf upload them/small {out}" in line
    assert (out / "README.md").is_file() and api.asked[0][1]["private"] is False


def test_the_card_is_made_from_the_run(tmp_path):
    run = make_run(tmp_path, "mine")
    (run / "tasks.json").write_text('{"core": 0.25}')
    card = write_card(run, tmp_path, "me/small", "mit", BASE).read_text()
    _, head, text = card.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata["license"] == "mit" and metadata["base_model"] == "owner/small"
    assert "# small\n" in text and "1a2b" in text and "named a licence" not in text
    for part in ("| tokens | 10,000 |", "1 x H200", "| web | 10 documents, 1,000 tokens |",
                 "| validation bits per byte | 1.1364 at step 100 |", "| CORE | 0.2500 |",
                 "| optim.name | adamw |", "    jaxtrain train --config quickstart"):  # fmt: skip
        assert part in text, part


def test_the_texts_of_a_run_cannot_change_the_card(tmp_path):
    run = make_run(tmp_path, "mine")
    hostile = "a|b\n---\n<script>[x](y)"
    (run / "data.json").write_text(json.dumps({hostile: {"documents": 1, "tokens": 2}}))
    (run / "env.json").write_text(json.dumps({"command": ["x", "```\n# no"]}))
    card = write_card(run, tmp_path, "me/small", "x\n---\n# y", {}).read_text()
    assert yaml.safe_load(card.split("---\n", 2)[1])["license"] == "x\n---\n# y"
    assert "<script>" not in card and "\n# no" not in card and "\n# y" not in card
    bare = tmp_path / "bare"
    (bare / "model").mkdir(parents=True)
    assert "not named a licence" in write_card(bare / "model", bare, "me/x", None, {}).read_text()
