"""Documents that several sources of a mixture have: one of them keeps its copy.

The sources are looked through one after the other, as `filtering` does with one of them, and
judged as if they were a single text in their order.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.files.sources import Source, find_files
from jaxtrain.data.filters import filtering
from jaxtrain.data.filters.duplicates import first_of
from jaxtrain.data.filters.filtering import (
    FORMAT,
    clean,
    filter_key,
    filter_report,
    read_report,
    report_path,
    run_filters,
    write_filtered,
)
from jaxtrain.data.filters.work import FilterJob, Found
from jaxtrain.data.pool import cores, process_pool
from jaxtrain.data.store.progress import Progress
from jaxtrain.settings import UserError


def filter_across(
    sources: Mapping[str, Source],
    filters: Sequence[Any],
    directory: Path,
    *,
    key: str,
    processes: int | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, dict[str, Any]]:
    """Write what filters of duplicates leave of each source into `directory`/NAME.

    Of documents that are alike the first stays, in the order of the sources and their text. Returns
    a report for each source, whose reasons are the sources that have what was removed. Goes on
    after an interruption. Raises UserError if nothing is left of a source.
    """
    if directory.exists():
        return read_report(directory, key)["sources"]
    partly = directory.with_name(f"{directory.name}.partial-{key[:16]}")
    jobs = {name: FilterJob(source, tuple(filters)) for name, source in sources.items()}
    files = {name: find_files(source) for name, source in sources.items()}
    told = {name: lambda s, *rest, name=name: progress(f"{name}: {s}", *rest) for name in sources}
    found: dict[str, list[Found]] = {}
    reports: dict[str, dict[str, Any]] = {}
    reasons = tuple(f"in {name}" for name in sources)
    small = sum(file.size or 0 for some in files.values() for file in some) < filtering.ALONE
    with process_pool(1 if small else processes or cores()) as mapped:
        for name, job in jobs.items():
            (partly / name).mkdir(parents=True, exist_ok=True)
            found[name] = run_filters(job, files[name], partly / name, mapped, told[name])
        mark_duplicates(filters, found)
        for name, job in jobs.items():
            groups = found[name]
            if all(one.removed_D.all() for one in groups):
                shutil.rmtree(partly)
                raise UserError(
                    f"data.train.filters leave no document of {name}: the sources before it have "
                    "all of them; leave it out, or name it in data.train.first"
                )
            samples = write_filtered(job, files[name], groups, partly / name, mapped, told[name])
            reports[name] = filter_report(job, groups, samples, lambda _: reasons)
    for name in sources:
        clean(partly / name)
    result = {"key": key, "sources": reports}
    report_path(directory).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    partly.rename(directory)
    return reports


def mark_duplicates(filters: Sequence[Any], found: dict[str, list[Found]]) -> None:
    """Mark what each filter removes of all sources; the reason is the source of the first copy."""
    groups = [one for some in found.values() for one in some]
    counts = [sum(len(one.removed_D) for one in some) for some in found.values()]
    source = np.repeat(np.arange(len(counts)), counts)
    removed, reasons = np.zeros((2, len(source)), np.uint8)
    for number in range(len(filters)):
        here = np.flatnonzero(removed == 0)
        first = first_of(np.concatenate([one.marks[number] for one in groups])[here])
        again = np.flatnonzero(first != np.arange(len(here)))
        removed[here[again]] = number + 1
        reasons[here[again]] = source[here[first[again]]] + 1
    ends = np.cumsum([len(one.removed_D) for one in groups])[:-1]
    parts = zip(np.split(removed, ends), np.split(reasons, ends))
    left = (
        one._replace(removed_D=removed_D, reasons_D=reasons_D, marks={})
        for one, (removed_D, reasons_D) in zip(groups, parts)
    )
    for some in found.values():
        some[:] = [next(left) for _ in some]


def key_across(sources: Mapping[str, Source], filters: Sequence[Any], cache: Path) -> str:
    """A hash of all that decides what is left of each source."""
    keys = [(name, filter_key(source, cache)) for name, source in sources.items()]
    settings = [FORMAT, keys, [filter.model_dump() for filter in filters]]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()
