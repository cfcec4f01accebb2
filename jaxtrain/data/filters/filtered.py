"""The sources of a configuration as their filters leave them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtrain.data.batches.mixture import sources_of
from jaxtrain.data.config import DataConfig
from jaxtrain.data.files.sources import CHAT_TEMPLATE_SOURCES, JsonlSource, Source, field_of
from jaxtrain.data.filters import FILTERS
from jaxtrain.data.filters.across import filter_across, key_across
from jaxtrain.data.filters.filtering import filter_key, filter_source
from jaxtrain.data.store.prepare import _locked, cache_directory
from jaxtrain.data.store.progress import Progress
from jaxtrain.settings import UserError

Reports = dict[str, dict[str, Any]]  # what filters removed, by the name of the source


def filter_sources(config: DataConfig, progress: Progress) -> tuple[DataConfig, Reports]:
    """The configuration with each source that has filters replaced by what they leave of it.

    That is JSONL in the cache, by a hash of the text and the filters; it is written if it is not
    there. A single source is named train, one of its own for validation is named validation. The
    filters of a mixture come after those of its sources.
    """
    reports: Reports = {}
    cache, train = cache_directory(config), config.train
    left = {
        name: _left(name, source, config, reports, progress)
        for name, source in sources_of(train).items()
    }
    if train.name == "mixture" and train.filters:
        texts = priority_order(left, train.first)
        key = key_across(texts, train.filters, cache)
        directory = cache / f"{key[:24]}-filtered"
        with _locked(directory, progress):
            left |= _across(config, texts, directory / "text", key, reports, progress)
    update: dict[str, Any] = {"train": left.get("train")}
    if train.name == "mixture":
        parts = {
            name: part.model_copy(update={"source": left[name]})
            for name, part in train.sources.items()
        }
        update["train"] = train.model_copy(update={"sources": parts})
    if config.validation.name == "source":
        source = _left("validation", config.validation.source, config, reports, progress)
        update["validation"] = config.validation.model_copy(update={"source": source})
    return config.model_copy(update=update), reports


def _left(
    name: str, source: Source, config: DataConfig, reports: Reports, progress: Progress
) -> Source:
    """A source as its own filters leave it."""
    if not source.filters:
        return source
    cache = cache_directory(config)
    key = filter_key(source, cache)
    directory = cache / f"{key[:24]}-filtered"
    report = lambda stage, *rest: progress(f"{name}: {stage}", *rest)
    with _locked(directory, report):
        reports[name] = filter_source(
            source,
            directory / "text",
            key=key,
            processes=config.prepare_workers,
            progress=report,
        )
    return _written(directory / "text", source)


def _written(directory: Path, source: Source) -> JsonlSource:
    """The source that reads the filtered text of another."""
    field, weight = field_of(source), source.sample_by
    return JsonlSource(path=str(directory), field=field, sample_by=weight)


def priority_order(sources: dict[str, Source], first: str | None) -> dict[str, Source]:
    """The sources of text, and the one that is named before all others."""
    names = sorted(sources, key=lambda name: name != first)
    return {
        name: sources[name] for name in names if sources[name].name not in CHAT_TEMPLATE_SOURCES
    }


def _across(
    config: DataConfig,
    texts: dict[str, Source],
    directory: Path,
    key: str,
    reports: Reports,
    progress: Progress,
) -> dict[str, Source]:
    """The sources of a mixture as its filters leave them, in `directory`/NAME."""
    assert config.train.name == "mixture"
    found = filter_across(
        texts,
        config.train.filters,
        directory,
        key=key,
        processes=config.prepare_workers,
        progress=progress,
    )
    for name, report in found.items():
        before = reports.get(name, report | {"filters": []})
        rows = {"filters": [*before["filters"], *report["filters"]]}
        reports[name] = {"read": before["read"], "kept": report["kept"], **rows}
    return {name: _written(directory / name, source) for name, source in texts.items()}


def filter_into(config: DataConfig, out: Path, progress: Progress) -> Reports:
    """Writes what the filters leave of the training text into `out`, of a mixture into `out`/NAME.

    The report is beside each folder, or beside `out` if the mixture itself has filters. Raises
    UserError if there are no filters.
    """
    reports: Reports = {}
    train, cache = config.train, cache_directory(config)
    sources, into = sources_of(train), {"train": out}
    if train.name == "mixture":
        into = {name: out / name for name in sources}
    out.parent.mkdir(parents=True, exist_ok=True)
    if train.name == "mixture" and train.filters:
        left = {n: _left(n, source, config, reports, progress) for n, source in sources.items()}
        texts = priority_order(left, train.first)
        _across(config, texts, out, key_across(texts, train.filters, cache), reports, progress)
        return reports
    for name, source in sources.items():
        if source.filters:
            into[name].parent.mkdir(exist_ok=True)
            reports[name] = filter_source(
                source,
                into[name],
                key=filter_key(source, cache),
                processes=config.prepare_workers,
                progress=progress,
            )
    if not reports:
        raise UserError("data.train.filters is empty: there is nothing to filter by")
    return reports


def report_lines(name: str, report: dict[str, Any], samples: int = 0) -> Iterator[str]:
    """A table for people, and so many of the documents that were removed for each reason."""
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
