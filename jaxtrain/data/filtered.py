"""The sources of a configuration as their filters leave them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtrain.data.config import DataConfig
from jaxtrain.data.prepare import Progress, _locked, cache_directory
from jaxtrain.data.quality.filtering import filter_source, key_of
from jaxtrain.data.sources import JsonlSource, Source
from jaxtrain.settings import UserError

Reports = dict[str, dict[str, Any]]  # what filters removed, by the name of the source


def filtered(config: DataConfig, progress: Progress) -> tuple[DataConfig, Reports]:
    """The configuration with each source that has filters replaced by what they leave of it.

    That is JSONL in the cache, by a hash of the text and the filters; it is written if it is not
    there. A single source is named train, one of its own for validation is named validation.
    """
    reports: Reports = {}

    def left(name: str, source: Source) -> Source:
        if not source.filters:
            return source
        cache = cache_directory(config)
        key = key_of(source, cache)
        directory = cache / f"{key[:24]}-filtered"
        report = lambda stage, *rest: progress(f"{name}: {stage}", *rest)
        with _locked(directory):
            reports[name] = filter_source(
                source,
                directory / "text",
                key=key,
                processes=config.prepare_workers,
                progress=report,
            )
        return JsonlSource(path=str(directory / "text"))

    update: dict[str, Any] = {}
    if config.train.name == "mixture":
        parts = {
            name: part.model_copy(update={"source": left(name, part.source)})
            for name, part in config.train.sources.items()
        }
        update["train"] = config.train.model_copy(update={"sources": parts})
    else:
        update["train"] = left("train", config.train)
    if config.validation.name == "source":
        source = left("validation", config.validation.source)
        update["validation"] = config.validation.model_copy(update={"source": source})
    return config.model_copy(update=update), reports


def filter_into(config: DataConfig, out: Path, progress: Progress) -> Reports:
    """Writes what the filters leave of the training text into `out`, of a mixture into `out`/NAME.

    The report is beside each folder. Raises UserError if no source has filters.
    """
    named: dict[str, tuple[Source, Path]] = {}
    if config.train.name == "mixture":
        parts = config.train.sources.items()
        named = {name: (part.source, out / name) for name, part in parts if part.source.filters}
    elif config.train.filters:
        named = {"train": (config.train, out)}
    if not named:
        raise UserError("data.train.filters is empty: there is nothing to filter by")
    out.parent.mkdir(parents=True, exist_ok=True)
    reports: Reports = {}
    for name, (source, directory) in named.items():
        directory.parent.mkdir(exist_ok=True)
        reports[name] = filter_source(
            source,
            directory,
            key=key_of(source, cache_directory(config)),
            processes=config.prepare_workers,
            progress=progress,
        )
    return reports


def report_lines(name: str, report: dict[str, Any], samples: int = 0) -> Iterator[str]:
    """A table for people, and so many of the documents that were removed for each reason."""
    read, kept = report["read"], report["kept"]
    width = max(len(row["name"]) for row in report["filters"])
    yield f"{name}: {read['documents']:,} documents, {read['bytes'] / 1e6:,.1f} MB"
    for row in report["filters"]:
        why = ", ".join(f"{reason} {count:,}" for reason, count in row["reasons"].items())
        cut = f", {row['cut_bytes'] / 1e6:,.1f} MB of lines" if row["cut_bytes"] else ""
        yield (
            f"  {row['name']:{width}}  -{row['documents']:,} documents "
            f"({row['documents'] / read['documents']:.2%}), -{row['bytes'] / 1e6:,.1f} MB{cut}"
            + (f"  ({why})" if len(row["reasons"]) > 1 else "")
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
