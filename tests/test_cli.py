"""`jaxtrain COMMAND`: the table of commands, help, completion, and what loads no JAX."""

import os
import subprocess
import sys

import pytest

from jaxtrain import __version__, cli
from jaxtrain.cli import COMMANDS, candidates, find, main, overview
from jaxtrain.config import Config, fields
from jaxtrain.interop.tensors import DTYPES
from jaxtrain.runs import arguments
from jaxtrain.train.field_help import all_fields, read_schema, section_help

HELP = """
import contextlib, io, sys
from jaxtrain.cli import COMMANDS, main
def shown(words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        assert main(words) == 0
    return out.getvalue()
pages = {name: shown([name, "--help"]) for name in COMMANDS}
pages |= {"": shown(["--help"]), "optim": shown(["train", "--help", "optim"])}
assert all(f"usage: jaxtrain {name} " in pages[name] for name in COMMANDS), pages
assert "optim.matrix_lr" in pages["optim"]
heavy = {"jax", "flax", "optax", "grain", "matplotlib", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_of_every_command_loads_no_jax():
    subprocess.run([sys.executable, "-c", HELP], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name):
    assert callable(find(COMMANDS[name].main)) and COMMANDS[name].summary in overview()


def test_overview_and_the_help_of_train_are_one_screen(capsys):
    assert main([]) == 2 and capsys.readouterr().out.strip() == overview()
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    for page in (overview(), capsys.readouterr().out):
        lines = page.splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80, page
    assert "jaxtrain train --config quickstart; " in overview()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "jaxtrain trian: no such command; did you mean train?"),
        (["zzz"], f"jaxtrain zzz: no such command; there are {', '.join(COMMANDS)}"),
        (["--help", "optm"], "--help optm: no such section or field; did you mean optim?"),
        (["train", "--help", "model.dept"], "--help model.dept: no such section or field; did you "
         "mean model.depth?"),
    ],
)  # fmt: skip
def test_a_misspelt_word_is_one_line_with_the_nearest(words, line, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_help_of_a_section_lists_each_of_its_fields(capsys):
    assert main(["--help", "optim"]) == 0
    page = capsys.readouterr().out
    for path, field, _ in fields(Config):
        if path.startswith("optim.") and not path.endswith(".name"):
            assert f"\n{path}  " in page and (field.description or "")[:30] in page, path
    assert 'default "muon"' in page and "[adafactor]" in page
    assert "model.depth  integer >= 1 <= 10000, default 12" in section_help("model")
    assert "path" not in section_help("model") and "required" in section_help("data.train")


def test_the_schema_that_help_reads_has_every_field():
    paths = {field.path for field in all_fields(read_schema())}
    known = {path for path, *_ in fields(Config)}
    inside = ("data.train.sources.NAME.source.", "data.stages[].", "train.phases[].")
    assert len(paths) > 250
    assert {path for path in known if not path.startswith(inside)} <= paths


def test_version_and_config(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"jaxtrain {__version__}\n"
    assert main(["config"]) == 0 and "gpt_d12 " in capsys.readouterr().out
    assert main(["config", "quickstart", "train.steps=7"]) == 0
    assert "steps: 7\n" in capsys.readouterr().out
    assert main(["config", "--schema"]) == 0
    assert capsys.readouterr().out.startswith('{\n "$defs"')


def test_the_first_arguments_of_a_command_come_in_front(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "find", lambda target: lambda argv: seen.append((target, argv)) or 0)
    for words in (["chat", "runs/a"], ["estimate", "--config", "x"], ["--config", "x"], ["a.b=1"]):
        assert main(words) == 0
    assert seen == [
        ("inference.generate:main", ["--chat", "runs/a"]),
        ("main:main", ["--dry-run", "--config", "x"]),
        ("main:main", ["--config", "x"]),
        ("main:main", ["a.b=1"]),
    ]


def test_choices_of_export_are_those_of_the_code():
    assert set(arguments.DTYPES) == {dtype.name for dtype in DTYPES.values()}


@pytest.mark.parametrize(
    ("command", "missing"), [("sweep", "SWEEP.yaml"), ("show-data", "config"), ("evaluate", "run")]
)
def test_overrides_are_not_required(command, missing, capsys):
    assert main([command]) == 2
    said = f"error: the following arguments are required: {missing}; see --help\n"
    assert capsys.readouterr().err == said


# ---- completion --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("jaxtrain show", "show-data "),
        ("jaxtrain train --conf", "--config "),
        ("jaxtrain train --config quick", "quickstart "),
        ("jaxtrain train --config quickstart optim.matrix_l", "optim.matrix_lr="),
        ("jaxtrain export a b --family gpt", "gpt2 "),
    ],
)
@pytest.mark.quick("jaxtrain train --config quick-quickstart ")
def test_a_shell_is_answered(line, expected, tmp_path):
    answer = tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS":
        "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "COMP_TYPE": "9",
    }  # fmt: skip
    program = [sys.executable, "-c", "from jaxtrain.cli import main; main()"]
    subprocess.run(program, env=os.environ | asked, check=True)
    assert answer.read_text() == expected


def test_the_values_of_a_field_complete():
    class Action:
        dest = "overrides"

    assert "optim.name=muon" in candidates("optim.name=", Action)
    assert candidates("mesh.zero=", Action) == ["mesh.zero=1", "mesh.zero=2", "mesh.zero=3"]
    assert "train.steps=" in candidates("train.st", Action)


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_each_shell_has_a_script(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "jaxtrain" in capsys.readouterr().out
