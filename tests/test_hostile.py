"""Whatever a command is given: one line and exit code 2, at once, and nothing written by halves."""

import importlib
import json
import shutil
import subprocess
import sys

import pytest
from hostile_cases import COMMANDS
from hostile_files import CASES, flipped
from tiny import LLAMA, random_run

from jaxtrain.cli import main as interop
from jaxtrain.main import main
from jaxtrain.train.prepare import main as prepare


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with `run`, a random model of bytes, and `hf`, the same as a checkpoint."""
    folder = tmp_path_factory.mktemp("hostile")
    model = json.dumps(LLAMA | {"vocab_multiple": 1, "width": 32, "window_pattern": "L"})
    overrides = [
        f"model={model}", "data.tokenizer.name=bytes", "train.sequence_length=32",
        "train.batch_size=8", "train.steps=3", "optim.schedule.warmup_steps=0",
        "data.train.document=paragraph", "run.name=run", f"run.directory={folder}",
    ]  # fmt: skip
    random_run(folder / "run", overrides)
    assert interop(["export", str(folder / "run"), str(folder / "hf"), "--family", "llama"]) == 0
    return folder


@pytest.fixture
def here(base, tmp_path, monkeypatch):
    """A copy of that folder, to be damaged, as the one that commands are called in."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXTRAIN_CORE", raising=False)
    return tmp_path


def put(files, folder):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(path.read_bytes()) if callable(content) else content)


def check(case, here, capsys):
    put(case.files, here)
    code = importlib.import_module(COMMANDS[case.command]).main(case.arguments)
    error = capsys.readouterr().err
    assert code == 2, f"accepted: {error}"
    (line,) = error.splitlines()
    assert line.startswith("error: ") and case.words in line


NAMES = [f"{i}-{one.command} {' '.join(one.arguments)[:60]!a}" for i, one in enumerate(CASES)]
OFTEN = 8  # one case of so many is in the default tier, and the first of each command
FIRST = {one.command: i for i, one in reversed(list(enumerate(CASES)))}
QUICK = {*FIRST.values(), *range(0, len(CASES), OFTEN)}
TIERS = [
    pytest.param(one, marks=[pytest.mark.slow] * (i not in QUICK), id=name)
    for i, (one, name) in enumerate(zip(CASES, NAMES))
]


@pytest.mark.parametrize("case", TIERS)
def test_one_line_and_exit_code_2(case, here, capsys):
    check(case, here, capsys)


def test_there_are_cases_of_every_command():
    assert len(CASES) > 600 and FIRST.keys() == {*COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["-c", "-m"])
def test_a_process_says_the_same(start, here):
    """As a user starts it: no traceback, no warning beside the line."""
    program = ["-m", "jaxtrain.inference.generate"]
    if start == "-c":
        program = [
            "-c",
            "import sys; from jaxtrain.inference.generate import main; sys.exit(main())",
        ]
    (here / "run" / "model" / "config.yaml").write_text("run: {}\n")
    found = subprocess.run([sys.executable, *program, "run"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith("error: run/model/config.yaml is cut short")


# ---- what is damaged, and whether the advice helps ----------------------------------------------


def test_the_config_of_a_run_that_goes_on_is_whole_or_said_to_be_cut(here, capsys):
    (here / "run" / "config.yaml").write_bytes((here / "run/model/config.yaml").read_bytes()[:-9])
    assert main(["run.directory=.", "run.name=run", "train.steps=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: run/config.yaml is cut short: its last line must be '...'")


def test_a_damaged_tokenizer_of_the_cache_takes_with_it_what_it_made(here, capsys):
    words = ["hear", "me", "speak", "all", "resolved", "rather", "to", "die"]
    text = " ".join(f"{a} {b}{c}" for a in words for b in words for c in words)
    (here / "t.txt").write_text(text)
    command = ["data.train.path=t.txt", "data.tokenizer.vocab_size=280", "data.prepare_workers=1"]
    assert prepare(command) == 0
    (file,) = (here / "cache").rglob("tokenizer.model")
    whole, entry = file.read_bytes(), file.parents[1]
    file.write_bytes(flipped(0.3)(whole))
    capsys.readouterr()
    for _ in range(2):  # nothing is made with it
        assert prepare(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{file} is damaged: " in line
        assert line.endswith(f"delete {entry} to have the tokenizer and the data prepared again")
    shutil.rmtree(entry)
    assert prepare(command) == 0 and file.read_bytes() == whole


def test_sections_that_a_checkpoint_has_twice_are_named(here, capsys):
    """Two shards with the same tensor: neither is taken for the other."""
    folder = here / "hf"
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    index = {
        "weight_map": {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert interop(["import", "hf", "out"]) == 2
    assert "a.safetensors and b.safetensors have " in capsys.readouterr().err
