"""Runs the filters of a source and writes JSONL, in two passes, on all cores.

In the first pass, workers compute the verdict of each filter on each document, and features for the
filters that decide over all documents (duplicates, a share of the best). The second pass writes the
documents that remain, in the order of the text. The bytes depend only on the text and the filters,
not on the number of processes or on interruptions.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.files.local import File
from jaxtrain.data.files.reading import START, Position, TextBlock, blocks
from jaxtrain.data.files.sources import Source, content_hash, find_files, source_path
from jaxtrain.data.filters import FILTERS
from jaxtrain.data.filters.marks import MarkFiles, count_parts, mark_columns
from jaxtrain.data.filters.work import FilterJob, Found, Sample, apply_filters, lowest, write_kept
from jaxtrain.data.pool import Map, block_pool, tasks_at_once
from jaxtrain.data.store.encode import batch_blocks
from jaxtrain.data.store.progress import Progress, estimate_bytes, named_progress
from jaxtrain.data.store.store import sync
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_whole

COMMIT_SECONDS = 10  # a kill also loses the batches in flight, less than 5 seconds of work
SHARD = 1 << 28  # compressed bytes of a file
ALONE = 1 << 22  # stored bytes; less text is filtered sooner than worker processes start
FORMAT = 3
MEMORY = 4.0  # GiB, of `data.dedup_memory`
ReasonsOf = Callable[[str], Sequence[str]]  # the name of a filter -> its reasons, from 1


def filter_source(
    source: Source,
    directory: Path,
    *,
    key: str,
    processes: int | None = None,
    memory: float = MEMORY,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Writes a source's filtered text, and returns the report, which is stored next to it.

    `directory` appears when all is done. Until then the files are in another folder, from which an
    interrupted call continues. key: hash of the text and the filters. memory: `data.dedup_memory`.
    Raises UserError if nothing is left, and if the directory holds something else.
    """
    if directory.exists():
        return read_report(directory, key)
    partly = _partial(directory, key)
    filters = [
        filter if (prepare := FILTERS[filter.name].prepare) is None else prepare(filter, partly)
        for filter in source.filters
    ]

    def nothing_left(_: str, report: dict[str, Any]) -> str:
        row = max(report["filters"], key=lambda row: row["documents"])
        most = f"{row['name']} removes {row['documents']:,} of {report['read']['documents']:,}"
        return f"the filters of {source_path(source)} leave no document; {most}"

    jobs = {"": FilterJob(source, tuple(filters))}
    report = _filter(jobs, partly, (processes, memory), progress, nothing_left)[""]
    return _publish(partly, directory, {"key": key, **report})


def filter_across(
    sources: Mapping[str, Source],
    filters: Sequence[Any],
    directory: Path,
    *,
    key: str,
    processes: int | None = None,
    memory: float = MEMORY,
    progress: Progress = lambda *_: None,
) -> dict[str, dict[str, Any]]:
    """Removes duplicates across sources; writes what stays of each into `directory`/NAME.

    The sources are treated as one text in their order: the first of several duplicates stays. The
    report of a source counts its removed documents by the source that keeps them. An interrupted
    call continues where it stopped. Raises UserError if nothing is left of a source.
    """
    if directory.exists():
        return read_report(directory, key)["sources"]
    partly = _partial(directory, key)

    def nothing_left(name: str, _: dict[str, Any]) -> str:
        return (
            f"data.train.filters leave no document of {name}: the sources before it have all of "
            "them; leave it out, or name it in data.train.first"
        )

    jobs = {name: FilterJob(source, tuple(filters)) for name, source in sources.items()}
    reasons = tuple(f"in {name}" for name in sources)
    reports = _filter(jobs, partly, (processes, memory), progress, nothing_left, lambda _: reasons)
    return _publish(partly, directory, {"key": key, "sources": reports})["sources"]


def _filter(
    jobs: Mapping[str, FilterJob],
    partly: Path,
    limits: tuple[int | None, float],
    progress: Progress,
    nothing_left: Callable[[str, dict[str, Any]], str],
    reasons_of: ReasonsOf = lambda name: FILTERS[name].reasons,
) -> dict[str, dict[str, Any]]:
    """Filters sources with the same filters, each into a folder of its name. Returns the reports.

    limits: number of processes, and GiB of memory to compare documents in.
    """
    processes, memory = limits
    files = {name: find_files(job.source) for name, job in jobs.items()}
    told = {name: named_progress(name, progress) for name in jobs}
    small = sum(file.size or 0 for some in files.values() for file in some) < ALONE
    found: dict[str, list[Found]] = {}
    reports: dict[str, dict[str, Any]] = {}
    with block_pool(processes, small) as mapped:
        for name, job in jobs.items():
            (partly / name).mkdir(parents=True, exist_ok=True)
            found[name] = _first_reading(job, files[name], partly / name, mapped, told[name])
        noted = [path for name in jobs for path in verdict_files(partly / name)]
        total = sum(len(one.removed_D) for groups in found.values() for one in groups)
        parts = count_parts(total, 1 if small else tasks_at_once(processes), memory)
        comparison = MarkComparison(noted, parts, partly, mapped)
        _decide(next(iter(jobs.values())).filters, found, comparison)
        for name, groups in found.items():
            if all(one.removed_D.all() for one in groups):
                shutil.rmtree(partly)
                report = filter_report(jobs[name], groups, [], reasons_of)
                raise UserError(nothing_left(name, report))
        for name, job in jobs.items():
            rest = files[name], found[name], partly / name, mapped, told[name]
            samples = _second_reading(job, *rest)
            reports[name] = filter_report(job, found[name], samples, reasons_of)
    for name in jobs:  # keep only the text
        for path in (partly / name).iterdir():
            if path.is_file() and not path.name.endswith(".jsonl.zst"):
                path.unlink()
    return reports


def _partial(directory: Path, key: str) -> Path:
    return directory.with_name(f"{directory.name}.partial-{key[:16]}")


def _publish(partly: Path, directory: Path, report: dict[str, Any]) -> dict[str, Any]:
    write_whole(report_path(directory), json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    partly.rename(directory)
    return report


def report_path(directory: Path) -> Path:
    """Path of the report: next to the folder of text, which holds nothing else."""
    return directory.with_name(f"{directory.name}.filters.json")


def filter_key(source: Source, cache: Path) -> str:
    """A hash of everything that the filtered text depends on."""
    settings = source.model_dump() | {"path": content_hash(source, cache), "format": FORMAT}
    for filter, row in zip(source.filters, settings["filters"]):
        input_hash = FILTERS[filter.name].input_hash
        if input_hash is not None:
            row["against"] = input_hash(filter)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def key_across(sources: Mapping[str, Source], filters: Sequence[Any], cache: Path) -> str:
    """A hash of everything that the result depends on."""
    keys = [(name, filter_key(source, cache)) for name, source in sources.items()]
    settings = [FORMAT, keys, [filter.model_dump() for filter in filters]]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def read_report(directory: Path, key: str) -> dict[str, Any]:
    """Read the report next to a folder. Raises UserError if the folder has another key."""
    path = report_path(directory)
    result = json.loads(path.read_text()) if path.is_file() else {}
    if result.get("key") != key:
        raise UserError(
            f"{directory} holds the result of other filters or of another text; name a new folder, "
            "or delete it"
        )
    return result


# ---- the first pass ----------------------------------------------------------------------------


def _first_reading(
    job: FilterJob, files: list[File], folder: Path, mapped: Map, progress: Progress
) -> list[Found]:
    """Compute the verdicts on each group of blocks, except those that `folder` already has."""
    found = [one for path in verdict_files(folder) for one in _load(path)]
    after, total = (found[-1].after if found else START), sum(file.size or 0 for file in files)
    size = sum(one.size for one in found)
    saved, committed = len(found), time.monotonic()
    for one in mapped(partial(apply_filters, job), batch_blocks(blocks(job.source, files, after))):
        found.append(one)
        size += one.size
        progress("filter", size, estimate_bytes(size, one.after.stored, total))
        if time.monotonic() - committed >= COMMIT_SECONDS:
            saved, committed = _save(folder, found, saved), time.monotonic()
    if found[saved:]:
        _save(folder, found, saved)
    if not size:
        shutil.rmtree(folder)
        raise UserError(f"{source_path(job.source)} holds no text")
    return found


class MarkComparison(NamedTuple):
    """Settings of the comparison of documents."""

    files: Sequence[Path]  # files of the marks
    parts: int  # partitions
    scratch: Path
    mapped: Map


def _decide(
    filters: Sequence[Any], found: dict[str, list[Found]], comparison: MarkComparison
) -> None:
    """Runs the filters that compare documents, each on the documents that reach it."""
    groups = [one for some in found.values() for one in some]
    sizes = [len(one.removed_D) for one in groups]
    number_of = [number for number, some in enumerate(found.values()) for _ in some]
    sources_D = np.repeat(np.array(number_of, np.uint16), sizes)
    removed = np.concatenate([one.removed_D for one in groups])
    reasons = np.concatenate([one.reasons_D for one in groups])
    for number, filter in enumerate(filters):
        decide = FILTERS[filter.name].decide
        if decide is None:
            continue
        here_D = (removed == 0) | (removed > number + 1)
        files, parts, scratch, mapped = comparison
        marks = MarkFiles(files, number, here_D, parts, scratch)
        of = decide(filter, marks, sources_D[here_D], mapped)
        here = np.flatnonzero(here_D)[of > 0]
        removed[here], reasons[here] = number + 1, of[of > 0]
    ends = np.cumsum(sizes)[:-1]
    parts = zip(groups, np.split(removed, ends), np.split(reasons, ends))
    for some in found.values():
        some[:] = [
            one._replace(removed_D=removed_D, reasons_D=reasons_D)
            for one, removed_D, reasons_D in islice(parts, len(some))
        ]


def verdict_files(folder: Path) -> list[Path]:
    """The files of the first pass, in the order of the text."""
    return sorted(folder.glob("verdicts-*.npz"))


def _save(folder: Path, groups: list[Found], saved: int) -> int:
    """Saves the groups from `saved` on as one file of arrays, atomically, and frees their marks.
    Returns the number of saved groups."""
    path, found = folder / f"verdicts-{saved:08d}.npz", groups[saved:]
    arrays = {
        "counts": np.array([len(one.removed_D) for one in found]),
        "after": np.array([one.after for one in found]),
    }
    for name in ("removed_D", "reasons_D", "sizes_DF"):
        arrays[name] = np.concatenate([getattr(one, name) for one in found])
    numbers = found[0].marks
    marks = {number: np.concatenate([one.marks[number] for one in found]) for number in numbers}
    arrays |= mark_columns(marks)
    with path.with_suffix(".tmp").open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        os.fsync(file.fileno())
    path.with_suffix(".tmp").rename(path)
    groups[saved:] = [one._replace(marks={}) for one in found]
    return len(groups)


def _load(path: Path) -> Iterator[Found]:
    with np.load(path) as arrays:
        ends = np.cumsum(arrays["counts"])[:-1]
        parts = {name: np.split(arrays[name], ends) for name in arrays if name[-2:] in ("_D", "DF")}
        for index, after in enumerate(arrays["after"].tolist()):
            one = {name: part[index] for name, part in parts.items()}
            size = int(one["sizes_DF"][:, 0].sum())
            yield Found(**one, marks={}, size=size, after=Position(*after))


# ---- the second pass ---------------------------------------------------------------------------


def _second_reading(
    job: FilterJob,
    files: list[File],
    groups: list[Found],
    folder: Path,
    mapped: Map,
    progress: Progress,
) -> list[Sample]:
    """Writes numbered files of JSONL; an interrupted call continues after its last commit."""
    note, state = folder / "written.json", {"files": 0, "bytes": 0, "groups": 0, "samples": []}
    if note.is_file():
        state |= json.loads(note.read_text())
    number, at, done = state["files"], state["bytes"], state["groups"]
    samples = [Sample(*sample) for sample in state["samples"]]
    after = groups[done - 1].after if done else START
    size, total = sum(one.size for one in groups[:done]), sum(one.size for one in groups)

    def tasks() -> Iterator[tuple[list[TextBlock], np.ndarray, np.ndarray]]:
        found = batch_blocks(blocks(job.source, files, after))
        for one, group in zip(groups[done:], found, strict=True):
            yield group, one.removed_D, one.reasons_D

    committed = time.monotonic()
    for written, kept in enumerate(mapped(partial(write_kept, job), tasks()), done + 1):
        path = _shard(folder, number)
        with path.open("ab") as file:
            file.truncate(at)  # drop the bytes written after the last commit
            file.write(kept.data)
            at = file.tell()
        samples, size = lowest(samples + kept.samples), size + kept.size
        progress("write", size, total)
        if full := at >= SHARD:
            number, at = number + 1, 0
        last = written == len(groups)
        if full or last or time.monotonic() - committed >= COMMIT_SECONDS:
            sync(path)
            state = {"files": number, "bytes": at, "groups": written, "samples": samples}
            write_whole(note, json.dumps(state))
            committed = time.monotonic()
    path = _shard(folder, number)
    if path.is_file() and not path.stat().st_size:
        path.unlink()
    return samples


def _shard(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.jsonl.zst"


# ---- report ------------------------------------------------------------------------------------


def filter_report(
    job: FilterJob,
    groups: list[Found],
    samples: list[Sample],
    reasons_of: ReasonsOf,
) -> dict[str, Any]:
    """Documents and bytes that were read, removed by each filter with the reasons, and kept."""
    removed = np.concatenate([one.removed_D for one in groups])
    reasons = np.concatenate([one.reasons_D for one in groups])
    sizes = np.concatenate([one.sizes_DF for one in groups]).astype(np.int64)
    rows = []
    for number, filter in enumerate(job.filters):
        names = reasons_of(filter.name)
        here = removed == number + 1
        passed = (removed == 0) | (removed > number + 1)
        counts = np.bincount(reasons[here], minlength=len(names) + 1)[1:].tolist()
        shown = [sample for sample in samples if sample.filter == number + 1]
        rows.append(
            {
                "name": filter.name,
                "documents": int(here.sum()),
                "bytes": int(sizes[here, number].sum()),
                "cut_bytes": int((sizes[passed, number] - sizes[passed, number + 1]).sum()),
                "reasons": {name: count for name, count in zip(names, counts) if count},
                "samples": [{"reason": names[s.reason - 1], "text": s.text} for s in shown],
            }
        )
    kept = removed == 0
    return {
        "read": {"documents": len(removed), "bytes": int(sizes[:, 0].sum())},
        "kept": {"documents": int(kept.sum()), "bytes": int(sizes[kept, -1].sum())},
        "filters": rows,
    }
