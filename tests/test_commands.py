"""The commands that are printed to be pasted, by how a process was started."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from jaxtrain.cluster import launch
from jaxtrain.cluster import started_by as commands
from jaxtrain.cluster.started_by import TYPED, command_line, command_of, typed_again

ARGUMENTS = ["--config", "quickstart", "run.name=my run", "data.train.path=*.txt"]
QUOTED = "--config quickstart 'run.name=my run' 'data.train.path=*.txt'"


@pytest.fixture
def started(monkeypatch):
    """A function that makes this process one that was started so."""
    monkeypatch.delenv(TYPED, raising=False)
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)

    def start(parent, script="/x/jaxtrain/main.py", arguments=ARGUMENTS):
        words = [*parent.split(), *arguments]
        process = SimpleNamespace(parent=lambda: SimpleNamespace(cmdline=lambda: words))
        monkeypatch.setattr(psutil, "Process", lambda: process)
        monkeypatch.setattr(sys, "argv", [script, *arguments])

    return start


@pytest.mark.parametrize(
    ("parent", "options"),
    [
        ("/usr/bin/uv run python -m jaxtrain.main", ""),
        ("uv run --extra gpu --extra hf python3 -u -m jaxtrain.main", " --extra gpu --extra hf"),
        ("uv run -m jaxtrain.main", ""),
        ("uv run --no-sync jaxtrain", " --no-sync"),
    ],
)
def test_what_uv_run_has_started_is_printed_with_uv_run_and_its_options(parent, options, started):
    started(parent)
    expected = f"uv run{options} jaxtrain generate 'runs/my run' --prompt ..."
    assert command_of("generate", Path("runs/my run"), "--prompt", "...") == expected
    assert command_line() == f"uv {parent.partition(' ')[2]} {QUOTED}"


def test_without_uv_it_is_the_command_of_the_python_that_runs(started, monkeypatch, tmp_path):
    started("bash -c x")
    monkeypatch.setattr(sys, "executable", "/venv/bin/python3")
    monkeypatch.setattr(shutil, "which", lambda name: f"/venv/bin/{name}")
    monkeypatch.setattr(sys, "executable", "/other/bin/python3")
    assert command_of("report", "runs/a") == "/other/bin/python3 -m jaxtrain.cli report runs/a"
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert command_of("report", "runs/a") == "jaxtrain report runs/a"
    assert command_line() == f"jaxtrain train {QUOTED}"
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")  # a script inside `uv run`
    assert command_of("report").startswith("/venv/bin/python -m ")
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/.venv/bin/python")
    monkeypatch.chdir(tmp_path)
    assert command_of("report").startswith(".venv/bin/python -m ")


def test_the_installed_command_is_printed_as_it_is_found(started, monkeypatch):
    started("bash", script="/venv/bin/jaxtrain")
    monkeypatch.setattr(shutil, "which", lambda name: f"/venv/bin/{name}")
    assert command_line() == f"jaxtrain {QUOTED}"
    assert command_of("generate", "runs/a") == "jaxtrain generate runs/a"
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")  # a shell inside `uv run`
    assert command_of("report") == "/venv/bin/jaxtrain report"
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH")
    for found in (None, "/other/bin/jaxtrain"):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        assert command_line() == f"/venv/bin/jaxtrain {QUOTED}"
        assert command_of("generate", "runs/a") == "/venv/bin/jaxtrain generate runs/a"


def test_processes_of_launch_print_what_started_launch(started, monkeypatch):
    options = ["--processes", "2", "--", "--config", "gpt_d12"]
    started(
        "uv run jaxtrain launch",
        script="/x/jaxtrain/cluster/launch.py",
        arguments=options,
    )
    seen = []
    monkeypatch.setattr(
        launch, "run_processes", lambda lines, environments: seen.append(environments) or 0
    )
    assert launch.main(options) == 0
    typed = "uv run jaxtrain launch --processes 2 -- --config gpt_d12"
    assert [variables[TYPED] for variables in seen[0]] == [typed] * 2
    monkeypatch.setenv(TYPED, typed)
    assert command_line() == typed


@pytest.mark.skipif(not shutil.which("uv"), reason="needs uv")
def test_a_printed_command_runs_where_it_was_printed(tmp_path):
    """From a shell whose python has no jaxtrain, as after `pip install uv`."""
    root = Path(commands.__file__).parents[1]
    code = "from jaxtrain.cluster.started_by import *; print(command_of('report', '--help'))"
    uv = [shutil.which("uv"), "run", "--no-sync", "--project", str(root), "--offline"]
    shell = {k: v for k, v in os.environ.items() if not k.startswith(("UV", "VIRTUAL_ENV"))}
    shell["PATH"] = os.pathsep.join(
        p for p in shell["PATH"].split(os.pathsep) if not p.startswith(str(root))
    )
    run = lambda line, **how: subprocess.run(line, cwd=tmp_path, env=shell, text=True, **how)
    done = run([*uv, "python", "-c", code], capture_output=True, check=True)
    assert done.stdout == f"{' '.join(['uv', *uv[1:]])} jaxtrain report --help\n"
    run(done.stdout, shell=True, check=True)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/v/python", "/v/bin/jaxtrain", "train", "a b"], "jaxtrain train 'a b'"),
        (["python", "-m", "jaxtrain.main", "--config", "x"], "jaxtrain train --config x"),
        (["python", "-m", "jaxtrain.cli", "train"], "jaxtrain train"),
        (["python", "mine.py"], "python mine.py"),
        (None, None),
        ([1], None),
    ],
)
def test_the_command_that_started_a_run_can_be_typed_again(words, command):
    assert typed_again(words) == command
