"""`jaxtrain quantize --core`: CORE before and after, of the models that it names."""

import json

import pytest
from task_cases import FIELDS
from tiny import random_run

from jaxtrain.cli import main
from jaxtrain.compress import quantize
from jaxtrain.evaluation.tasks import identity
from jaxtrain.runs.saved import load_saved


@pytest.fixture
def command(tmp_path):
    """quantize(more arguments) -> the exit code; the model is `run`, the new one `small`."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 20)
    run = random_run(tmp_path / "run", FIELDS)
    given = ["quantize", str(run), "--method", "int4", "--group-size", "16", "--text", str(text)]
    return lambda *more: main([*given, "--out", str(tmp_path / "small"), *more])


def test_core_is_asked_of_the_model_before_and_of_the_one_after(
    command, bundle, tmp_path, monkeypatch, capsys
):
    asked = []

    def run_tasks(saved, config, bundle, labels, out, rules):
        asked.append((identity(saved, config), labels, out.name, rules.limit))
        return {"core": 0.25 * len(asked)}

    monkeypatch.setattr(quantize, "run_tasks", run_tasks)
    assert command("--core", "--bundle", str(bundle), "--limit", "6") == 0
    models = [load_saved(tmp_path / name) for name in ("run", "small")]
    files = "tasks_before.json", "tasks.json"
    assert asked == [
        (identity(saved, saved.config), ["core"], file, 6)
        for saved, file in zip(models, files, strict=True)
    ]
    assert "| CORE | 0.2500 | 0.5000 |" in capsys.readouterr().out


@pytest.mark.slow
def test_core_before_and_after_is_that_of_each_model(command, bundle, tmp_path, capsys):
    assert command("--core", "--bundle", str(bundle), "--limit", "6") == 0
    said = json.loads((tmp_path / "small" / "quantization.json").read_text())
    models = {"before": tmp_path / "run", "after": tmp_path / "small"}
    files = {"before": "tasks_before.json", "after": "tasks.json"}
    for when, folder in models.items():
        saved = load_saved(folder)
        kept = json.loads((tmp_path / "small" / files[when]).read_text())
        assert said[when]["core"] == kept["core"] and len(kept["tasks"]) == 3
        assert kept["model"] == identity(saved, saved.config)
    row = f"| CORE | {said['before']['core']:.4f} | {said['after']['core']:.4f} |"
    assert row in capsys.readouterr().out
    assert row in (tmp_path / "small" / "quantization.md").read_text()


def test_what_cannot_be_asked_is_one_line_before_anything_is_written(
    command, bundle, tmp_path, capsys
):
    assert command("--core", "--bundle", str(bundle), "--limit", "4") == 2
    assert "sums shows 4 examples before each question" in capsys.readouterr().err
    assert command("--core", "--bundle", str(tmp_path / "none")) == 2
    assert "there is no evaluation bundle at" in capsys.readouterr().err
    assert command("--limit", "4") == 2
    assert "--bundle and --limit need --core" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()
