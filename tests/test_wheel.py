"""What the wheel ships is listed by name; `.ci/wheel` builds one and tries it."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import jaxtrain

ROOT = Path(jaxtrain.__file__).parents[1]


def shipped():
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]
    return targets["wheel"]["force-include"]


def test_every_config_of_the_repository_is_shipped_and_no_other():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "configs"]
    tracked = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert sorted(shipped()) == sorted(tracked)
    assert all(shipped()[name] == f"jaxtrain/{name}" for name in tracked)


def test_type_checkers_see_the_annotations():
    assert (ROOT / "jaxtrain" / "py.typed").is_file()
    assert (ROOT / "kernels" / "jaxtrain_kernels" / "py.typed").is_file()
