"""Repeat the measurements of CPU records, and report the figures that moved beyond their spread.

    python -m benchmarks check
    python -m benchmarks check --only packing preflight

Each record's own `command` runs in its own process. The spread of a figure is its range over seeds
if there are several, else the default of its kind (`ALLOWED`).
"""

import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.figures import COMPUTED, command_of
from benchmarks.record import RESULTS, Record, read_results, write
from benchmarks.tables import to_rich
from jaxtrain.settings import UserError

NAMES = ("name", "shape", "backend", "model")  # rows that are equal in these are repeats
FACTS = ("seed", "cpus", "steps", "failed", "label")


class Allowed(NamedTuple):
    """How far a figure of one kind may be from its record: the larger of the two bounds."""

    relative: float
    absolute: float = 0.0


# Default spread by kind of metric. Times: half to twice the record (two runs of one commit on a
# shared CPU differed by a factor of 1.7). Losses: two seeds of one recipe. Bytes: another version
# of the compiler. Counts do not move.
ALLOWED = {
    "time": Allowed(1.0),
    "loss": Allowed(0.0, 0.005),
    "bytes": Allowed(0.02),
    "count": Allowed(1e-6, 1e-9),
}
TIMES = (
    "ms", "seconds", "tokens_per_s", "gbps", "tflops", "of_raw", "compile_s", "epochs", "watts",
    "sm_mhz", "speedup",
)  # fmt: skip
LOSSES = ("bpb", "loss", "core")
BYTES = ("step_bytes", "activations_bytes", "total_bytes", "first_mib", "last_mib")


class Figure(NamedTuple):
    """One figure of a record and its new value. verdict: moved, same, or not run and why."""

    record: str
    metric: str = ""
    recorded: float | None = None
    now: float | None = None
    spread: float | None = None
    verdict: str = "same"


def kind_of(metric: str, bench: str) -> str:
    """The kind of a metric, which selects its default spread: time, loss, bytes or count."""
    timed = metric in TIMES or "_per_" in metric
    if timed and not (bench in COMPUTED and metric != "compile_s"):  # computed times are exact
        return "time"
    if metric in LOSSES:
        return "loss"
    # A dry run computes bytes and times from a compiled program. Perplexity is e^loss.
    estimate = bench == "preflight" and metric.endswith("_ms")
    return "bytes" if metric in BYTES or metric == "perplexity" or estimate else "count"


def figures_of(record: Record) -> dict[str, list[float]]:
    """The values of a record by `row metric`; a list of several if rows differ only in the seed."""
    found: dict[str, list[float]] = {}

    def add(prefix: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float) and name not in (*NAMES, *FACTS):
                found.setdefault(f"{prefix} {name}".strip(), []).append(float(value))

    add("", record.get("metrics", {}))
    for row in record.get("rows", ()):
        add(", ".join(str(row[name]) for name in NAMES if row.get(name)), row)
    return found


def compare(record: Record, now: Record) -> Iterator[Figure]:
    """Yield every figure of a record with its value in `now`."""
    name, new = record["file"], figures_of(now)
    for metric, values in figures_of(record).items():
        kind = kind_of(metric.rsplit(" ", 1)[-1], record["bench"])
        recorded = statistics.mean(values)
        allowed = ALLOWED[kind]
        spread = max(values) - min(values)
        if not spread or kind == "time":
            spread = max(spread, allowed.relative * abs(recorded), allowed.absolute)
        if metric not in new:
            yield Figure(name, metric, recorded, None, spread, "moved: it is not measured any more")
            continue
        value = statistics.mean(new[metric])
        close = abs(value - recorded) <= spread or (math.isnan(value) and math.isnan(recorded))
        close &= kind != "time" or value >= recorded / 2
        yield Figure(name, metric, recorded, value, spread, "same" if close else "moved")


def why_not(record: Record) -> str | None:
    """Why a record cannot be measured again on this machine; None if it can."""
    if record["bench"] not in COMPUTED and record["device"] != "cpu":
        return f"not run: it is of {record['device']}"
    if not command_of(record):
        return "not run: its command was not kept"
    return None


def measure_again(record: Record, folder: Path) -> Record | str:
    """Run a record's command in its own process; returns the new record, or why there is none."""
    words = shlex.split(record["command"])
    if words[:3] != ["python", "-m", "benchmarks"]:
        return f"not run: {record['command']} is no benchmark"
    more = [] if "--record" in words else ["--record"]
    command = [sys.executable, *words[1:], *more, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    path = folder / Path(record["file"]).name
    if done.returncode or not path.is_file():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"not run: {lines[-1].removeprefix('error: ')}"
    return json.loads(path.read_text())


def check_records(
    only: Sequence[str], record: bool, console: Console, results: Path = RESULTS
) -> int:
    """Print a line per figure; returns 1 if one moved, else 0. record: write the moved records.

    Raises UserError for a name in `only` that no record has.
    """
    records = read_results(results)
    for name in only:
        if not any(name in one["file"] for one in records):
            raise UserError(f"check: no record's file name has {name} in it")
    chosen = [one for one in records if not only or any(name in one["file"] for name in only)]
    moved, rows = 0, list[Figure]()
    with tempfile.TemporaryDirectory() as folder:
        for one in chosen:
            if reason := why_not(one):
                rows.append(Figure(one["file"], verdict=reason))
                continue
            console.print(f"{one['file']}: {one['command']}", highlight=False, soft_wrap=True)
            now = measure_again(one, Path(folder))
            if isinstance(now, str):
                rows.append(Figure(one["file"], verdict=now))
                continue
            found = list(compare(one, now))
            rows += found
            worse = sum(figure.verdict.startswith("moved") for figure in found)
            moved += worse
            if worse and record:
                write(now, results)
    console.print(table_of(rows))
    console.print(
        f"{sum(row.verdict == 'same' for row in rows)} figures are the same, {moved} moved, "
        f"{sum(row.verdict.startswith('not run') for row in rows)} records were not run"
    )
    return 1 if moved else 0


def table_of(rows: Sequence[Figure]) -> Any:
    """The figures as a table."""
    show = lambda x: "-" if x is None else f"{x:,.6g}"
    header = ["record", "metric", "recorded", "now", "spread", "verdict"]
    cells = [
        [
            row.record,
            row.metric or "-",
            show(row.recorded),
            show(row.now),
            show(row.spread),
            row.verdict,
        ]
        for row in rows
    ]
    return to_rich("figures measured again", header, cells)
