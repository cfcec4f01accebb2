"""One self-contained HTML page about a run, finished or not: `python -m jaxtrain.report RUN`."""

import argparse
import json
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from jaxtrain.metrics import Number, Row, format_bytes, format_duration, read_rows
from jaxtrain.report_data import data_section
from jaxtrain.report_tasks import tasks_section
from jaxtrain.settings import UserError, command

WIDTH, HEIGHT = 480, 250  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 48, 18, 26, 24  # its margins
MAX_POINTS = 250  # drawn per line
MAX_HOVERS = 100  # places of a chart that show their values under the pointer
MAX_SAMPLES, MAX_SAMPLE_CHARS = 40, 6000


class Series(NamedTuple):
    """One line of a chart, sorted by x."""

    label: str
    x: Sequence[Number]
    y: Sequence[Number]


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from whatever the run has written so far; returns its path.

    Raises UserError when the folder is not a run.
    """
    rows = _read_run(run_dir)
    name = run_dir.resolve().name
    config = run_dir / "config.yaml"
    env: Row = {}
    with suppress(OSError, ValueError):  # not written yet, or torn by a crash
        env = json.loads((run_dir / "env.json").read_text("utf-8"))
    status = _status(rows)
    sections = [
        f"<header><h1>{escape(name)}</h1>",
        f'<p class="status {re.split(r"\W", status)[0]}">{escape(status)}</p></header>',
        f'<div class="tiles">{_tiles(rows, env)}</div>',
        *_warnings(rows),
        f'<div class="charts">{_charts(rows)}</div>',
        data_section(run_dir, rows),
        tasks_section(run_dir),
        _samples(run_dir / "samples"),
    ]
    if config.exists():
        text = escape(config.read_text("utf-8"), quote=False)
        sections.append(f"<h2>Configuration</h2><pre>{text}</pre>")
    if env:
        sections.append(f'<h2>Environment</h2><div class="wide">{_table(env)}</div>')
    page = PAGE.replace("{title}", escape(name)).replace("{body}", "\n".join(sections))
    fresh = run_dir / "report.tmp"
    fresh.write_text(page, encoding="utf-8")
    return fresh.replace(run_dir / "report.html")


def _read_run(run_dir: Path) -> list[Row]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            f"{run_dir} is not a run: it has no metrics.jsonl (give a folder such as runs/NAME)"
        )
    return read_rows(path)


def _values(rows: Sequence[Row], kind: str, name: str) -> list[Row]:
    """The rows of one kind where `name` is a finite number."""
    return [row for row in rows if row["kind"] == kind and row.get(name) is not None]


def _status(rows: Sequence[Row]) -> str:
    marks = [row for row in rows if row.get("event") in ("start", "end")]
    if marks and marks[-1]["event"] == "end":
        return str(marks[-1]["status"])
    return "no end recorded: still running, or killed"


def _warnings(rows: Sequence[Row]) -> list[str]:
    bad = [row for row in rows if row.get("nonfinite")]
    if not bad:
        return []
    names = ", ".join(sorted({name for row in bad for name in row["nonfinite"]}))
    text = f"{len(bad)} rows hold values that are not finite ({names}), the first at step "
    return [f'<p class="warning">{escape(text)}{bad[0]["step"]}.</p>']


def _tiles(rows: Sequence[Row], env: Row) -> str:
    start: Row = next((row for row in reversed(rows) if row.get("event") == "start"), {})
    resumes = sum(row.get("event") == "start" for row in rows) - 1
    tiles: list[tuple[str, str, str]] = []
    if kind := env.get("device_kind"):
        count = env.get("device_count", 1)
        tiles.append(("device", f"{count} x {kind}" if count > 1 else kind, ""))
    if start.get("parameters"):
        tiles.append(("parameters", format_count(start["parameters"]), ""))
    train = _values(rows, "train", "step")
    if train:
        note = f"of {start['total_steps']:,}" if "total_steps" in start else ""
        tiles.append(("steps", f"{train[-1]['step']:,}", note))
        if "tokens" in train[-1]:
            tiles.append(("tokens", format_count(train[-1]["tokens"]), ""))
    if rows:
        note = f"resumed {resumes} time{'s' * (resumes > 1)}" if resumes > 0 else ""
        tiles.append(("time", format_duration(rows[-1]["time"]), note))
    for kind, name, label in (
        ("validation", "loss", "validation loss"),
        ("validation", "bpb", "validation bpb"),
        ("train", "loss", "training loss"),
    ):
        if found := _values(rows, kind, name):
            best = min(found, key=lambda row: row[name])
            note = f"best {best[name]:.4f} at step {best['step']:,}"
            tiles.append((label, f"{found[-1][name]:.4f}", note if best != found[-1] else ""))
    if speeds := [row["tokens_per_s"] for row in _values(rows, "train", "tokens_per_s")]:
        tiles.append(("tokens per second", f"{median(speeds):,.0f}", "median"))
    if mfus := [row["mfu"] for row in _values(rows, "train", "mfu")]:
        tiles.append(("MFU", f"{median(mfus):.1%}", "median, of the dense bf16 peak"))
    if sizes := [row["memory_bytes"] for row in _values(rows, "train", "memory_bytes")]:
        tiles.append(("peak memory", format_bytes(max(sizes)), ""))
    return "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
        for label, value, note in tiles
    )


def format_count(count: Number) -> str:
    """123_456_789 -> '123M'; three digits are kept."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * unit:
            scaled = count / unit
            return f"{scaled:.{max(0, 2 - int(math.log10(scaled)))}f}{suffix}"
    return f"{count:g}"


def _charts(rows: Sequence[Row]) -> str:
    hours = max((row["time"] for row in rows), default=0) / 3600
    scale, unit = (
        (3600, "hours") if hours > 2 else (60, "minutes") if hours > 0.05 else (1, "seconds")
    )

    def series(
        name: str, x: str = "step", scale_x: Number = 1, scale_y: Number = 1
    ) -> list[Series]:
        found = [(kind, _values(rows, kind, name)) for kind in ("train", "validation")]
        return [
            Series(kind, [row[x] / scale_x for row in some], [row[name] * scale_y for row in some])
            for kind, some in found
            if some
        ]

    charts = [
        _chart("Loss (nats per token) by step", "step", series("loss")),
        _chart(f"Loss by time ({unit})", unit, series("loss", "time", scale)),
        _chart("Bits per byte", "step", series("bpb")),
        _chart("Learning rate", "step", series("lr"), from_zero=True, smooth=False),
        _chart("Tokens per second", "step", series("tokens_per_s"), from_zero=True),
        _chart("MFU (%)", "step", series("mfu", scale_y=100), from_zero=True),
        _chart("Gradient norm", "step", series("grad_norm"), from_zero=True),
        _chart("Loss scale (fp16)", "step", series("loss_scale"), from_zero=True, smooth=False),
        _chart(
            "Memory (GiB)",
            "step",
            series("memory_bytes", scale_y=2**-30),
            from_zero=True,
            smooth=False,
        ),
    ]
    return "".join(charts) or "<p>No rows yet.</p>"


class Frame(NamedTuple):
    """Maps data to SVG units inside the margins of a chart; x starts at 0."""

    x_high: Number
    y_low: Number
    y_high: Number

    def x(self, x: Number) -> Number:
        return round(LEFT + x / self.x_high * (WIDTH - LEFT - RIGHT), 1)

    def y(self, y: Number) -> Number:
        share = (y - self.y_low) / (self.y_high - self.y_low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _chart(
    title: str, x_name: str, lines: Sequence[Series], *, from_zero=False, smooth=True
) -> str:
    """An SVG figure of the lines, or nothing where there are none; the values show on hover."""
    if not lines:
        return ""
    frame = Frame(max(line.x[-1] for line in lines) or 1, *_y_range(lines, from_zero))
    parts = []
    for y in _ticks(frame.y_low, frame.y_high):
        parts.append(f'<path class="grid" d="M{LEFT} {frame.y(y)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{frame.y(y) + 4:.1f}" class="end">{_tick(y)}</text>')
    for x in _ticks(0, frame.x_high, 6):
        parts.append(f'<text x="{frame.x(x)}" y="{HEIGHT - 5}" class="mid">{_tick(x)}</text>')
    x, y, wide, high = LEFT, TOP - 4, WIDTH - LEFT - RIGHT + 4, HEIGHT - TOP - BOTTOM + 8
    # A nested svg clips what leaves the frame.
    parts.append(f'<svg x="{x}" y="{y}" width="{wide}" height="{high}" ')
    parts.append(f'viewBox="{x} {y} {wide} {high}">')
    for line in lines:
        if smooth and len(line.x) > 40:
            parts.append(_path(frame, line.x, line.y, f"{line.label} faint"))
            parts.append(_path(frame, line.x, _smoothed(line.y), line.label))
        else:
            parts.append(_path(frame, line.x, line.y, line.label))
    parts.append("</svg>")
    parts += _hovers(frame, x_name, lines)
    legend = "".join(f'<i class="{line.label}">{line.label}</i>' for line in lines)
    caption = f"<figcaption>{escape(title)}{legend if len(lines) > 1 else ''}</figcaption>"
    return f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg></figure>'


def _path(frame: Frame, xs: Sequence[Number], ys: Sequence[Number], css: str) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in _thinned(xs, ys)]
    dots = points if len(points) <= 30 else []
    circles = "".join(f'<circle class="{css}" cx="{x}" cy="{y}" r="2.5"/>' for x, y in dots)
    return f'<path class="{css}" d="M{" ".join(f"{x} {y}" for x, y in points)}"/>{circles}'


def _thinned(xs: Sequence[Number], ys: Sequence[Number]) -> list[tuple[Number, Number]]:
    """All points, or the lowest and the highest of each of MAX_POINTS / 2 buckets."""
    if len(xs) <= MAX_POINTS:
        return list(zip(xs, ys))
    points = []
    for bucket in np.array_split(np.arange(len(xs)), MAX_POINTS // 2):
        indices = bucket.tolist()
        picked = {min(indices, key=ys.__getitem__), max(indices, key=ys.__getitem__)}
        points += [(xs[i], ys[i]) for i in sorted(picked)]
    return points


def _smoothed(ys: Sequence[Number]) -> Sequence[Number]:
    """Centred, weighted moving mean over a twentieth of the points."""
    window = np.hanning(max(3, len(ys) // 20) + 2)[1:-1]
    total = np.convolve(ys, window, "same")
    return (total / np.convolve(np.ones(len(ys)), window, "same")).tolist()


def _y_range(lines: Sequence[Series], from_zero: bool) -> tuple[Number, Number]:
    """Low and high end of the y axis; a few extremes (the first steps, a spike) may leave it."""
    values = np.concatenate([np.asarray(line.y, float) for line in lines])
    low, high = np.quantile(values, [0.0, 0.97 if len(values) > 40 else 1.0]).tolist()
    if from_zero:
        return min(0.0, low), (high * 1.08) or 1.0
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad


def _ticks(low: Number, high: Number, count: int = 5) -> list[Number]:
    """At most about `count` round numbers (1, 2 or 5 times a power of ten) from low to high."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick(value: Number) -> str:
    return format_count(value) if value >= 10_000 else f"{value:g}"


def _hovers(frame: Frame, x_name: str, lines: Sequence[Series]) -> list[str]:
    """One invisible strip at each of up to MAX_HOVERS points; CSS shows its dots and values."""
    main = max(lines, key=lambda line: len(line.x))
    indices = np.linspace(0, len(main.x) - 1, min(MAX_HOVERS, len(main.x))).round().astype(int)
    xs = [main.x[i] for i in indices]
    middles = [(frame.x(a) + frame.x(b)) / 2 for a, b in pairwise(xs)]
    edges = [LEFT, *middles, WIDTH - RIGHT]
    strips = []
    for x, left, right in zip(xs, edges[:-1], edges[1:]):
        dots, words = [], [f"{x_name} {_number(x)}"]
        for line in lines:
            if at := bisect_right(line.x, x):
                value = line.y[at - 1]
                height = min(max(frame.y(value), TOP), HEIGHT - BOTTOM)
                dots.append(f'<circle cx="{frame.x(line.x[at - 1])}" cy="{height}" r="3.5"/>')
                words.append(f"{line.label} {_number(value)}")
        strips.append(
            f'<g><rect x="{left:.1f}" y="0" width="{right - left:.1f}" height="{HEIGHT}"/>'
            f'<path d="M{frame.x(x)} {TOP}V{HEIGHT - BOTTOM}"/>{"".join(dots)}'
            f'<text x="{WIDTH - RIGHT}" y="15" class="end">{", ".join(words)}</text></g>'
        )
    return strips


def _number(value: Number) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _samples(folder: Path) -> str:
    paths = sorted(folder.glob("*.txt"))[-MAX_SAMPLES:][::-1]
    if not paths:
        return ""
    blocks = ["<h2>Samples</h2>"]
    for i, path in enumerate(paths):
        text = path.read_text("utf-8", errors="replace")
        more = "\n[...]" if len(text) > MAX_SAMPLE_CHARS else ""
        title = re.sub(r"^step_0*(?=\d)", "step ", path.stem)
        blocks.append(
            f"<details{' open' * (i == 0)}><summary>{escape(title)}</summary>"
            f"<pre>{escape(text[:MAX_SAMPLE_CHARS], quote=False)}{more}</pre></details>"
        )
    return "\n".join(blocks)


def _table(values: Row) -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        elif name.endswith("_bytes") and value:
            value = format_bytes(value)
        if value is not None:
            label = escape(name.removesuffix("_bytes").replace("_", " "))
            lines.append(f"<tr><th>{label}</th><td>{escape(str(value))}</td></tr>")
    return f"<table>{''.join(lines)}</table>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<style>
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2128; --soft: #667080;
  --line: #e3e6eb; --train: #2563eb; --validation: #e8590c; --good: #1a7f4b; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #181c22; --ink: #e4e8ee;
  --soft: #929cab; --line: #2a3038; --train: #6ea8fe; --validation: #ffa057; --good: #51cf8a;
  --bad: #ff8787; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 20px 60px; max-width: 1120px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px;
  margin-bottom: 16px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 10px; }
.status { margin: 0; color: var(--soft); } .status::before { content: "\\25cf"; margin-right: 6px; }
.finished::before { color: var(--good); }
.failed::before, .warning { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); gap: 10px; }
.tile, figure, pre, .wide { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
.tile { padding: 10px 14px; } .tile span, .tile small { display: block; color: var(--soft);
  font-size: 12.5px; } .tile b { font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
.charts { display: grid; gap: 12px; margin-top: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
figure { margin: 0; padding: 10px 12px 6px; }
figcaption { font-weight: 600; font-size: 14px; }
figcaption i { font: 12.5px system-ui; color: var(--soft); margin-left: 14px; }
figcaption i::before { content: ""; display: inline-block; width: 14px; height: 3px;
  border-radius: 2px; margin-right: 5px; vertical-align: 3px; background: var(--train); }
figcaption i.validation::before { background: var(--validation); }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
.mid { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--line); }
path.train, path.validation { fill: none; stroke: var(--train); stroke-width: 1.8;
  stroke-linejoin: round; }
path.validation { stroke: var(--validation); } path.faint { opacity: .3; stroke-width: 1; }
circle.train { fill: var(--train); } circle.validation { fill: var(--validation); }
svg g > * { opacity: 0; } svg g:hover > * { opacity: 1; } svg g > rect { fill: transparent; }
svg g path { stroke: var(--soft); stroke-dasharray: 3 3; } svg g circle { fill: var(--ink); }
svg g text { fill: var(--ink); }
pre { margin: 0; padding: 14px 16px; overflow: auto; max-height: 560px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; }
details { margin-bottom: 8px; } summary { cursor: pointer; padding: 4px 2px; }
.wide { padding: 6px 16px; } table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
tr + tr { border-top: 1px solid var(--line); } td { overflow-wrap: anywhere; padding: 6px 0; }
th { text-align: left; font-weight: 500; color: var(--soft); padding: 6px 18px 6px 0;
  vertical-align: top; white-space: nowrap; }
</style></head><body>
{body}
</body></html>
"""


def plot_curves(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write a PNG with the loss curves of some runs, by step and by time; returns `path`.

    Raises UserError for a folder that is not a run.
    """
    runs = [(run_dir.resolve().name, _read_run(run_dir)) for run_dir in run_dirs]
    from matplotlib.figure import Figure  # two seconds to import, and only for pictures

    figure = Figure(figsize=(10, 4), layout="constrained", dpi=150)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    drawn: list[Series] = []
    for i, (name, rows) in enumerate(runs):
        for kind in ("train", "validation"):
            some = _values(rows, kind, "loss")
            losses = [row["loss"] for row in some]
            drawn += [Series(kind, [], losses)] if some else []
            smooth = _smoothed(losses) if len(losses) > 40 else losses
            for axes, xs in (
                (by_step, [row["step"] for row in some]),
                (by_time, [row["time"] / 60 for row in some]),
            ):
                if kind == "train":
                    axes.plot(xs, losses, color=f"C{i}", alpha=0.25, linewidth=0.8)
                    axes.plot(xs, smooth, color=f"C{i}", linewidth=1.6, label=name)
                else:
                    label = f"{name} (validation)"
                    axes.plot(xs, losses, "o--", color=f"C{i}", markersize=3.5, label=label)
    for axes, label in ((by_step, "step"), (by_time, "minutes")):
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_step.set_ylabel("loss (nats per token)")
    if drawn:
        by_step.set_ylim(*_y_range(drawn, from_zero=False))
        by_time.legend(frameon=False)
    figure.savefig(path)
    return path


@command
def main(argv: Sequence[str] | None = None) -> int:
    """The command line: prints the report's path; 2 and one line on stderr for a UserError."""
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.report", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory, such as runs/NAME")
    print(write_report(parser.parse_args(argv).run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
