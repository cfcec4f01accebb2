"""Follow a metrics.jsonl while it is written: return the rows added since the last read."""

import json
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxtrain.runs.history import MetricsRow, is_row

AT_ONCE = 1 << 20  # bytes per read, so that a long history comes in parts
MARK = 256  # bytes before the read position that must be unchanged


class News(NamedTuple):
    """Result of one read."""

    reset: bool  # discard all earlier rows: the run was resumed, or started afresh
    rows: list[MetricsRow]
    damaged: int  # number of invalid lines so far
    more: bool  # another read finds more at once


class Tail:
    """Follows a file that grows, and that is replaced when its run goes back to a checkpoint.

    An incomplete last line is left for the next read: its writer is busy, or was killed.
    """

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._inode, self._place, self._mark, self._damaged = 0, 0, b"", 0

    def look(self) -> News:
        """Read the rows written since the last call. A missing file has no rows."""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            reset = self._place > 0
            self._forget()
            return News(reset, [], 0, False)

    def _read(self, file: BinaryIO) -> News:
        state = os.fstat(file.fileno())
        size, inode = state.st_size, state.st_ino
        reset = False
        if self._place:
            file.seek(self._place - len(self._mark))
            if inode != self._inode or file.read(len(self._mark)) != self._mark:
                reset = True
                self._forget()
        self._inode = inode
        file.seek(self._place)
        chunk = file.read(AT_ONCE)
        while b"\n" not in chunk and (more := file.read(AT_ONCE)):  # a line longer than AT_ONCE
            chunk += more
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._place += len(whole)
        self._mark = (self._mark + whole)[-MARK:]
        lines = whole.split(b"\n")[:-1]
        rows = [row for line in lines if (row := parsed(line)) is not None]
        self._damaged += len(lines) - len(rows)
        return News(reset, rows, self._damaged, self._place < size and bool(whole))


def parsed(line: bytes) -> MetricsRow | None:
    """Parse a row; None if the line is not one. NaN and infinities become None."""
    try:
        row = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return row if is_row(row) else None
