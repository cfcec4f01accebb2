"""Decontamination: removes training documents that share word n-grams with evaluation sets."""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from jaxtrain.cluster.ray_cluster import current_cluster
from jaxtrain.data.evaluation.prompts import prompt_of
from jaxtrain.data.evaluation.tasks import Bundle, Task, open_bundle
from jaxtrain.data.filters.arrays import BASE, Spans, ngrams, rolling_hashes, rolling_hashes_at
from jaxtrain.data.filters.batch import FilterFunctions, FilterVerdict, TextBatch
from jaxtrain.settings import Settings, UserError

TOGETHER = 1 << 19  # characters of evaluation text that are hashed at once
START = 3  # words of a short text that are looked for first
SLOTS = 16  # table slots per known hash; most slots are empty and reject other hashes at once
ROOM = 1 << 17  # minimum number of table slots, which fit in the cache of a core


class Decontaminate(Settings):
    """Removes documents that share word n-grams with an evaluation set (GPT-3, arXiv:2005.14165).
    Matching ignores case, punctuation, kinds of spaces and forms of a letter (NFKC). An evaluation
    text of fewer than `ngram` words is matched as a whole, and one match removes a document
    whatever `min_hits` is."""

    name: Literal["decontaminate"] = "decontaminate"
    against: tuple[str, ...] = Field(
        default=("core",),
        min_length=1,
        description="evaluation sets: core (the bundle at $JAXTRAIN_CORE), names of its tasks, "
        "YAML files of tasks, or JSONL files (every string in them)",
    )
    spare: tuple[str, ...] = Field(
        default=(),
        description="tasks of `against` that are not matched, such as those made from Wikipedia",
    )
    ngram: int = Field(default=13, gt=0, description="length n of an n-gram in words")
    min_hits: int = Field(
        default=1,
        gt=0,
        description="minimum number of matching n-grams for which a document is removed",
    )


def evaluation_texts(config: Decontaminate) -> Iterator[str]:
    """Yield every text to keep out of training: each question with each of its answers."""
    for bundle, task, folder in _tasks(config):
        loaded, alone = bundle.load(task, folder), task.model_copy(update={"num_fewshot": (0,)})
        # The first of two endings has no answer: alone it may be as little as "It follows".
        whole = 1 if task.icl_task_type == "language_modeling" else 0
        for index in range(loaded.asked):
            prompt = prompt_of(alone, loaded.examples, index)
            yield from ("".join(prompt.shared) + ending for ending in prompt.endings[whole:])
    for name in config.against:
        if name.endswith(".jsonl"):
            for number, line in enumerate(_read(name).splitlines(), 1):
                try:
                    yield from _strings(json.loads(line) if line.strip() else None)
                except ValueError as error:
                    raise UserError(f"{name} line {number} is not valid JSON: {error}") from error


def evaluation_hash(config: Decontaminate) -> str:
    """Hash of the evaluation files that are read."""
    total = hashlib.sha256()
    for bundle, task, folder in _tasks(config):
        total.update(task.model_dump_json().encode())
        total.update(bundle.data_file(task, folder).read_bytes())
    for name in config.against:
        if name.endswith(".jsonl"):
            total.update(_read(name))
    return total.hexdigest()


@dataclass(frozen=True)
class PreparedDecontaminate:
    """The filter with the hashes of all n-grams, which it reads instead of the texts."""

    ngram: int
    min_hits: int
    path: str  # file of the hashes, named by a hash of its inputs
    # Content of the file, for cluster nodes, which may not share the folder.
    data: bytes | None = field(default=None, compare=False, repr=False)
    name: Literal["decontaminate"] = "decontaminate"


def write_ngrams(config: Decontaminate, folder: Path) -> PreparedDecontaminate:
    """Writes the hashes of all n-grams, unless the folder has them."""
    path = folder / f"ngrams-{evaluation_hash(config)[:16]}-{config.ngram}.npz"
    if not path.is_file():
        found: dict[str, list[np.ndarray]] = {"long": [np.empty(0, np.uint64)]}
        for texts in _together(evaluation_texts(config)):
            for name, hashes in _hashes(texts, config.ngram):
                found.setdefault(name, []).append(hashes)
        folder.mkdir(parents=True, exist_ok=True)
        known = {name: np.unique(np.concatenate(hashes)) for name, hashes in found.items()}
        with path.with_suffix(".tmp").open("wb") as file:
            np.savez(file, allow_pickle=False, **known)
        path.with_suffix(".tmp").rename(path)
    data = None if current_cluster() is None else path.read_bytes()
    return PreparedDecontaminate(config.ngram, config.min_hits, str(path), data)


def _together(texts: Iterable[str]) -> Iterator[list[str]]:
    some, size = [], 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= TOGETHER:
            yield some
            some, size = [], 0
    yield some


def _hashes(texts: list[str], ngram: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield hashes of all n-grams (`long`). For texts of fewer words, yield hashes of all words
    (`whole`) and of the first one, two or three words (`start1` to `start3`)."""
    words = TextBatch(texts, [{}] * len(texts)).folded.folded_words
    yield "long", ngrams(words, ngram)[0]
    counts = np.bincount(words.texts, minlength=len(texts))
    for count in np.unique(counts[(counts > 0) & (counts < ngram)]).tolist():
        here = Spans(*(values[counts[words.texts] == count] for values in words))
        first = np.flatnonzero(np.diff(here.texts, prepend=-1))
        yield "whole", rolling_hashes_at(here, count, first)
        start = min(count, START)
        yield f"start{start}", rolling_hashes_at(here, start, first)


def filter_contaminated(config: PreparedDecontaminate, batch: TextBatch) -> FilterVerdict:
    known = _known(config)
    words = batch.folded.folded_words
    hashes, first = ngrams(words, config.ngram)
    hits = first[known["long"].places(hashes)]
    found = np.bincount(words.texts[hits], minlength=len(batch.texts)) >= config.min_hits
    for start in range(1, START + 1):
        if f"start{start}" in known:
            starts = known[f"start{start}"].places(rolling_hashes(words, start))
            found[words.texts[starts[_is_whole(words, starts, config.ngram, known["whole"])]]] = (
                True
            )
    return FilterVerdict(found.astype(np.uint8))


def _is_whole(words: Spans, starts: np.ndarray, ngram: int, whole: "Known") -> np.ndarray:
    """bool [B]: whether a known text of fewer than `ngram` words begins at each of these words."""
    left = np.searchsorted(words.texts, words.texts[starts], side="right") - starts
    numbers = np.arange(1, ngram)
    total, all_BN = np.zeros(len(starts), np.uint64), np.zeros((len(starts), ngram - 1), np.uint64)
    for number in numbers:
        index = np.minimum(starts + number - 1, len(words.hashes) - 1)
        total = all_BN[:, number - 1] = total * BASE + words.hashes[index]
    is_known = np.zeros(all_BN.size, bool)
    is_known[whole.places(all_BN.ravel())] = True
    return (is_known.reshape(all_BN.shape) & (numbers <= left[:, None])).any(1)


class Known(NamedTuple):
    """Sorted hashes, and a boolean table of the leading bits that they have."""

    hashes: np.ndarray
    table: np.ndarray
    shift: np.uint64

    def places(self, hashes: np.ndarray) -> np.ndarray:
        """Indices of the known hashes in `hashes`."""
        maybe = np.flatnonzero(self.table[hashes >> self.shift])
        index = np.minimum(np.searchsorted(self.hashes, hashes[maybe]), len(self.hashes) - 1)
        return maybe[self.hashes[index] == hashes[maybe]] if len(self.hashes) else maybe


@lru_cache(maxsize=4)
def _known(prepared: PreparedDecontaminate) -> dict[str, Known]:
    with np.load(prepared.path if prepared.data is None else io.BytesIO(prepared.data)) as arrays:
        return {name: _table(arrays[name]) for name in arrays}


def _table(hashes: np.ndarray) -> Known:
    bits = max(ROOM, SLOTS * len(hashes)).bit_length()
    shift = np.uint64(64 - bits)
    table = np.zeros(1 << bits, bool)
    table[hashes >> shift] = True
    return Known(hashes, table, shift)


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


FUNCTIONS = FilterFunctions(
    ("found in an evaluation set",),
    apply=filter_contaminated,
    prepare=write_ngrams,
    input_hash=evaluation_hash,
)
