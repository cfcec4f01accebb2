"""Scoring of documents: reads a source as tokens, and writes it as JSONL with the scores."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from jaxtrain.data.files.local import File
from jaxtrain.data.files.reading import Position, TextBlock, blocks, other_columns, records_of
from jaxtrain.data.files.sources import Source
from jaxtrain.data.filters.work import LEVEL, jsonl_line
from jaxtrain.data.pool import Map
from jaxtrain.data.store.encode import batch_blocks, encode_blocks, encode_job, token_type
from jaxtrain.data.tokenizer.tokenizer import Tokenizer


class DocumentGroup(NamedTuple):
    """Consecutive documents of a source."""

    documents: list[np.ndarray]  # tokens of each, after BOS, int32
    size: int  # bytes of text
    after: Position


def document_groups(
    source: Source,
    files: list[File],
    tokenizer: Tokenizer,
    folder: Path,
    begin: Position,
    mapped: Map,
) -> Iterator[DocumentGroup]:
    """Yield the documents of a source from `begin` on, a few MB at a time. folder: tokenizer's."""
    job, dtype = encode_job(source, folder), token_type(tokenizer.vocab_size)
    for answer in mapped(partial(encode_blocks, job), batch_blocks(blocks(source, files, begin))):
        ids, lengths = np.frombuffer(answer.train.ids, dtype), answer.train.lengths
        parts = np.split(ids.astype(np.int32), np.cumsum(lengths)[:-1]) if len(lengths) else []
        documents = [np.insert(part, 0, tokenizer.bos_id) for part in parts]
        yield DocumentGroup(documents, answer.size, answer.after)


def frames(
    source: Source,
    files: list[File],
    counts: Sequence[int],
    columns: Mapping[str, np.ndarray],
    mapped: Map,
) -> Iterator[tuple[bytes, int]]:
    """Yield a source as Zstandard frames of JSONL, each document with its value of each column.

    counts: documents of each group. Also yields the bytes of text of each frame.
    """
    ends = np.cumsum(counts)[:-1]
    parts = {name: np.split(column, ends) for name, column in columns.items()}
    numbers = ({name: part[i] for name, part in parts.items()} for i in range(len(counts)))
    tasks = zip(batch_blocks(blocks(source, files)), numbers, strict=True)
    return mapped(partial(_frame, source), tasks)


def _frame(source: Source, task: tuple[Sequence[TextBlock], Mapping[str, np.ndarray]]) -> Any:
    group, columns = task
    records = (records_of(source, b, other_columns(source, b)) for b in group)
    pairs = [pair for some in records for pair in some]
    rows = zip(*(round_scores(column) for column in columns.values()), strict=True)
    lines = [
        jsonl_line(source, text, {**record, **dict(zip(columns, row))})
        for (text, record), row in zip(pairs, rows, strict=True)
    ]
    text = "".join(lines).encode()
    size = sum(len(text.encode()) for text, _ in pairs)
    return zstandard.ZstdCompressor(level=LEVEL).compress(text), size


def round_scores(column: np.ndarray) -> list[float | None]:
    """Round values to seven digits, the precision of float32; None for NaN."""
    return [None if value != value else float(f"{value:.7g}") for value in column.tolist()]
