"""Evaluation sets kept out of the training text, by the word sequences that they share with it."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jaxtrain.data.prompts import prompt_of
from jaxtrain.data.quality.arrays import Arrays, ngrams
from jaxtrain.data.quality.batch import Batch, Judged, Kind
from jaxtrain.data.tasks import Bundle, Task, open_bundle
from jaxtrain.settings import Settings, UserError

TOGETHER = 1 << 19  # characters of evaluation text that are hashed at once
SLOTS = 16  # places in the table for one sequence: the others are looked up in it in vain


class Decontaminate(Settings):
    """Removes documents that share words in a row with an evaluation set (GPT-3, arXiv:2005.14165).

    Case and punctuation do not count. Examples of fewer words are not looked for.
    """

    name: Literal["decontaminate"] = "decontaminate"
    against: tuple[str, ...] = Field(
        default=("core",),
        min_length=1,
        description="core (the bundle at $JAXTRAIN_CORE), names of its tasks, YAML files of tasks, "
        "or JSONL files, of which all texts count",
    )
    spare: tuple[str, ...] = Field(
        default=(),
        description="Tasks of `against` that are left out, as those made from Wikipedia are",
    )
    ngram: int = Field(default=13, gt=0, description="Words in a row")
    min_hits: int = Field(
        default=1, gt=0, description="Such sequences in a document, above which it is removed"
    )


def texts_of(config: Decontaminate) -> Iterator[str]:
    """Every text that may not be trained on; of a question, with each of its answers."""
    for bundle, task, folder in _tasks(config):
        loaded, alone = bundle.load(task, folder), task.model_copy(update={"num_fewshot": (0,)})
        for index in range(loaded.asked):
            prompt = prompt_of(alone, loaded.examples, index)
            yield from ("".join(prompt.shared) + ending for ending in prompt.endings)
    for name in config.against:
        if name.endswith(".jsonl"):
            for line in _read(name).splitlines():
                yield from _strings(json.loads(line))


def identity(config: Decontaminate) -> str:
    """A hash of the files that are read."""
    total = hashlib.sha256()
    for bundle, task, folder in _tasks(config):
        total.update(task.model_dump_json().encode())
        total.update(bundle.data_file(task, folder).read_bytes())
    for name in config.against:
        if name.endswith(".jsonl"):
            total.update(_read(name))
    return total.hexdigest()


def ready(config: Decontaminate, folder: Path) -> Decontaminate:
    """Writes the hashes of all sequences, which `judge` then reads instead of the texts."""
    path = folder / f"ngrams-{identity(config)[:16]}-{config.ngram}.npy"
    if not path.is_file():
        found, texts, size = [np.empty(0, np.uint64)], [], 0
        for text in (*texts_of(config), None):
            if text is not None:
                texts.append(text.lower())
                size += len(text)
            if texts and (text is None or size >= TOGETHER):
                found.append(np.unique(ngrams(Arrays(texts).folded_words, config.ngram)[0]))
                texts, size = [], 0
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".tmp").open("wb") as file:
            np.save(file, np.unique(np.concatenate(found)))
        path.with_suffix(".tmp").rename(path)
    return config.model_copy(update={"against": (str(path),)})


def judge(config: Decontaminate, batch: Batch) -> Judged:
    known, table, shift = _table(config.against[0])
    words = batch.lowered.folded_words
    hashes, first = ngrams(words, config.ngram)
    maybe = np.flatnonzero(table[hashes >> shift])
    place = np.minimum(np.searchsorted(known, hashes[maybe]), max(len(known) - 1, 0))
    hits = first[maybe[known[place] == hashes[maybe]]] if len(known) else first[:0]
    count = np.bincount(words.texts[hits], minlength=len(batch.texts))
    return Judged((count >= config.min_hits).astype(np.uint8))


@lru_cache(maxsize=4)
def _table(path: str) -> tuple[np.ndarray, np.ndarray, np.uint64]:
    """The sorted hashes, and a table of the beginnings that a hash among them may have."""
    known = np.load(path)
    bits = max(10, (SLOTS * len(known)).bit_length())
    shift = np.uint64(64 - bits)
    table = np.zeros(1 << bits, bool)
    table[known >> shift] = True
    return known, table, shift


def _tasks(config: Decontaminate) -> list[tuple[Bundle, Task, Path]]:
    """The tasks to keep out, with the bundle and the folder of their data."""
    names = [name for name in config.against if not name.endswith(".jsonl")]
    if not names:
        return []
    bundle = open_bundle(names=names)
    found = bundle.find(names)
    return [(bundle, task, at) for task, at in found if task.label not in config.spare]


def _read(name: str) -> bytes:
    try:
        return Path(name).expanduser().read_bytes()
    except OSError as error:
        raise UserError(
            f"data.train.filters: decontaminate cannot read {name}: {error.strerror}"
        ) from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


KIND = Kind(("found in an evaluation set",), judge=judge, ready=ready, identity=identity)
