"""Score documents with a trained model: columns to filter, to sample or to order them by.

jaxtrain score RUN --score el2n,perplexity --out scored.jsonl.zst [key=value ...]
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxtrain import data
from jaxtrain.cluster.ray_cluster import ray_cluster
from jaxtrain.cluster.ray_models import NodeModels
from jaxtrain.cluster.runtime import start
from jaxtrain.config.resolve import Resolved, override
from jaxtrain.data.files.local import File
from jaxtrain.data.files.reading import START, Position
from jaxtrain.data.files.sources import (
    CHAT_TEMPLATE_SOURCES,
    Source,
    content_hash,
    find_files,
    source_path,
)
from jaxtrain.data.filters.filtered import filter_sources
from jaxtrain.data.filters.scored import DocumentGroup, document_groups, frames
from jaxtrain.data.pool import Map, block_pool
from jaxtrain.data.store.cache import cache_directory
from jaxtrain.data.store.progress import Progress, show_progress
from jaxtrain.evaluation.arguments import ENDING, SCORES, score_parser
from jaxtrain.evaluation.document_scores import MEASURES, Measured, make_measurer
from jaxtrain.evaluation.log_likelihood import FIELDS
from jaxtrain.evaluation.prototypes import distances, find_prototypes
from jaxtrain.evaluation.remote import RemoteModel, place_of_run
from jaxtrain.evaluation.tasks import identity
from jaxtrain.runs.saved import Saved, load_saved
from jaxtrain.settings import UserError, command

ALONE = 1 << 24  # stored bytes; less is tokenized here before other processes would have started
JOB_BATCHES = 16  # minimum model batches that are packed together
SAVE_SECONDS = 30.0
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
WRITTEN = "written"
TEXT = (
    "data.train",
    "data.validation",
    "data.cache_dir",
    "data.local_cache",
    "data.prepare_workers",
)  # fields that may be changed
SAMPLE = 1 << 17  # maximum documents that prototypes are computed from
FORMAT = 1


def score(
    saved: Saved,
    config: Resolved,
    names: Sequence[str],
    out: Path,
    clusters: int = 100,
    progress: Progress = lambda *_: None,
    remote: RemoteModel | None = None,
) -> dict[str, Any]:
    """Write the text of `config.data.train`, each document with its scores, as JSONL to `out`.

    remote: the same model for the nodes of a Ray cluster, if those do the work.

    Measurements are kept in a folder next to `out` until all is written. Returns the summary, which
    is also kept next to `out`. Raises UserError for a source that cannot be scored, and if `out`
    has other contents.
    """
    check_arguments(names, out, clusters, config.data)
    source, states = filter_sources(config.data, progress)[0].train, "prototypicality" in names
    assert source.name != "mixture"
    facts = identity(saved, config) | source.model_dump() | {"format": FORMAT, "states": states}
    facts["path"] = content_hash(source, cache_directory(config.data))
    key = digest(facts | {"scores": names, "clusters": clusters if states else None})
    if out.exists():
        return existing_summary(out, key)
    folder = out.with_name(f"{out.name}.partial-{digest(facts)[:16]}")
    folder.mkdir(parents=True, exist_ok=True)
    files = find_files(source)
    small = sum(file.size or 0 for file in files) < ALONE
    with block_pool(config.data.prepare_workers, small) as mapped:
        how = measure_on_nodes(remote, states) if remote else measure_here(saved, config, states)
        measure_all(how, saved, source, files, folder, mapped, progress)
        columns = columns_of(folder, names, clusters)
        write_scored(source, files, folder, columns, mapped, progress)
    result = {"key": key, "documents": len(columns[names[0]]), "scores": quantiles_of(columns)}
    summary_path(out).write_text(json.dumps(result, indent=1) + "\n")
    (folder / WRITTEN).rename(out)
    shutil.rmtree(folder)
    return result


def check_arguments(
    names: Sequence[str], out: Path, clusters: int, config: data.DataConfig
) -> None:
    for name in names:
        if name not in SCORES:
            raise UserError(
                f"--score {name}: there is no such score; there are {', '.join(SCORES)}"
            )
    if not names:
        raise UserError(f"--score names none of {', '.join(SCORES)}")
    if not out.name.endswith(ENDING):
        raise UserError(f"--out {out}: the name has to end in {ENDING}")
    if config.train.name in ("mixture", *CHAT_TEMPLATE_SOURCES):
        raise UserError(
            f"data.train is a {config.train.name}, but score reads one source of text: set "
            "data.train.name=jsonl data.train.path=FILES"
        )


# ---- measuring ---------------------------------------------------------------------------------


class MeasuredPart(NamedTuple):
    """Measurements of consecutive groups of documents."""

    counts: np.ndarray  # int64 [groups], documents of each
    size: int  # bytes of text
    after: Position
    measured: Measured  # of all their documents


class Measuring(NamedTuple):
    """Measurement with one model, or with a model on each of several nodes."""

    tokens: int  # of a batch
    each: Callable[[Iterable[list[np.ndarray]]], Iterator[Measured]]  # lists of documents, in order


def measure_here(saved: Saved, config: Resolved, states: bool) -> Measuring:
    measurer = make_measurer(saved, config, states)
    return Measuring(measurer.tokens, partial(map, measurer.measure))


def measure_on_nodes(remote: RemoteModel, states: bool) -> Measuring:
    models = NodeModels(partial(load_measure, remote, states))
    return Measuring(next(models.map([None])), models.map)


def load_measure(
    remote: RemoteModel, states: bool
) -> Callable[[list[np.ndarray] | None], Measured | int]:
    """Load a measurer on a node: documents -> measurements; None -> the tokens of a batch."""
    measurer = make_measurer(*remote.load(), states)
    return lambda some: measurer.tokens if some is None else measurer.measure(some)


def measure_all(
    how: Measuring,
    saved: Saved,
    source: Source,
    files: list[File],
    folder: Path,
    mapped: Map,
    progress: Progress,
) -> None:
    """Measure the documents that `folder` lacks, and save them there periodically."""
    known = [(part.size, part.after) for part in map(load_part, part_files(folder))]
    size, after = sum(size for size, _ in known), known[-1][1] if known else START
    stored = sum(file.size or 0 for file in files)
    read = document_groups(source, files, saved.tokenizer, saved.tokenizer_dir, after, mapped)
    found: list[MeasuredPart] = []
    begun, number = time.monotonic(), len(known)
    given: deque[list[DocumentGroup]] = deque()

    def jobs() -> Iterator[list[np.ndarray]]:
        for job in group_by_tokens(read, JOB_BATCHES * how.tokens):
            given.append(job)
            yield [tokens for group in job for tokens in group.documents]

    try:
        for measured in how.each(jobs()):
            job = given.popleft()
            counts, after = np.array([len(group.documents) for group in job]), job[-1].after
            found.append(MeasuredPart(counts, sum(group.size for group in job), after, measured))
            size += found[-1].size
            progress("score", size, size * max(stored, after.stored) // max(after.stored, 1))
            if time.monotonic() - begun >= SAVE_SECONDS:
                save_part(folder / f"{number:08d}.npz", found)
                found, number, begun = [], number + 1, time.monotonic()
    finally:  # also after an interrupt
        if found:
            save_part(folder / f"{number:08d}.npz", found)


def group_by_tokens(read: Iterable[DocumentGroup], tokens: int) -> Iterator[list[DocumentGroup]]:
    """Lists of groups with at least `tokens` tokens in all; the last may have fewer."""
    some: list[DocumentGroup] = []
    for group in read:
        some.append(group)
        if sum(len(document) for one in some for document in one.documents) >= tokens:
            yield some
            some = []
    if some:
        yield some


def save_part(path: Path, found: Sequence[MeasuredPart]) -> None:
    """Write the parts as one file of arrays, which appears when it is complete."""
    arrays = {
        "counts": np.concatenate([part.counts for part in found]),
        "size": np.array(sum(part.size for part in found)),
        "after": np.array(found[-1].after),
    }
    for name in Measured._fields:
        values = [getattr(part.measured, name) for part in found]
        if values[0] is not None:
            arrays[name] = np.concatenate(values)
    unnamed = path.with_suffix(".tmp")
    with unnamed.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        os.fsync(file.fileno())
    unnamed.rename(path)


def load_part(path: Path) -> MeasuredPart:
    with np.load(path) as arrays:
        measured = Measured(*(arrays.get(name) for name in Measured._fields))
        after = Position(*arrays["after"].tolist())
        return MeasuredPart(arrays["counts"], int(arrays["size"]), after, measured)


def part_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"))


# ---- columns -----------------------------------------------------------------------------------


def columns_of(folder: Path, names: Sequence[str], clusters: int) -> dict[str, np.ndarray]:
    """Column of each score, float64 [documents]; NaN for a document without tokens."""
    columns: dict[str, np.ndarray] = {}
    if files := part_files(folder):
        means_Nm = np.concatenate([load_part(path).measured.means_Nm for path in files])
        columns |= dict(zip(MEASURES, means_Nm.T))
        columns["perplexity"] = np.exp(np.minimum(columns["nll"], 700.0))
        if "prototypicality" in names:
            columns["prototypicality"] = prototypicality(files, clusters)
    return {name: columns.get(name, np.empty(0)) for name in names}


def prototypicality(files: Sequence[Path], clusters: int) -> np.ndarray:
    """Distance of each document's mean state to the nearest prototype, float64 [documents].

    Prototypes are computed from at most SAMPLE documents. The states are read one file at a time.
    """
    there = np.concatenate([load_part(path).measured.tokens_N > 0 for path in files])
    numbers = np.flatnonzero(there)
    if len(numbers) <= clusters:
        raise UserError(
            f"--clusters {clusters} needs more documents than that, but there are {len(numbers)}: "
            "give fewer; the scores measured so far are kept"
        )
    if len(numbers) > SAMPLE:
        numbers = np.sort(np.random.default_rng(0).choice(numbers, SAMPLE, replace=False))
    first, sample = 0, []
    for path in files:
        states_ND = states_of(path)
        some = numbers[(numbers >= first) & (numbers < first + len(states_ND))]
        sample.append(states_ND[some - first])
        first += len(states_ND)
    prototypes_CD = find_prototypes(np.concatenate(sample), clusters)
    found = [np.asarray(distances(states_of(path), prototypes_CD), np.float64) for path in files]
    return np.concatenate(found)


def states_of(path: Path) -> np.ndarray:
    states_ND = load_part(path).measured.states_ND
    assert states_ND is not None
    return states_ND


def write_scored(
    source: Source,
    files: list[File],
    folder: Path,
    columns: dict[str, np.ndarray],
    mapped: Map,
    progress: Progress,
) -> None:
    """Write the text with its columns to `folder`/WRITTEN. Raises UserError if there is no text."""
    known = [load_part(path) for path in part_files(folder)]
    total, size = sum(part.size for part in known), 0
    if not total:
        shutil.rmtree(folder)
        raise UserError(f"{source_path(source)} holds no text")
    counts = np.concatenate([part.counts for part in known]).tolist()
    with (folder / WRITTEN).open("wb") as file:
        for frame, more in frames(source, files, counts, columns, mapped):
            file.write(frame)
            size += more
            progress("write", size, total)
        file.flush()
        os.fsync(file.fileno())


# ---- summary -----------------------------------------------------------------------------------


def digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def summary_path(out: Path) -> Path:
    return out.with_name(out.name.removesuffix(ENDING) + ".scores.json")


def existing_summary(out: Path, key: str) -> dict[str, Any]:
    """Summary of an existing `out`. Raises UserError if it is of other scores."""
    with suppress(OSError, ValueError):
        result = json.loads(summary_path(out).read_text())
        if result["key"] == key:
            return result
    raise UserError(
        f"{out} holds other scores, or scores of another text or model; name a new file, or delete "
        "it"
    )


def quantiles_of(columns: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Quantiles of each score, over all documents that have it."""
    found = {}
    for name, column in columns.items():
        there = column[~np.isnan(column)]
        values = np.quantile(there, QUANTILES).tolist() if len(there) else []
        found[name] = {f"{100 * q:g}%": value for q, value in zip(QUANTILES, values)}
    return found


def score_table(result: dict[str, Any]) -> Table:
    """The distribution of each score, for a console."""
    table = Table(box=None, header_style="bold")
    table.add_column(f"{result['documents']:,} documents")
    for quantile in QUANTILES:
        table.add_column(f"{100 * quantile:g}%", justify="right")
    for name, values in result["scores"].items():
        table.add_row(name, *(f"{value:.4g}" for value in values.values()))
    return table


@command
def main(argv: list[str] | None = None) -> int:
    arguments = score_parser().parse_intermixed_args(argv)
    try:
        start()
        names = [name.strip() for name in arguments.score.split(",") if name.strip()]
        saved = load_saved(arguments.run, arguments.step)
        fields = (*FIELDS[:-1], *TEXT)
        config = override(saved.config, arguments.overrides, fields)
        model = RemoteModel(
            place_of_run(arguments.run), arguments.step, tuple(arguments.overrides), fields
        )
        console = Console(width=120)
        with ray_cluster(arguments.ray) as cluster, show_progress(console) as progress:
            rest = arguments.out, arguments.clusters, progress, model if cluster else None
            result = score(saved, config, names, *rest)
    except KeyboardInterrupt:
        print("interrupted; the same command resumes after the last saved scores", file=sys.stderr)
        return 130
    console.print(score_table(result), f"\n{arguments.out}", highlight=False)
    return 0
