"""A folder of runs for the page: its runs and their states, without access to paths outside."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.runs.history import MetricsRow
from jaxtrain.runs.lock import Holder, known_gone, locks_in, read_holder
from jaxtrain.runs.page.tail import parsed
from jaxtrain.settings import UserError, is_text

MAX_DEPTH = 4  # depth of a run below the folder; trials of a sweep are at depth three
ENDS = 1 << 16  # bytes at each end of a metrics.jsonl that are read for the list
SKIPPED = ("checkpoints", "model", "tensorboard", "tokenizer", "samples", "states")


class Summary(NamedTuple):
    """One run in the list of runs."""

    name: str  # its path below the folder
    state: str  # running, finished, stopped, interrupted, failed, died, or model (never trained)
    status: str  # of the last `end` event
    changed: float  # seconds since 1970
    step: float | int | None
    total_steps: int | None
    parameters: int | None
    loss: float | int | None  # of the last training row
    bpb: float | int | None  # of the last validation near the end
    holder: str | None  # the process that runs it


class RunFolder:
    """The runs below a folder. A run's name is its path below it; paths outside are rejected."""

    def __init__(self, root: Path):
        if not root.is_dir():
            raise UserError(f"{root} is not a folder: give a folder of runs, such as runs/")
        self.root = root.resolve()
        self.shown = root  # as the user typed it, for commands
        self._seen: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def path(self, name: str, *parts: str) -> Path:
        """The path of a run, or of a file in it. Raises UserError if it is not in the folder."""
        if not is_text(name) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"no run {name!r}: give a path below {self.root.name}/")
        run_dir = self.root / name
        path = run_dir.joinpath(*parts)
        if not path.resolve().is_relative_to(self.root) or not self._is_run(run_dir):
            raise UserError(f"no run {name!r} in {self.root.name}/")
        return path

    def text(self, name: str, *parts: str, limit: int = 1 << 22) -> str | None:
        """The text of a run's file, at most `limit` characters; None if there is no such file."""
        path = self.path(name, *parts)
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            return file.read(limit)
        return None

    def object(self, name: str, *parts: str) -> dict[str, Any]:
        """The object in a run's JSON file; {} if it is missing or damaged."""
        with suppress(ValueError, RecursionError):
            found = json.loads(self.text(name, *parts) or "", parse_constant=lambda name: None)
            return found if isinstance(found, dict) else {}
        return {}

    def names(self) -> list[str]:
        """Names of all runs, sorted by path."""
        return [str(path.relative_to(self.root)) for path in self._runs(self.root, MAX_DEPTH)]

    def _runs(self, folder: Path, depth: int) -> Iterator[Path]:
        if self._is_run(folder):
            yield folder
            return
        if depth:
            with suppress(OSError):
                for path in sorted(folder.iterdir()):
                    if path.name not in SKIPPED and path.is_dir() and self._inside(path):
                        yield from self._runs(path, depth - 1)

    def _inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.root)

    def _is_run(self, path: Path) -> bool:
        return any((path / name).is_file() for name in ("metrics.jsonl", "config.yaml"))

    def summaries(self) -> list[Summary]:
        """Summaries of all runs, most recently changed first."""
        found = []
        for name in self.names():
            with suppress(UserError, OSError):
                found.append(self.summary(name))
        return sorted(found, key=lambda one: -one.changed)

    def summary(self, name: str) -> Summary:
        """Summary of one run."""
        run_dir, metrics = self.path(name), self.path(name, "metrics.jsonl")
        ends = self._ends(metrics)
        holder = self.holder(name)
        state, status = state_of(ends.get("mark"), holder is not None)
        changed = (metrics if metrics.exists() else run_dir).stat().st_mtime
        start = ends.get("start", {})
        return Summary(
            name, state, status, round(changed, 1), ends.get("step"),
            whole_number(start, "total_steps"), whole_number(start, "parameters"), ends.get("loss"),
            ends.get("bpb"), f"process {holder.pid} on {holder.host}" if holder else None,
        )  # fmt: skip

    def holder(self, name: str) -> Holder | None:
        """The live process that holds a run's lock, or None. A stale lock does not count."""
        run_dir = self.path(name)
        for number in locks_in(run_dir)[-1:]:
            path = self.path(name, f"lock.{number}")
            holder = read_holder(path)
            if holder is None:
                return None
            gone = known_gone(holder)
            if gone is None:
                gone = time.time() - path.stat().st_mtime > holder.timeout
            return None if gone else holder
        return None

    def _ends(self, metrics: Path) -> dict[str, Any]:
        """Values of the first and last rows, cached until the file changes."""
        try:
            state = metrics.stat()
        except OSError:
            return {}
        signature = (state.st_ino, state.st_size, state.st_mtime_ns)
        if metrics not in self._seen or self._seen[metrics][0] != signature:
            self._seen[metrics] = signature, read_ends(metrics, state.st_size)
        return self._seen[metrics][1]

    def steps_saved(self, name: str) -> list[int]:
        """Steps of a run's checkpoints, in ascending order."""
        folder = self.path(name, "checkpoints")
        return sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit())

    def samples(self, name: str) -> dict[int, str]:
        """Step -> name of its file of samples."""
        files = self.path(name, "samples").glob("step_*.txt")
        found = {int(digits[0]): p.name for p in files if (digits := re.findall(r"\d+", p.stem))}
        return dict(sorted(found.items()))


def read_ends(metrics: Path, size: int) -> dict[str, Any]:
    """The last start, the last start or end, and the last figures of a metrics.jsonl."""
    with metrics.open("rb") as file:
        head = file.read(ENDS)
        file.seek(max(0, size - ENDS))
        tail = file.read()
    rows = lambda part: [row for line in part if (row := parsed(line)) is not None]
    first, last = rows(head.split(b"\n")), rows(tail.split(b"\n"))
    found: dict[str, Any] = {}
    starts = [row for row in (*first, *last) if row.get("event") == "start"]
    marks = [row for row in (*first, *last) if row.get("event") in ("start", "end")]
    if starts:
        found["start"] = starts[-1]
    if marks:
        found["mark"] = marks[-1]
    for row in last:
        if row["kind"] == "train":
            found |= {"step": row["step"], "loss": number(row, "loss")}
        if row["kind"] == "validation":
            found["bpb"] = number(row, "bpb")
    return found


def number(row: MetricsRow, key: str) -> float | int | None:
    """The value of a key if it is a number, else None: the run may be malformed."""
    value = row.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def whole_number(row: MetricsRow, key: str) -> int | None:
    """The value of a key if it is an int, else None."""
    value = number(row, key)
    return value if isinstance(value, int) else None


def state_of(mark: MetricsRow | None, locked: bool) -> tuple[str, str]:
    """(state in one word, status), from the run's last start or end event."""
    if locked:
        return "running", ""
    if mark is None:
        return "model", ""
    if mark["event"] == "start":
        return "died", "no end recorded, and no process holds the run"
    status = str(mark.get("status", ""))
    return re.split(r"\W", status)[0] or "finished", status
