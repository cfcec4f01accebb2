"""Marks: features of each document, in files, for filters that decide over all documents.

A file has the marks of consecutive documents, each column of a filter as one array, so that a
column is read without the others. A column is partitioned by its values, into temporary files:
equal values are in one partition, and memory holds a few partitions at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

MOST_PARTS = 512  # files that are open at once
# Memory per document of a partition, at most: two copies in a message, and the sort.
BYTES = 64


class MarkFiles(NamedTuple):
    """The marks of one filter on the documents that reach it, numbered from 0."""

    files: Sequence[Path]
    number: int  # of the filter
    here_D: np.ndarray  # bool, of all documents: whether it reaches the filter
    parts: int  # partitions of a column
    scratch: Path  # a folder for their files

    def columns(self) -> int:
        """Number of marks of a document."""
        with np.load(self.files[0]) as arrays:
            return sum(name.startswith(f"marks{self.number}.") for name in arrays)

    def pieces(self, column: int) -> Iterator[np.ndarray]:
        """Yield a column, file by file."""
        at = 0
        for path in self.files:
            with np.load(path) as arrays:
                values = arrays[f"marks{self.number}.{column}"]
            yield values[self.here_D[at : at + len(values)]]
            at += len(values)

    def column(self, column: int = 0) -> np.ndarray:
        """A whole column."""
        return np.concatenate([*self.pieces(column)])

    def partitions(self, column: int) -> Iterator[np.ndarray]:
        """Yield each partition as uint64 [documents, 2]: (value, document), without values of 0."""
        files = [(self.scratch / f"partition-{i}.tmp").open("w+b") for i in range(self.parts)]
        try:
            at = 0
            for keys in self.pieces(column):
                pairs = np.stack([keys, np.arange(at, at + len(keys), dtype=np.uint64)], axis=1)
                pairs = pairs[keys != 0]
                part = (pairs[:, 0] >> np.uint64(32)) * np.uint64(self.parts) >> np.uint64(32)
                order = np.argsort(part, kind="stable")
                ends = np.searchsorted(part[order], np.arange(1, self.parts))
                for file, some in zip(files, np.split(pairs[order], ends), strict=True):
                    file.write(some.tobytes())
                at += len(keys)
            for file in files:
                file.seek(0)
                yield np.frombuffer(file.read(), np.uint64).reshape(-1, 2)
        finally:
            for file in files:
                file.close()
                Path(file.name).unlink()


def mark_columns(marks: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a file. marks: [documents] or [documents, columns], by the number of the filter."""
    return {
        f"marks{number}.{index}": column
        for number, some in marks.items()
        for index, column in enumerate(some.T if some.ndim == 2 else [some])
    }


def count_parts(documents: int, tasks: int, memory: float) -> int:
    """Number of partitions of the documents, such that `tasks` at once fit in `memory` GiB."""
    return min(MOST_PARTS, max(1, -int(-documents * BYTES * tasks // int(memory * 2**30))))
