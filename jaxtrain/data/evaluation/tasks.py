"""Evaluation tasks in the layout of nanochat's and llm-foundry's bundle.

A bundle is a folder, or an archive of one, with `core.yaml` (the tasks), `eval_meta_data.csv`
(their random baselines in percent) and `eval_data/` (JSONL, an example a line).
"""

import csv
import difflib
import gzip
import hashlib
import json
import lzma
import os
import random
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, ValidationError

from jaxtrain.settings import Settings, UserError, parse_json
from jaxtrain.storage.strict_yaml import read_yaml

SOURCE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
REBUILT = "_rebuilt"  # name ending of a file that replaces one that may not be redistributed
# Exceptions of the decompressors for a truncated archive, besides their own types.
DAMAGED = (
    EOFError,
    lzma.LZMAError,
    zlib.error,
    gzip.BadGzipFile,
    RuntimeError,
    NotImplementedError,
)
SHUFFLE_SEED = 1337
# The fields of an example of each kind, with their types.
FIELDS: dict[str, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}
OPTIONS = {"multiple_choice": "choices", "schema": "context_options"}
Example = dict[str, Any]


class Task(Settings):
    """A task: one entry of `icl_tasks`."""

    # llm-foundry's files have more keys, for metrics and batches, which are fixed here.
    model_config = ConfigDict(extra="ignore")

    label: str
    dataset_uri: str
    num_fewshot: tuple[int, ...] = Field(min_length=1, max_length=1)
    icl_task_type: Literal["multiple_choice", "schema", "language_modeling"]
    continuation_delimiter: str = " "
    example_delimiter: str = "\n\n"
    random_baseline: float | None = Field(None, ge=0, lt=100)  # percent

    @property
    def shots(self) -> int:
        return self.num_fewshot[0]


class Rules(NamedTuple):
    """Settings of the evaluation of tasks; the defaults are nanochat's."""

    limit: int | None = None  # examples of each task that are asked; None: all
    all_shots: bool = False  # draw shots from all examples, not only from those that are asked
    crop: bool = False  # prompts longer than the context lose their beginning


NANOCHAT = Rules()


class Loaded(NamedTuple):
    """A task with its examples, ready to evaluate."""

    task: Task
    examples: list[Example]  # shuffled; shots are drawn from all of them
    asked: int  # number of examples that are asked, from the first on
    total: int  # examples in the file
    chance: float  # accuracy of guessing
    file: Path
    rules: Rules

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the task's score depends on, except model and tokenizer."""
        how = [self.asked, len(self.examples), self.rules.crop]
        rule = json.dumps([self.task.model_dump(), self.chance, *how], sort_keys=True)
        return hashlib.sha256(rule.encode() + self.file.read_bytes()).hexdigest()[:16]


class Bundle:
    """Tasks of an unpacked bundle, or of a folder with only some of its files."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def core(self) -> dict[str, Task]:
        path = self.folder / "core.yaml"
        return read_tasks(path) if path.is_file() else {}

    @cached_property
    def baselines(self) -> dict[str, float]:
        path = self.folder / "eval_meta_data.csv"
        if not path.is_file():
            return {}
        try:
            with path.open(encoding="utf-8") as file:
                return {r["Eval Task"]: float(r["Random baseline"]) for r in csv.DictReader(file)}
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise UserError(
                f"{path}: expected the columns Eval Task and Random baseline, a number ({error})"
            ) from error

    def find(self, names: Sequence[str]) -> list[tuple[Task, Path]]:
        """Tasks by name, all of `core`, or all of a YAML file; each with the folder of its data."""
        found: dict[str, tuple[Task, Path]] = {}
        for name in names:
            if is_yaml(name):
                folder = Path(name).parent
                found |= {label: (t, folder) for label, t in read_tasks(Path(name)).items()}
            elif name == "core":
                found |= {label: (t, self.folder) for label, t in self.core.items()}
            elif name in self.core:
                found[name] = self.core[name], self.folder
            else:
                close = difflib.get_close_matches(name, ["core", *self.core], n=3, cutoff=0.5)
                there = f"did you mean {' or '.join(close)}?" if close else ", ".join(self.core)
                raise UserError(f"--tasks: there is no task {name}; {there}")
        return list(found.values())

    def load(self, task: Task, folder: Path, rules: Rules = NANOCHAT) -> Loaded:
        """Read a task's examples, shuffled as in nanochat, to ask the first `rules.limit` of them.

        As in nanochat, shots are drawn from the examples that are asked, so that another limit
        gives other prompts. With `all_shots` the prompts are a part of the full evaluation's.
        """
        file = self.data_file(task, folder)
        examples = read_examples(file, task)
        random.Random(SHUFFLE_SEED).shuffle(examples)
        total = len(examples)
        asked = min(rules.limit or total, total)
        if not rules.all_shots:
            examples = examples[:asked]
        if task.shots >= len(examples):
            few = f"--limit leaves {asked}: raise it, or give --all-shots" if asked < total else ""
            raise UserError(
                f"{task.label} shows {task.shots} examples before each question, but "
                + (few or f"{file} has {total} in all")
            )
        chance = task.random_baseline
        if chance is None:
            chance = self.baselines.get(task.label)
        if chance is None:
            raise UserError(
                f"{task.label} has no random baseline: give its entry `random_baseline: PERCENT`"
            )
        return Loaded(task, examples, asked, total, chance / 100, file, rules)

    def data_file(self, task: Task, folder: Path) -> Path:
        """Find a data file next to the YAML or in the bundle, else a rebuilt file in its place."""
        for candidate in (folder, folder / "eval_data", self.folder / "eval_data"):
            path = candidate / task.dataset_uri
            rebuilt = sorted(path.parent.glob(f"{path.stem}*{REBUILT}{path.suffix}"))
            if path.is_file() or rebuilt:
                return path if path.is_file() else rebuilt[0]
        raise UserError(f"{task.label}: there is no file {folder / 'eval_data' / task.dataset_uri}")


def open_bundle(path: Path | None = None, names: Sequence[str] = ()) -> Bundle:
    """Open the bundle at `path`, else $JAXTRAIN_CORE, else core_eval (or an archive) in the cache.

    An archive is unpacked into the cache once. names: the tasks; YAML files need no bundle.
    """
    cache = Path(os.environ.get("JAXTRAIN_CACHE", "~/.cache/jaxtrain")).expanduser()
    given = path or os.environ.get("JAXTRAIN_CORE")
    ends = ("", ".tar.xz", ".tar.gz", ".tar", ".zip")
    places = [Path(given).expanduser()] if given else [cache / f"core_eval{end}" for end in ends]
    found = next((candidate for candidate in places if candidate.exists()), None)
    if found is None and not given and names and all(map(is_yaml, names)):
        return Bundle(Path(names[0]).parent)
    if found is None:
        raise UserError(
            f"there is no evaluation bundle at {places[0]}: get {SOURCE}, unpack it, and give "
            "--bundle FOLDER or set JAXTRAIN_CORE (a .zip or .tar.xz also works)"
        )
    folder = unpack(found, cache / "tasks") if found.is_file() else found
    for candidate in (folder, *sorted(p for p in folder.iterdir() if p.is_dir())):
        if (candidate / "core.yaml").is_file():
            return Bundle(candidate)
    raise UserError(f"{found} is not an evaluation bundle: it has no core.yaml")


def is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def unpack(archive: Path, cache: Path) -> Path:
    """Unpack an archive, once, into a folder of the cache that is named by its hash."""
    folder = cache / hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    part = folder.with_suffix(f".{os.getpid()}")
    try:
        shutil.unpack_archive(archive, part, filter=None if archive.suffix == ".zip" else "data")
    except (shutil.ReadError, tarfile.TarError, zipfile.BadZipFile, *DAMAGED) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"{archive} cannot be unpacked, it is cut or damaged: {error}") from error
    try:
        part.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(part)
    return folder


def read_tasks(path: Path) -> dict[str, Task]:
    """The tasks of a YAML file by label, in its order."""
    try:
        entries = read_yaml(path)["icl_tasks"]
        tasks = [Task.model_validate(entry) for entry in entries]
    except OSError as error:
        raise UserError(f"--tasks: cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {error.title} {where}: {first['msg'].lower()}") from None
    except (TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: expected `icl_tasks:` and a list of tasks ({reason})") from None
    return {task.label: task for task in tasks}


def read_examples(path: Path, task: Task) -> list[Example]:
    """A task's JSONL. Raises UserError with the line that is broken."""
    examples = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            example = parse_json(line, f"{path}:{number}")
            if fault := fault_of(example, task.icl_task_type):
                raise UserError(f"{path}:{number}: {fault}")
            examples.append(example)
    return examples


def fault_of(example: object, kind: str) -> str | None:
    """The first fault of an example as a phrase; None for a good one."""
    for name, wanted in FIELDS[kind].items():
        value = example.get(name) if isinstance(example, dict) else None
        if not isinstance(value, wanted) or value == [] or isinstance(value, bool):
            names = ", ".join(f"{n} ({t.__name__})" for n, t in FIELDS[kind].items())
            return f"{name} is missing or wrong; a {kind} example has {names}"
    assert isinstance(example, dict)
    if kind == "language_modeling":
        return None if example["continuation"].strip() else "continuation is empty"
    options = example[OPTIONS[kind]]
    if not all(isinstance(option, str) for option in options):
        return f"{OPTIONS[kind]} holds something that is not a text"
    if not 0 <= example["gold"] < len(options):
        return f"gold is {example['gold']}, but there are {len(options)} {OPTIONS[kind]}"
    return None
