"""The README's commands can be pasted into bash and zsh."""

import re
from pathlib import Path

import pytest

import jaxtrain

README = (Path(jaxtrain.__file__).parents[1] / "README.md").read_text()
# Starts of lines that are commands; "..." stands for one that is printed above it.
STARTS = ("uv ", "pip ", "python ", "sbatch ", "kubectl ", "JAXTRAIN_", "HOSTS=", "jaxtrain ")


def commands():
    """Indented lines of the README, with their continuation lines."""
    text = re.sub(r"<!-- quickstart output -->.*?<!-- end -->", "", README, flags=re.DOTALL)
    lines = re.findall(r"^    ((?:[^\n]*\\\n)*[^\n]+)$", text, flags=re.MULTILINE)
    return [line for line in lines if line.startswith(STARTS)]


def unquoted(command):
    """What is left of a command outside its quotes."""
    return re.sub(r"'[^']*'|\"[^\"]*\"", "''", command)


def test_there_are_commands():
    assert len(commands()) > 20 and any("\\\n" in command for command in commands())


@pytest.mark.parametrize("command", commands())
def test_a_command_can_be_pasted(command):
    """zsh takes an unquoted * ? [ { ~ ^ for a pattern, fails where no file matches, and knows no
    comments when it is interactive."""
    assert not re.search(r"[*?\[\]{}~^#!<>]", unquoted(command)), command
    assert not re.search(r"\b(NAME|RUN|CONFIG|DIR|I|OWNER|PATH)\b", unquoted(command)), command
