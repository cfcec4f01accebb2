"""The case study: its parts in their order, the seconds of interrupted ones, and one whole run."""

import importlib
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import jax
import pytest

from benchmarks import case_study, projection
from benchmarks.case_study import SHRUNK, STUDIES, Part, parts_of, run_part, tiny_data
from benchmarks.record import read_results
from jaxtrain.cli import main as command_line
from jaxtrain.config import find_config, load_config
from jaxtrain.settings import UserError

main = importlib.import_module("benchmarks.__main__").main
NAMES = ["filter", "prepare", "pretrain", "evaluate", "sft", "dpo", "quantize", "chat"]


@pytest.mark.parametrize("study", [*STUDIES.values(), SHRUNK], ids=[*STUDIES, "shrunk"])
def test_every_part_has_a_configuration_that_loads(study, tmp_path):
    (tmp_path / "core").mkdir()
    parts = parts_of(study, tmp_path, tmp_path / "out")
    assert [part.name for part in parts] == [*NAMES[:4], "core", *NAMES[4:]]
    for part in parts:
        words = list(part.arguments)
        fields = [word for word in words if "=" in word and not word.startswith("train.init_from=")]
        if words[0] in ("train", "prepare"):
            load_config(find_config(words[words.index("--config") + 1]), fields)
        elif words[0] == "filter":
            load_config(find_config(words[1]), fields)
    assert [x.name for x in parts_of(study, tmp_path / "no", tmp_path)] == NAMES  # without CORE


def python_part(code):
    """A part whose command is a line of Python in the place of jaxtrain's."""
    return Part("one", (code,), lambda: {"bpb": 1.5})


@pytest.fixture
def python(monkeypatch):
    popen = case_study.subprocess.Popen
    instead = lambda command, **more: popen([sys.executable, "-c", command[-1]], **more)
    monkeypatch.setattr(case_study.subprocess, "Popen", instead)
    monkeypatch.setattr(case_study, "HEARTBEAT", 0.01)


@pytest.mark.usefixtures("python")
def test_the_seconds_of_two_attempts_add_up(tmp_path):
    done = {}
    with pytest.raises(UserError, match=r"one failed .*one\.log\): it broke"):
        run_part(
            python_part("import time; time.sleep(0.2); print('it broke'); raise SystemExit(2)"),
            tmp_path,
            done,
        )
    first = done["one"]["seconds"]
    assert first > 0 and "done" not in done["one"]
    run_part(python_part("import time; time.sleep(0.2)"), tmp_path, done)
    assert done["one"]["seconds"] > first and done["one"]["figures"] == {"bpb": 1.5}
    assert json.loads((tmp_path / "study.json").read_text()) == done


def test_a_study_without_its_data_is_one_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["case-study", "h100"]) == 2
    assert "name one of h200" in capsys.readouterr().err
    assert main(["case-study", "h200"]) == 2
    assert "--data FOLDER is missing" in capsys.readouterr().err
    tiny_data(tmp_path / "data")
    (tmp_path / "data" / "pairs").rename(tmp_path / "data" / "other")
    assert main(["case-study", "h200", "--data", "data"]) == 2
    assert "data has no folder pairs" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_study_at_a_tiny_size(tmp_path, monkeypatch):
    """From raw text to an answer of a quantized chat model; a second call repeats nothing.

    Its first command is a process, and the others run here: each would import everything anew."""
    devices, real, begun = jax.devices()[:1], case_study.subprocess, []

    def begin(command, stdout, stderr):
        begun.append(command[3])
        if len(begun) == 1:
            return real.Popen(command, stdout=stdout, stderr=stderr)
        with redirect_stdout(stdout), redirect_stderr(stdout):
            code = command_line(command[3:])
        return SimpleNamespace(wait=lambda *_: code, terminate=lambda: None)

    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    named = {"STDOUT": real.STDOUT, "TimeoutExpired": real.TimeoutExpired}
    monkeypatch.setattr(case_study, "subprocess", SimpleNamespace(Popen=begin, **named))
    folder, out = tmp_path / "case", tmp_path / "out"
    argv = [
        "case-study",
        "h200",
        "--shrink",
        "--folder",
        str(folder),
        "--record",
        "--out",
        str(out),
    ]
    assert main(argv) == 0
    (record,) = read_results(out)
    assert [row["name"] for row in record["rows"]] == NAMES and len(begun) == len(NAMES)
    assert record["device"] == "cpu" and record["variant"] == "shrunk" and record["answers"]
    rows = {row["name"]: row for row in record["rows"]}
    assert record["metrics"]["seconds"] == pytest.approx(sum(r["seconds"] for r in rows.values()))
    assert rows["pretrain"]["tokens"] == 3 * 4 * 128 and 0 < rows["pretrain"]["bpb"] < 10
    assert "accuracy" in rows["dpo"] and rows["quantize"]["after"]["bpb"] > 0
    monkeypatch.setattr(case_study, "run_part", lambda *_: pytest.fail("it runs again"))
    assert main(argv) == 0


def step(variant, devices, rate):
    metrics = {"tokens_per_s": rate}
    return {"bench": "step", "config": "gpt_d24", "variant": variant, "device_count": devices,
            "metrics": metrics}  # fmt: skip


def test_a_projection_carries_the_efficiency_of_four_gpus_on_to_eight():
    """0.81 on four is 0.9 a doubling: 0.729 on eight."""
    records = [step("accumulation 4", 1, 100.0), step("accumulation 4", 4, 324.0),
               step("accumulation 4, fsdp", 4, 256.0), step("bf16", 4, 1.0)]  # fmt: skip
    (row,) = projection.project(records)["rows"]
    assert row["efficiency"] == pytest.approx(0.729)
    assert row["efficiency_low"] == pytest.approx(0.512)  # of fsdp: 0.64 on four
    assert row["projected_tokens_per_s"] == pytest.approx(583.2)
    assert row["hours"] == pytest.approx(row["tokens"] / 583.2 / 3600)
    law = {
        "bench": "scaling",
        "config": "gpt",
        "device_count": 1,
        "file": "scaling.json",
        "metrics": {"tokens_to_core": [1e6, 2e6, 4e6]},
    }
    fitted = projection.project([*records, law])
    (row,) = fitted["rows"]
    assert fitted["workload"]["tokens_from"] == "scaling.json"
    assert row["hours_low"] == pytest.approx(1e6 / 800 / 3600)
    assert row["hours_high"] == pytest.approx(4e6 / (800 * 0.512) / 3600)
    with pytest.raises(UserError, match="no records of gpt_d24, accumulation 4"):
        projection.project(records[:1])
