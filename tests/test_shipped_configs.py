"""The shipped configurations: each is whole, says how to run it, and takes two steps."""

from pathlib import Path

import pytest
import yaml
from tiny import SHIPPED, run_overrides

import jaxtrain
from jaxtrain.config import find_config, load_config, to_yaml
from jaxtrain.config.resolve import Resolved, resolve
from jaxtrain.main import main
from jaxtrain.runs.history import read_rows

ROOT = Path(jaxtrain.__file__).parents[1]


def scratch(name):
    """Overrides with which a config that goes on with a model begins with a new one."""
    return ["train.init_from=null"] if name == "continue" else []


@pytest.mark.parametrize("name", SHIPPED)
def test_round_trip_through_yaml(name, tmp_path):
    config = load_config(find_config(name), scratch(name))
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "c.yaml") == config
    resolved = resolve(config, 1000)
    assert Resolved.model_validate(yaml.safe_load(to_yaml(resolved))) == resolved


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_says_how_to_run_it(name):
    text = find_config(name).read_text()
    assert text.startswith("# ") and "#   jaxtrain train --config " in text


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.slow
def test_a_shipped_config_takes_two_steps_when_shrunk(name, tmp_path, capfd):
    """The whole command, on the shipped corpus, with a model of nothing."""
    changes = {
        "model__depth": 2 if name == "moe_tiny" else 1,
        "train__steps": 2,
        "train__fit": "false",
        "sample__prompts": "[]",
        "checkpoint__every": "null",
        "data__train__name": "text",
        "data__train__path": "tinyshakespeare",
    }
    shipped = load_config(find_config(name), scratch(name))
    if shipped.model.kv_heads:
        changes["model__kv_heads"] = 2
    if shipped.train.phases:
        phases = "[{until: 1, model: {depth: 1}, grow: stack}]"
        changes |= {"model__depth": 2, "train__phases": phases}
    if shipped.objective.name != "next_token":
        changes["objective__name"] = "next_token"
    if shipped.data.validation.name == "documents":
        changes |= {"data__train__document": "paragraph", "data__validation__fraction": 0.1}
    if shipped.train.precision == "float16":  # a CPU computes it slowly
        changes |= {"train__precision": "auto", "model__vocab_multiple": 64}
    if shipped.finetune.name != "full" or name == "continue":  # from a model of this shape
        changes["model__depth"] = 1
        whole = changes | {"run__name": "whole", "train__steps": 1, "finetune__name": "full"}
        whole |= {"train__init_from": "null"}
        arguments = run_overrides(tmp_path, **whole)
        assert main(["--config", name, *arguments]) == 0, capfd.readouterr().err
        changes |= {"train__init_from": tmp_path / "whole"}
    arguments = run_overrides(tmp_path, **changes)
    assert main(["--config", name, *arguments]) == 0, capfd.readouterr().err
    rows = read_rows(tmp_path / "tiny" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == 2 and all(3 < loss < 8 for loss in losses)
    assert (tmp_path / "tiny" / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "tiny" / "samples").exists()
