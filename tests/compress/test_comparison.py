"""Validation before and after quantization, and the stages that the command shows."""

import io
import json

import pytest
from rich.console import Console
from tiny import byte_model, random_run

from jaxtrain.cli import main
from jaxtrain.compress import comparison, stages
from jaxtrain.compress.quantize import text_config
from jaxtrain.evaluation.evaluate import ValidationProgram, evaluate
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int4", "gptq", "int8", "nf4", "float8", "awq", "w8a8"])
def test_the_figures_are_those_of_the_packed_model(method, tmp_path, monkeypatch, capsys):
    """One program for both models where matrices are multiplied as arrays, else one for each."""
    fields = ["data.train.path=tinyshakespeare", "model.depth=2", "train.precision=float32"]
    run, text = random_run(tmp_path / "run", byte_model(32, *fields)), tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 20)
    made, init = [], ValidationProgram.__init__
    spied = lambda self, *rest: made.append(init(self, *rest))
    monkeypatch.setattr(ValidationProgram, "__init__", spied)
    out = tmp_path / "small"
    line = ["quantize", str(run), "--method", method, "--out", str(out), "--text", str(text)]
    read = method in ("gptq", "awq", "w8a8")
    assert main([*line, *(["--sequences", "8", "--calibration", str(text)] if read else [])]) == 0
    assert len(made) == (2 if method in ("awq", "w8a8") else 1)
    recorded = json.loads((out / "quantization.json").read_text())
    for model, when in ((load_saved(run), "before"), (load_saved(out), "after")):
        for name, value in evaluate(model, text_config(model.config, text)).items():
            assert recorded[when][name] == pytest.approx(value, rel=2e-6)
    assert recorded["before"]["loss"] != recorded["after"]["loss"]
    names = ["model", *(["calibration text", "layers"] if read else []), "pack"]
    shown = capsys.readouterr()
    (line,) = (x for x in shown.out.splitlines() if x.startswith("seconds  "))
    stages = line.removeprefix("seconds  ").partition(";")[0].split(", ")
    after = ["text before", "save", "text after"]
    assert [stage.rpartition(" ")[0] for stage in stages] == [*names, *after]
    assert f"quantize {names[-2]}\nquantize pack\n" in shown.err


def test_an_error_of_the_thread_is_raised_where_its_result_is_read(tmp_path):
    run = random_run(tmp_path / "run", byte_model(32, "model.depth=1", "data.validation.name=none"))
    saved = load_saved(run)
    compared = comparison.BeforeAfter(saved, saved.config)
    with pytest.raises(UserError, match="data.validation is none"):
        compared.before()


def test_a_stage_in_a_file_is_a_line_and_more_as_time_passes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stages.time, "monotonic", lambda: now[0])
    shown = stages.Stages("quantize")
    file = io.StringIO()
    shown.console = Console(file=file)
    with shown.stage("layers") as advance:
        for i in range(1, 13):
            now[0] += 4
            advance(i, 12)
    lines = file.getvalue().splitlines()
    assert lines[:2] == ["quantize layers", "quantize layers 3 of 12, 36 s left"]
    assert len(lines) == 4 and shown.seconds == {"layers": 48.0}
    assert shown.summary() == "seconds  layers 48.0; 48.0 in all"
