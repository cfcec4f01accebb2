"""Repositories of a hub: a revision can be named, and the commit that was read is kept."""

import json

import pytest
import yaml
from hub import Hub, serving
from test_families import write_checkpoint
from test_runs import write_tokenizer
from tiny import run_overrides

from jaxtrain.cli import main as interop
from jaxtrain.data.files import sources
from jaxtrain.interop.load import hub_of, pin_revision
from jaxtrain.interop.tensors import metadata_of
from jaxtrain.main import main


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A model of two commits and a data set, and the commits."""
    folder = write_checkpoint(tmp_path / "in", "llama")
    write_tokenizer(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = Hub()
    lines = "".join(json.dumps({"text": f"To be, or not to be {i}"}) + "\n" for i in range(200))
    hub.first = hub.commit("models/owner/small", files)
    hub.last = hub.commit("models/owner/small", files | {"README.json": b"{}"})
    hub.data = hub.commit("datasets/owner/plays", {"one.jsonl": lines.encode()})
    with serving(hub, tmp_path / "hub", monkeypatch):
        yield hub


def test_what_names_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "small@1").mkdir(parents=True)
    assert hub_of("owner/small") == ("owner/small", None)
    assert hub_of("owner/small@refs/pr/1") == ("owner/small", "refs/pr/1")
    assert hub_of("owner/small@1") is None  # a folder
    assert hub_of("runs/a/b") is None and pin_revision("runs/a/b") == "runs/a/b"


@pytest.mark.slow
def test_a_run_keeps_the_commits_that_it_began_from(hub, tmp_path, capsys):
    tune = {"train.init_from": "owner/small", "finetune.name": "lora", "train.steps": 1}
    tune |= {"data.train.name": "jsonl", "data.validation.name": "none"}
    tune |= {"data.train.path": "hf://datasets/owner/plays/*.jsonl"}
    drop = ("model.", "data.tokenizer", "data.validation.fraction")
    arguments = [a for a in run_overrides(tmp_path, **tune) if not a.startswith(drop)]
    assert main(arguments) == 0
    run = tmp_path / "tiny"
    kept = yaml.safe_load((run / "config.yaml").read_text())["train"]["init_from"]
    assert kept == f"owner/small@{hub.last}"
    expected = {"hf://datasets/owner/plays": hub.data, "owner/small": hub.last}
    assert json.loads((run / "env.json").read_text())["revisions"] == expected
    adapter = json.loads((run / "model" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "owner/small" and adapter["revision"] == hub.last
    assert interop(["export", str(run), str(tmp_path / "out")]) == 0
    said = metadata_of(tmp_path / "out" / "model.safetensors")
    assert (said["base_model"], said["base_model_revision"]) == ("owner/small", hub.last)

    # The main branch goes on, and the run would be another.
    capsys.readouterr()
    hub.commit("models/owner/small", hub.find("models/owner/small", hub.first)[1] | {"x": b""})
    assert main(arguments) == 2
    assert f"train.init_from: owner/small@{hub.last} -> owner/small@" in capsys.readouterr().err


def test_a_revision_can_be_named(hub, tmp_path, capsys):
    source = f"owner/small@{hub.first}"
    assert interop(["import", source, str(tmp_path / "run")]) == 0
    said = metadata_of(tmp_path / "run" / "model" / "model.safetensors")
    assert (said["base_model"], said["base_model_revision"]) == ("owner/small", hub.first)
    assert interop(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert metadata_of(tmp_path / "out" / "model.safetensors")["base_model_revision"] == hub.first
    assert interop(["import", "owner/small@none", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert "no folder owner/small@none, and it cannot be downloaded from huggingface.co" in error
    url = f"hf://datasets/owner/plays@{hub.data}/one.jsonl"
    assert sources.revisions_of([sources.JsonlSource(path=url)]) == {
        "hf://datasets/owner/plays": hub.data
    }
