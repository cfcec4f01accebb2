"""Benchmark of the data filters: the share that each removes from a text, and its speed."""

import os
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.data import timed_row
from benchmarks.record import describe
from jaxtrain.config import load_config
from jaxtrain.data.files.reading import blocks
from jaxtrain.data.files.sources import find_files
from jaxtrain.data.filters import FILTERS
from jaxtrain.data.filters.filtering import filter_key, filter_source
from jaxtrain.data.filters.work import FilterJob, apply_filters
from jaxtrain.data.pool import cores
from jaxtrain.data.store.encode import batch_blocks

ALL = (
    "exact_duplicates", "script", "language", "gopher_quality", "gopher_repetition", "c4",
    "fineweb", "near_duplicates", "decontaminate",
)  # fmt: skip
GROUPS = 8  # groups of 4 MB: the text that each filter alone is timed on


def bench_filters(overrides: Sequence[str], variant: str | None = None) -> dict[str, Any]:
    """A row for each of `data.train.filters` (default: all that need no score), and one for all.

    The filters form a chain: each reads the output of those before it. A filter's speed is measured
    alone on one core, including reading; MB are of UTF-8 text.
    """
    config = load_config(None, [*overrides, "data.validation.name=none"]).data
    source = config.train
    assert source.name != "mixture"
    if not source.filters:
        filters = [{"name": name} for name in ALL]
        source = type(source).model_validate(source.model_dump() | {"filters": filters})
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "text"
        with timed_row(rows, "all", "") as whole:
            report = filter_source(
                source, out, key=filter_key(source, Path(folder)), processes=None
            )
        read, left = report["read"], report["kept"]
        whole |= {"mb": read["bytes"] / 1e6}
        whole |= shares({name: read[name] - left[name] for name in read}, read)
        some = list(islice(batch_blocks(blocks(source, find_files(source))), GROUPS))
        for filter, found in zip(source.filters, report["filters"]):
            ready = FILTERS[filter.name].prepare
            job = FilterJob(source, (filter if ready is None else ready(filter, Path(folder)),))
            with timed_row(rows, filter.name, "") as row:
                row["mb"] = sum(apply_filters(job, group).size for group in some) / 1e6
            lost = {"documents": found["documents"], "bytes": found["bytes"] + found["cut_bytes"]}
            row |= shares(lost, read) | {"reasons": found["reasons"]}
    shape = f"{Path(source.path).name.partition('.')[0]}, {read['bytes'] / 1e6:.0f} MB"
    for row in rows:
        mb, processor = row.pop("mb"), row.pop("cpu_s")
        row |= {"shape": shape, "mb_per_s": mb / row["seconds"], "mb_per_cpu_s": mb / processor}
    workload = {"cores": cores(), "load": os.getloadavg()[0], "read": read}
    return describe("filters", source.name, variant or "", workload=workload) | {"rows": rows}


def shares(lost: dict[str, int], read: dict[str, int]) -> dict[str, Any]:
    """Removed documents and bytes, and their shares of those read."""
    return {
        "documents": lost["documents"],
        "of_documents": lost["documents"] / read["documents"],
        "bytes": lost["bytes"],
        "of_bytes": lost["bytes"] / read["bytes"],
    }
