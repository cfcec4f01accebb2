"""`jaxtrain compare RUN RUN ...`: compare runs, from the files in their directories.

Losses are compared at equal steps, and by the training seconds to an equal loss. Each curve is
interpolated linearly between its points.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxtrain.runs.arguments import compare_parser
from jaxtrain.runs.goodput import goodput
from jaxtrain.runs.history import MetricsRow, read_rows
from jaxtrain.runs.job import leaves
from jaxtrain.settings import UserError, command
from jaxtrain.storage.strict_yaml import read_yaml

# Measures (kind of row, name, title). Curves show the first one that every run has.
MEASURES = (
    ("validation", "bpb", "validation bits per byte"),
    ("validation", "loss", "validation loss, nats per token"),
    ("train", "loss", "training loss, nats per token"),
)
# Prefixes of settings that are not compared: where a run is, not what it computes.
PLACES = ("run.name", "run.directory", "run.preemption", "data.cache_dir")
PLAIN = (str, int, float, bool, type(None))
SMOOTHED = 20  # training losses that are averaged into one point


class Run(NamedTuple):
    """Contents of a run directory; `config` and `env` are plain trees."""

    name: str
    config: dict[str, Any]
    env: dict[str, Any]
    rows: list[MetricsRow]


def read_run(run_dir: Path) -> Run:
    """Read a run directory. Raises UserError if a file is missing."""
    for name in ("config.yaml", "env.json", "metrics.jsonl"):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} is not a run directory: it has no {name}")
    config = read_yaml(run_dir / "config.yaml")
    env = json.loads((run_dir / "env.json").read_text("utf-8"))
    return Run(run_dir.resolve().name, config, env, read_rows(run_dir / "metrics.jsonl"))


class Curve(NamedTuple):
    """One run's curve of a measure."""

    steps: list[int]
    seconds: list[float]  # of training, without validations, up to each step
    losses: list[float]

    def at(self, step: int) -> float | None:
        """The loss at a step; None before the first point."""
        return None if step < self.steps[0] else float(np.interp(step, self.steps, self.losses))

    def reaches(self, target: float) -> tuple[float, float] | None:
        """(step, seconds) at which the curve first reaches `target` or below; None if never."""
        last = next((i for i, loss in enumerate(self.losses) if loss <= target), None)
        if last is None:
            return None
        first = max(0, last - 1)
        high, low = self.losses[first], self.losses[last]
        share = (high - target) / (high - low) if high > low else 0.0
        between = lambda x: x[first] + share * (x[last] - x[first])
        return between(self.steps), between(self.seconds)


class Compared(NamedTuple):
    """Figures of one run in a comparison."""

    name: str
    device: str
    steps: int
    tokens_per_s: float | None  # median over the rows of the log
    goodput: float | None  # productive share of the wall-clock time; None if not logged
    lowest: float  # of the measure
    at_step: float | None  # the measure at the last step that all runs have
    seconds: float | None  # of training to the target
    speedup: float | None  # the first run's seconds over this one's


class Comparison(NamedTuple):
    """Several runs, compared by one measure."""

    measure: str
    step: int  # the last step that all runs have
    target: float  # the lowest value that all runs have reached
    runs: list[Compared]
    curves: dict[str, Curve]
    differences: dict[str, list[Any]]  # setting -> its value in each run


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """Read several runs, with unique names. Raises UserError for fewer than two."""
    if len(run_dirs) < 2:
        raise UserError("compare: name two runs or more, as in `compare runs/a runs/b`")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    if len({run.name for run in runs}) < len(runs):  # same name in different folders
        runs = [run._replace(name=str(path)) for run, path in zip(runs, run_dirs)]
    return runs


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs with unique names; the first is the baseline.

    Raises UserError if the runs have no measure in common.
    """
    names = [run.name for run in runs]
    for kind, name, measure in MEASURES:  # noqa: B007
        curves = [curve_of(run, kind, name) for run in runs]
        if all(curve.steps for curve in curves):
            break
    else:
        raise UserError(f"compare: {' and '.join(names)} have no loss in common yet")
    step = min(curve.steps[-1] for curve in curves)
    target = max(min(curve.losses) for curve in curves)
    reached = [curve.reaches(target) for curve in curves]
    seconds = [None if found is None else found[1] for found in reached]
    compared = [
        Compared(
            name, f"{run.env.get('device_count', 1)} x {run.env.get('device_kind', '?')}",
            max(row["step"] for row in run.rows), rate_of(run.rows),
            found.share if (found := goodput(run.rows)) else None, min(curve.losses),
            curve.at(step), needed, seconds[0] / needed if seconds[0] and needed else None,
        )
        for name, run, curve, needed in zip(names, runs, curves, seconds)
    ]  # fmt: skip
    return Comparison(measure, step, target, compared, dict(zip(names, curves)), differing(runs))


def curve_of(run: Run, kind: str, name: str) -> Curve:
    """The finite values of a measure. Training losses are averaged in groups of up to SMOOTHED."""
    train = [row for row in run.rows if row["kind"] == "train"]
    size = run.config["train"]["batch_size"] * run.config["train"]["sequence_length"]
    known, seconds = training_seconds(train, size)
    rows = [row for row in run.rows if row["kind"] == kind and row.get(name) is not None]
    width = max(1, min(SMOOTHED, len(rows) // 10)) if kind == "train" else 1
    parts = [rows[i : i + width] for i in range(0, len(rows) - width + 1, width)]
    steps = [part[-1]["step"] for part in parts]
    losses = [sum(row[name] for row in part) / len(part) for part in parts]
    return Curve(steps, np.interp(steps, known, seconds).tolist(), losses)


def training_seconds(
    rows: Sequence[MetricsRow], tokens_per_step: int
) -> tuple[list[int], list[float]]:
    """Steps, and the training seconds up to each.

    A row's `time` includes validations. Its `tokens_per_s` excludes them, and is the mean over the
    steps since the previous row: their time is tokens / tokens_per_s. A run's first step has no
    rate; it is given the median rate.
    """
    usual = rate_of(rows)
    steps, seconds, before = [0], [0.0], 0
    for row in rows:
        total, rate = tokens_of(row, tokens_per_step), row.get("tokens_per_s", usual)
        tokens, before = total - before, total
        seconds.append(seconds[-1] + tokens / rate if rate else float(row["time"]))
        steps.append(row["step"])
    return steps, seconds


def tokens_of(row: MetricsRow, tokens_per_step: int) -> int:
    """Training tokens up to a row; steps of a run may differ in size."""
    return row.get("tokens", row["step"] * tokens_per_step)


def rate_of(rows: Sequence[MetricsRow]) -> float | None:
    """Median tokens per second over the rows."""
    rates = [row["tokens_per_s"] for row in rows if row.get("tokens_per_s")]
    return median(rates) if rates else None


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings and environment facts that differ between the runs."""
    facts = [
        leaves(run.config)
        | {f"env.{key}": run.env.get(key) for key in ("device_kind", "device_count", "commit")}
        | leaves(run.env.get("versions", {}), "env.versions")
        for run in runs
    ]
    keys = dict.fromkeys(key for one in facts for key in one if not key.startswith(PLACES))
    found = {key: [one.get(key) for one in facts] for key in keys}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}


def comparison_tree(c: Comparison) -> dict[str, Any]:
    """The figures and differences for a web page, which draws curves from the rows itself."""
    return {
        "measure": c.measure, "step": c.step, "target": c.target,
        "names": [run.name for run in c.runs], "runs": [run._asdict() for run in c.runs],
        "differences": plain_values(c.differences),
    }  # fmt: skip


def plain_values(differences: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """JSON values unchanged; other values (a date, an infinity) as strings."""
    finite = lambda value: not isinstance(value, float) or math.isfinite(value)
    plain = lambda value: isinstance(value, PLAIN) and finite(value)
    return {
        key: [value if plain(value) else str(value) for value in values]
        for key, values in differences.items()
    }


# ---- for people --------------------------------------------------------------------------------

SHORT_COMMIT = 7  # hexadecimal digits, as git shows them


def new_table(title: str) -> Table:
    """A table with one space between columns: 80 columns hold a run's name of 20 characters."""
    return Table(
        title=title, title_justify="left", box=None, header_style="bold", pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip


def tables_of(c: Comparison) -> list[Table]:
    """Console tables: the figures, and the settings that differ."""
    devices = {run.device for run in c.runs}  # several are among the differences
    title = f"{c.measure}, {devices.pop()}" if len(devices) == 1 else c.measure
    figures = new_table(title)
    figures.add_column("run", overflow="fold")
    logged = any(run.goodput is not None for run in c.runs)
    for head in (
        "steps", "tokens/s", *["goodput"] * logged, "lowest", f"at step\n{c.step:,}",
        f"seconds\nto {c.target:.4f}", "speed-up",
    ):  # fmt: skip
        figures.add_column(head, justify="right")
    show = lambda value, form: "-" if value is None else format(value, form)
    for run in c.runs:
        figures.add_row(
            run.name, f"{run.steps:,}", show(run.tokens_per_s, ",.0f"),
            *[show(run.goodput, ".1%")] * logged, f"{run.lowest:.4f}", show(run.at_step, ".4f"),
            show(run.seconds, ",.1f"), show(run.speedup, ".2f"),
        )  # fmt: skip
    settings = new_table("differences")
    for head in ("setting", *(run.name for run in c.runs)):
        settings.add_column(head, overflow="fold")
    for key, values in c.differences.items():
        digits = SHORT_COMMIT if key == "env.commit" else None
        settings.add_row(key, *(str(value)[:digits] for value in values))
    return [figures, settings] if c.differences else [figures]


def draw(c: Comparison, path: Path) -> Path:
    """Write a PNG of the curves by step and by training seconds. Returns `path`."""
    from matplotlib.figure import Figure  # slow import (2 s), only needed here

    figure = Figure(figsize=(10, 4), layout="constrained", dpi=150)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for name, curve in c.curves.items():
        for axes, xs in ((by_step, curve.steps), (by_time, curve.seconds)):
            axes.plot(xs, curve.losses, linewidth=1.6, marker=".", markersize=4, label=name)
    for axes, label in ((by_step, "step"), (by_time, "seconds of training")):
        axes.axhline(c.target, color="0.4", linewidth=0.9, linestyle=":", zorder=0)
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_step.set_ylabel(c.measure)
    late = [x for curve in c.curves.values() for x in curve.losses[len(curve.losses) // 10 :]]
    low, high = min(late), max(late)
    by_step.set_ylim(low - 0.05 * (high - low or 1.0), high + 0.05 * (high - low or 1.0))
    by_time.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison. Returns 0, or 2 after a one-line UserError."""
    a = compare_parser().parse_args(argv)
    runs = read_runs(a.runs)
    found = compare(runs)
    console = Console(soft_wrap=not sys.stdout.isatty())
    for table in tables_of(found):
        console.print(table, highlight=False)
    if a.plot:
        console.print(draw(found, a.plot), highlight=False)
    if a.html:
        from jaxtrain.runs.page.one_file import write_page  # it imports this module

        console.print(write_page(found, runs, a.html), highlight=False)
    return 0
