"""The filter workers: blocks of text -> verdicts, and the documents that stay."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from jaxtrain.data.files.reading import Position, TextBlock, other_columns, records_of
from jaxtrain.data.files.sources import Source, field_of
from jaxtrain.data.filters import FILTERS
from jaxtrain.data.filters.batch import TextBatch

SAMPLES = 3  # removed documents that are shown for each reason
SHOWN = 400  # characters of each
LEVEL = 3  # of Zstandard
PART = 1 << 19  # bytes of text that go through the filters together


class FilterJob(NamedTuple):
    """A source and its filters, each already prepared (`FilterFunctions.prepare`)."""

    source: Any
    filters: tuple[Any, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        scores = [f.field for f in self.filters if f.name == "score"]
        return (*scores, *([self.source.sample_by] if self.source.sample_by else []))


class Found(NamedTuple):
    """The verdicts on a group of blocks, D documents."""

    removed_D: np.ndarray  # uint8: the number of the filter that removes each, from 1; 0: none
    reasons_D: np.ndarray  # uint8: the reason of that filter
    sizes_DF: np.ndarray  # uint32: bytes that reach each filter; last, bytes that pass them all
    marks: dict[int, np.ndarray]  # [D, ...] of each filter that decides over all documents
    size: int
    after: Position


class Sample(NamedTuple):
    """A removed document, and the hash by which samples are chosen."""

    hash: int
    filter: int
    reason: int
    text: str


class Kept(NamedTuple):
    """The remaining documents of a group, as JSONL, and samples of the removed ones."""

    data: bytes  # a frame of Zstandard
    size: int
    samples: list[Sample]


def apply_filters(job: FilterJob, group: Sequence[TextBlock]) -> Found:
    """Runs the filters over a group of blocks, in order."""
    batch = read_batch(job, group)
    ends = np.cumsum(batch.sizes())
    # Arrays that stay in the cache of a core are twice as fast.
    cuts = np.flatnonzero(np.diff(ends // PART, append=-1)) + 1
    parts = [
        _filter_part(job, batch.take(np.arange(start, stop)))
        for start, stop in zip([0, *cuts.tolist()], cuts.tolist())
    ]
    if not parts:
        parts = [_filter_part(job, batch)]
    removed, reasons, sizes, marks = zip(*parts)
    together = {number: np.concatenate([some[number] for some in marks]) for number in marks[0]}
    size = int(ends[-1]) if len(ends) else 0
    removed_D, reasons_D, sizes_DF = map(np.concatenate, (removed, reasons, sizes))
    return Found(removed_D, reasons_D, sizes_DF, together, size, group[-1].after)


def _filter_part(
    job: FilterJob, batch: TextBatch
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, np.ndarray]]:
    """The first four fields of `Found`."""
    count, left = len(batch.texts), np.arange(len(batch.texts))
    removed, reasons = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    sizes, marks = np.zeros((count, len(job.filters) + 1), np.uint32), {}
    for number, filter in enumerate(job.filters):
        kind = FILTERS[filter.name]
        sizes[left, number] = batch.sizes()
        if kind.features is not None:
            some = kind.features(filter, batch)
            marks[number] = np.zeros((count, *some.shape[1:]), some.dtype)
            marks[number][left] = some
        if kind.apply is not None:
            of, texts = kind.apply(filter, batch)
            reasons[left] = of
            removed[left[of > 0]] = number + 1
            stay = np.flatnonzero(of == 0)
            left, batch = left[stay], batch.take(stay, texts)
    sizes[left, -1] = batch.sizes()
    return removed, reasons, sizes, marks


def write_kept(job: FilterJob, task: tuple[Sequence[TextBlock], np.ndarray, np.ndarray]) -> Kept:
    """Write the documents of a group that no filter removed, with the filters' edits."""
    group, removed, reasons = task
    batch = read_batch(job, group, whole=True)
    samples: dict[tuple[int, int], list[Sample]] = {}
    for index in np.flatnonzero(removed):
        text, why = batch.texts[index], (int(removed[index]), int(reasons[index]))
        digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
        samples.setdefault(why, []).append(Sample(int.from_bytes(digest), *why, text[:SHOWN]))
    size = sum(batch.sizes())
    kept = batch.take(np.flatnonzero(removed == 0))
    for filter in job.filters:
        kind = FILTERS[filter.name]
        if kind.edits and kind.apply is not None:
            texts = kind.apply(filter, kept).texts
            kept = kept.take(np.arange(len(kept.texts)), texts)
    lines = [jsonl_line(job.source, text, record) for text, record in zip(kept.texts, kept.records)]
    data = zstandard.ZstdCompressor(level=LEVEL).compress("".join(lines).encode()) if lines else b""
    return Kept(data, size, lowest([s for some in samples.values() for s in some]))


def lowest(samples: list[Sample]) -> list[Sample]:
    """Samples with the lowest hashes of each reason, whatever the order of the work."""
    some: list[Sample] = []
    counts: dict[tuple[int, int], int] = {}
    for sample in sorted(samples):
        why = (sample.filter, sample.reason)
        counts[why] = counts.get(why, 0) + 1
        if counts[why] <= SAMPLES:
            some.append(sample)
    return some


def read_batch(job: FilterJob, group: Sequence[TextBlock], whole: bool = False) -> TextBatch:
    """Read the documents of a group with the fields that filters use, or with all if `whole`."""
    fields = lambda block: other_columns(job.source, block) if whole else job.fields
    pairs = [pair for block in group for pair in records_of(job.source, block, fields(block))]
    return TextBatch([text for text, _ in pairs], [record for _, record in pairs])


def jsonl_line(source: Source, text: str, record: Mapping[str, Any]) -> str:
    """Format a document as JSONL with all fields of its record, under their own names.

    JSON lacks some types: bytes become base64, and dates and the like become strings.
    """
    plain = lambda value: b64encode(value).decode() if isinstance(value, bytes) else str(value)
    return json.dumps({**record, field_of(source): text}, ensure_ascii=False, default=plain) + "\n"
