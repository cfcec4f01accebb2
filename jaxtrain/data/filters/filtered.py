"""The sources of a configuration as their filters leave them."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from jaxtrain.data.batches.mixture import sources_of
from jaxtrain.data.config import DataConfig
from jaxtrain.data.files.sources import CHAT_TEMPLATE_SOURCES, JsonlSource, Source, field_of
from jaxtrain.data.filters import FILTERS
from jaxtrain.data.filters.filtering import filter_across, filter_key, filter_source, key_across
from jaxtrain.data.store.cache import cache_directory, locked
from jaxtrain.data.store.progress import Progress, named_progress
from jaxtrain.settings import UserError

Reports = dict[str, dict[str, Any]]  # what filters removed, by the name of the source


def filter_sources(config: DataConfig, progress: Progress) -> tuple[DataConfig, Reports]:
    """Return the configuration with filtered text in place of each source that has filters.

    Filtered text is JSONL in the cache, keyed by a hash of the text and the filters, and written if
    missing. In the reports a single source is named train, a separate validation source validation.
    The filters of a mixture run after those of its sources.
    """
    reports: Reports = {}
    train, validation = config.train, config.validation
    left = {n: _left(n, s, config, reports, progress) for n, s in sources_of(train).items()}
    if train.name == "mixture":
        if train.filters:
            left |= _left_across(left, config, reports, progress)
        parts = {n: p.model_copy(update={"source": left[n]}) for n, p in train.sources.items()}
        update: dict[str, Any] = {"train": train.model_copy(update={"sources": parts})}
    else:
        update = {"train": left["train"]}
    if validation.name == "source":
        source = _left("validation", validation.source, config, reports, progress)
        update["validation"] = validation.model_copy(update={"source": source})
    return config.model_copy(update=update), reports


def filter_into(config: DataConfig, out: Path, progress: Progress) -> Reports:
    """Writes the filtered training text to `out`, or to `out`/NAME for each source of a mixture.

    The report is next to each folder, or next to `out` if the mixture itself has filters. Raises
    UserError if there are no filters.
    """
    reports: Reports = {}
    train = config.train
    several, across = train.name == "mixture", train.name == "mixture" and bool(train.filters)
    left = {}
    for name, source in sources_of(train).items():
        into = None if across else out / name if several else out
        left[name] = _left(name, source, config, reports, progress, into)
    if across:
        _left_across(left, config, reports, progress, out)
    if not reports:
        raise UserError("data.train.filters is empty: there is nothing to filter by")
    return reports


def _left(
    name: str,
    source: Source,
    config: DataConfig,
    reports: Reports,
    progress: Progress,
    out: Path | None = None,
) -> Source:
    """Run a source's own filters. Returns the filtered source, in `out` or the cache."""
    if not source.filters:
        return source
    key, told = filter_key(source, cache_directory(config)), named_progress(name, progress)
    folder, lock = _place(config, key, told, out)
    with lock:
        reports[name] = filter_source(
            source,
            folder,
            key=key,
            processes=config.prepare_workers,
            memory=config.dedup_memory,
            progress=told,
        )
    return _written(folder, source)


def _left_across(
    sources: dict[str, Source],
    config: DataConfig,
    reports: Reports,
    progress: Progress,
    out: Path | None = None,
) -> dict[str, Source]:
    """Run the mixture's own filters. Returns the filtered sources, in NAME of `out` or the cache.

    If several sources have a document, the first of them keeps its copy.
    """
    assert config.train.name == "mixture"
    filters, first = config.train.filters, config.train.first
    names = sorted(sources, key=lambda name: name != first)
    texts = {n: sources[n] for n in names if sources[n].name not in CHAT_TEMPLATE_SOURCES}
    key = key_across(texts, filters, cache_directory(config))
    folder, lock = _place(config, key, progress, out)
    with lock:
        found = filter_across(
            texts,
            filters,
            folder,
            key=key,
            processes=config.prepare_workers,
            memory=config.dedup_memory,
            progress=progress,
        )
    for name, report in found.items():
        before = reports.get(name, report | {"filters": []})
        rows = {"filters": [*before["filters"], *report["filters"]]}
        reports[name] = {"read": before["read"], "kept": report["kept"], **rows}
    return {name: _written(folder / name, source) for name, source in texts.items()}


def _place(config: DataConfig, key: str, progress: Progress, out: Path | None) -> tuple[Path, Any]:
    """Folder of filtered text, and its lock if it is in the cache."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out, nullcontext()
    entry = cache_directory(config) / f"{key[:24]}-filtered"
    return entry / "text", locked(entry, progress)


def _written(directory: Path, source: Source) -> JsonlSource:
    """The source that reads the filtered text of another."""
    field, weight = field_of(source), source.sample_by
    return JsonlSource(path=str(directory), field=field, sample_by=weight)


def report_lines(name: str, report: dict[str, Any], samples: int = 0) -> Iterator[str]:
    """Yield a report as lines of text, with up to `samples` removed documents per reason."""
    read, kept = report["read"], report["kept"]
    width = max(len(row["name"]) for row in report["filters"])
    yield f"{name}: {read['documents']:,} documents, {read['bytes'] / 1e6:,.1f} MB"
    for row in report["filters"]:
        why = ", ".join(f"{reason} {count:,}" for reason, count in row["reasons"].items())
        told = why and [*row["reasons"]] != [*FILTERS[row["name"]].reasons]
        cut = f", {row['cut_bytes'] / 1e6:,.1f} MB of lines" if row["cut_bytes"] else ""
        yield (
            f"  {row['name']:{width}}  -{row['documents']:,} documents "
            f"({row['documents'] / read['documents']:.2%}), -{row['bytes'] / 1e6:,.1f} MB{cut}"
            + (f"  ({why})" if told else "")
        )
        shown: dict[str, int] = {}
        for sample in row["samples"]:
            shown[sample["reason"]] = shown.get(sample["reason"], 0) + 1
            if shown[sample["reason"]] <= samples:
                yield f"    [{sample['reason']}] {' '.join(sample['text'].split())[:200]}"
    yield (
        f"  {'left':{width}}   {kept['documents']:,} documents "
        f"({kept['documents'] / read['documents']:.2%}), {kept['bytes'] / 1e6:,.1f} MB "
        f"({kept['bytes'] / read['bytes']:.2%})"
    )
