"""Commands that a run prints to be pasted: with what came before `python` when it was started."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import psutil

TYPED = "JAXTRAIN_COMMAND"  # what was typed, for the processes that `jaxtrain.launch` starts
PYTHON = re.compile(r"python[\d.]*")


def command_of(module: str, *arguments: object) -> str:
    """A shell command that runs `python -m jaxtrain.MODULE` in this process's environment."""
    words = [*python(), "-m", f"jaxtrain.{module}", *map(str, arguments)]
    return shlex.join(words)


def command_line(module: str = "main") -> str:
    """The command that started this process, `jaxtrain.MODULE`, to be typed again."""
    if typed := os.environ.get(TYPED):
        return typed
    if words := uv_run():
        return shlex.join(words)
    script = Path(sys.argv[0])
    if script.name != "jaxtrain":  # the installed one
        return command_of(module, *sys.argv[1:])
    found = shutil.which(script.name)
    first = script.name if found and Path(found) == script.absolute() else str(script)
    return shlex.join([first, *sys.argv[1:]])


def python() -> list[str]:
    """The words that start this interpreter from the shell that this process was started from."""
    if words := uv_run():
        words = words[: len(words) - len(sys.argv[1:])]
        program = lambda word: word in ("-m", "--module") or PYTHON.fullmatch(Path(word).name)
        options = next((i for i, word in enumerate(words) if program(word)), len(words) - 1)
        return [*words[:options], "python"]
    here, found = Path(sys.executable), shutil.which("python")
    # Inside `uv run`, but not by it: what it has put first in PATH, the user's shell has not.
    if found and Path(found) == here and "UV_RUN_RECURSION_DEPTH" not in os.environ:
        return ["python"]
    return [str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)]


def uv_run() -> list[str]:
    """`uv run ...` as it was typed, where that has started this process; else nothing."""
    try:
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent else []
    except psutil.Error:
        return []
    arguments = sys.argv[1:]
    program = words[: len(words) - len(arguments)]
    if len(program) < 3 or Path(program[0]).stem != "uv" or "run" not in program:
        return []
    return ["uv", *words[1:]] if words[len(program) :] == arguments else []
