"""Losses and bytes of models trained in compressed form by the commands of compress_recipes.yaml.

There are no rates. Losses do not depend on the machine's other work, so recipes may be trained on a
shared one.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from benchmarks.compress_runs import Job, Outcome, in_own_process, line_of
from benchmarks.record import BENCHMARKS, describe
from jaxtrain.runs.saved import WEIGHTS
from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import read_yaml

FILE = BENCHMARKS / "compress_recipes.yaml"
BENCH = "compress_recipes"  # prefix of its record files
REFERENCE = re.compile(r"<(\w+)>")


class Row(NamedTuple):
    """A table row: a model. steps: training steps after the model that it started from."""

    row: str
    model: str
    steps: int


class Recipes(NamedTuple):
    """config: the configuration of all models. models: name -> command. recipes: name -> table."""

    config: str
    models: dict[str, str]
    recipes: dict[str, list[Row]]


def read_recipes(path: Path = FILE) -> Recipes:
    """Read and check the file. Raises UserError for an unknown model, or one that is needed before
    it is defined."""
    found = TypeAdapter(Recipes).validate_python(read_yaml(path))
    seen: set[str] = set()
    for name, line in found.models.items():
        if missing := set(REFERENCE.findall(line)) - seen:
            raise UserError(f"{path.name}: {name} needs {', '.join(sorted(missing))} before it")
        seen.add(name)
    for name, rows in found.recipes.items():
        if missing := {row.model for row in rows} - found.models.keys():
            raise UserError(f"{path.name}: {name} has no model {', '.join(sorted(missing))}")
    return found


def command_of(name: str, recipes: Recipes, folder: Path) -> list[str]:
    """The `jaxtrain` arguments that make a model in folder/NAME."""
    line = REFERENCE.sub(lambda match: str(folder / match[1]), recipes.models[name])
    words = shlex.split(line)
    if words[0] == "train":
        return [*words, f"run.directory={folder}", f"run.name={name}"]
    return [*words, "--out", str(folder / name)]


def make_model(name: str, recipes: Recipes, folder: Path) -> Path:
    """Make a model after those that it needs; an existing one is reused. Returns its folder.

    A command's output goes to folder/NAME.log. Raises UserError with its last line if it failed,
    and for a model that another command made.
    """
    for other in REFERENCE.findall(recipes.models[name]):
        make_model(other, recipes, folder)
    words, out, by = command_of(name, recipes, folder), folder / name, folder / f"{name}.command"
    made = by.is_file() and any((at / WEIGHTS).is_file() for at in (out, out / "model"))
    if made and by.read_text() != shlex.join(words):
        raise UserError(f"{out} was made by another command ({by}); name another --folder")
    if made:
        return out
    folder.mkdir(parents=True, exist_ok=True)
    print(f"making {name}: jaxtrain {shlex.join(words)}", flush=True)
    with (folder / f"{name}.log").open("w") as log:
        run = [sys.executable, "-m", "jaxtrain.cli", *words]
        code = subprocess.run(run, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        last = (folder / f"{name}.log").read_text().strip().rpartition("\n")[2]
        raise UserError(f"compress: the command of {name} failed: {last}")
    by.write_text(shlex.join(words))
    return out


def bench_recipes(names: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the record of each recipe (default all), again after each row."""
    found = read_recipes()
    if unknown := set(names) - found.recipes.keys():
        raise UserError(
            f"compress: there is no recipe {', '.join(sorted(unknown))}; there are "
            f"{', '.join(found.recipes)}"
        )
    for name in names or found.recipes:
        outcomes: list[tuple[Row, Outcome]] = []
        for row in found.recipes[name]:
            where = make_model(row.model, found, folder.absolute())
            outcome = in_own_process(Job(row.row, str(where), rated=False))
            print(f"{name} {row.row}, {row.steps} steps: {line_of(outcome)}", flush=True)
            outcomes.append((row, outcome))
            if any(not outcome.error for _, outcome in outcomes):
                yield record_of(name, outcomes, found)


def record_of(
    name: str, outcomes: Sequence[tuple[Row, Outcome]], recipes: Recipes
) -> dict[str, Any]:
    """The record: a row per model, and the commands that made them; a failed one has `error`."""
    good = next(outcome for _, outcome in outcomes if not outcome.error)
    workload = {"cpus": good.env["cpu_count"], "dtype": good.figures["dtype"]}
    workload["models"] = {
        model: recipes.models[model] for model in recipes.models
        if model in needed([row.model for row, _ in outcomes], recipes)
    }  # fmt: skip
    rows = [
        {"name": row.row, "model": row.model, "steps": row.steps}
        | outcome.figures
        | ({"error": outcome.error} if outcome.error else {})
        for row, outcome in outcomes
    ]
    return describe(BENCH, recipes.config, name, workload, 1, good.env) | {"rows": rows}


def needed(models: Sequence[str], recipes: Recipes) -> set[str]:
    """These models and all models that they depend on."""
    found = set(models)
    for model in models:
        found |= needed(REFERENCE.findall(recipes.models[model]), recipes)
    return found
