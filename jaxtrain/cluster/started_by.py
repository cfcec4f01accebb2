"""Commands that a run prints to be pasted, with the launcher (such as `uv run`) that started it."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import psutil

TYPED = "JAXTRAIN_COMMAND"  # the typed command, for processes that `jaxtrain launch` starts
PYTHON = re.compile(r"python[\d.]*")


def command_of(command: str, *arguments: object) -> str:
    """A shell command that runs `jaxtrain COMMAND` in this process's environment."""
    return shlex.join([*program(), command, *map(str, arguments)])


def command_line(command: str = "train") -> str:
    """The command that started this process, as the user would type it."""
    if typed := os.environ.get(TYPED):
        return typed
    if words := uv_run():
        return shlex.join(words)
    if script := installed_script():
        return shlex.join([script, *sys.argv[1:]])
    return command_of(command, *sys.argv[1:])


def installed_script() -> str | None:
    """The word that starts the installed script, if it has started this process."""
    script = Path(sys.argv[0])
    if script.name != "jaxtrain":
        return None
    return script.name if is_on_path(script.absolute()) else str(script)


def is_on_path(script: Path) -> bool:
    """Whether the user's shell finds this script as `jaxtrain`."""
    found = shutil.which("jaxtrain")
    # Not in a descendant of `uv run`: uv has put this folder into its PATH, not the user's shell's.
    found_it = found is not None and Path(found) == script
    return found_it and "UV_RUN_RECURSION_DEPTH" not in os.environ


def typed_again(words: object) -> str | None:
    """The command that started another process, from its `sys.orig_argv`. None if invalid."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    ours = {"jaxtrain.main": ["jaxtrain", "train"], "jaxtrain.cli": ["jaxtrain"]}
    for i, word in enumerate(words):
        if Path(word).name == "jaxtrain":
            return shlex.join(["jaxtrain", *words[i + 1 :]])
        if word == "-m" and words[i + 1 : i + 2] and words[i + 1] in ours:
            return shlex.join([*ours[words[i + 1]], *words[i + 2 :]])
    return shlex.join(words) or None


def program() -> list[str]:
    """The words that start `jaxtrain` from the user's shell."""
    if words := uv_run():
        words = words[: len(words) - len(sys.argv[1:])]
        starts = lambda word: (
            word in ("-m", "--module", "jaxtrain") or PYTHON.fullmatch(Path(word).name)
        )
        options = next((i for i, word in enumerate(words) if starts(word)), len(words) - 1)
        return [*words[:options], "jaxtrain"]
    if script := installed_script():
        return [script]
    here = Path(sys.executable)
    if is_on_path(here.with_name("jaxtrain")):
        return ["jaxtrain"]
    near = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    return [str(near), "-m", "jaxtrain.cli"]


def uv_run() -> list[str]:
    """The typed words of `uv run ...` if it has started this process, else empty."""
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
