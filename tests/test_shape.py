"""The shape of the house: how many rooms, what each says of itself, a loop that names nothing."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.finetune import METHODS
from jaxtrain.objectives import OBJECTIVES
from jaxtrain.optim import OPTIMIZERS
from jaxtrain.train import loop

PACKAGE = Path(jaxtrain.__file__).parent
FOLDERS = sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
# What a practitioner calls a technique; also every row of a table.
TECHNIQUES = {
    "float8", "fp8", "amax", "loss_scale", "spike", "nonfinite", "local_sgd", "diloco", "gossip",
    "replica", "lora", "adapter", "prompt", "preference", "reference", "kto", "moe", "expert",
    "pipeline", "ema", "dropout", "quant",
}  # fmt: skip


def test_the_package_has_at_most_twenty_two_folders_and_modules():
    modules = [path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert len(FOLDERS) + len(modules) <= 22


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_says_what_lives_there(folder):
    words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert len(words.split()) >= 8


@pytest.mark.parametrize("function", [loop.train, loop.train_phase])
def test_train_has_at_most_a_hundred_lines(function):
    assert len(inspect.getsource(function).splitlines()) <= 100


def test_train_names_no_technique():
    source = ast.unparse(ast.parse(inspect.getsource(loop.train_phase)))
    words = set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)*", source.lower()))
    parts = words | {part for word in words for part in word.split("_")}
    rows = {*METHODS, *OBJECTIVES, *OPTIMIZERS} - {"full"}
    assert not parts & (TECHNIQUES | rows)
