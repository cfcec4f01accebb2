"""`jaxtrain report RUN`: a self-contained HTML page about a run, finished or not."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from statistics import median
from typing import NamedTuple

from jaxtrain.runs.arguments import report_parser
from jaxtrain.runs.goodput import goodput
from jaxtrain.runs.history import MetricsRow, read_rows
from jaxtrain.runs.metrics import Number, format_bytes, format_duration
from jaxtrain.runs.report_charts import Series, bars, format_count, html_table, line_chart
from jaxtrain.runs.report_data import (
    data_section,
    events_section,
    goodput_section,
    tasks_section,
)
from jaxtrain.settings import UserError, command, read_object, visible
from jaxtrain.storage.disk import write_whole
from jaxtrain.storage.fetch import send_results

MAX_SAMPLES, MAX_SAMPLE_CHARS = 40, 6000
STYLE = Path(__file__).with_name("report.css")


class ChartSpec(NamedTuple):
    """A chart over steps: one column from training and validation, or several from training."""

    title: str
    columns: tuple[str, ...]
    scale: Number = 1
    from_zero: bool = True
    smooth: bool = True


CHARTS = (
    ChartSpec("Bits per byte", ("bpb",), from_zero=False),
    ChartSpec("Pairs in the right order (%)", ("accuracy",), 100, from_zero=False),
    ChartSpec("Reward margin, chosen over rejected", ("reward_margin",), from_zero=False),
    ChartSpec("Rewards", ("reward_chosen", "reward_rejected"), from_zero=False),
    ChartSpec(
        "Expert load, of the mean (extremes of all layers)", ("expert_load_max", "expert_load_min")
    ),
    ChartSpec("Learning rate", ("lr",), smooth=False),
    ChartSpec("Tokens per second", ("tokens_per_s",)),
    ChartSpec("MFU (%)", ("mfu",), 100),
    ChartSpec("Gradient norm", ("grad_norm",)),
    ChartSpec("Loss scale (fp16)", ("loss_scale",), smooth=False),
    ChartSpec("Weights of the blocks that are zero (%)", ("sparsity",), 100, smooth=False),
    ChartSpec(
        "Distance to the mask before (share of its entries)", ("mask_distance",), smooth=False
    ),
    ChartSpec("Memory (GiB)", ("memory_bytes",), 2**-30, smooth=False),
)


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from whatever the run has written so far; returns its path.

    Raises UserError when the folder is not a run.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(
            f"{run_dir} is not a run: it has no metrics.jsonl (give a folder such as runs/NAME)"
        )
    rows, name = read_rows(metrics), escape(run_dir.resolve().name)
    env: MetricsRow = {}
    with suppress(UserError):  # not written yet, or torn by a crash
        env = read_object(run_dir / "env.json")
    parts = [
        _header(name, rows),
        _part("env.json", lambda: _tiles(rows, env)),
        _part("metrics.jsonl", lambda: _charts(rows)),
        _part("metrics.jsonl", lambda: goodput_section(rows)),
        _part("metrics.jsonl", lambda: events_section(rows)),
        _part("data.json", lambda: data_section(run_dir, rows)),
        _part("tasks.json", lambda: tasks_section(run_dir)),
        _samples(run_dir / "samples"),
    ]
    if (run_dir / "config.yaml").exists():
        text = (run_dir / "config.yaml").read_text("utf-8", errors="replace")
        parts.append(f"<h2>Configuration</h2><pre>{escape(text, quote=False)}</pre>")
    if env:
        parts.append(f"<h2>Environment</h2>{_environment(env)}")
    head = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE.read_text()}</style>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    page = "\n".join([f'<!doctype html><html lang="en"><head>{head}</head><body>', *parts])
    write_whole(run_dir / "report.html", f"{page}</body></html>\n".encode(errors="replace"))
    return run_dir / "report.html"


def _part(file: str, make: Callable[[], str]) -> str:
    """A section of the page, or a warning if the file that it shows is damaged."""
    try:
        return make()
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        return f'<p class="warning">{file} is damaged: what it says is left out here</p>'


def _values(rows: Sequence[MetricsRow], kind: str, name: str) -> list[MetricsRow]:
    """The rows of one kind in which `name` is a finite number."""
    return [row for row in rows if row["kind"] == kind and row.get(name) is not None]


def _header(name: str, rows: Sequence[MetricsRow]) -> str:
    """The run's name, how it ended, and a warning if values were not finite."""
    marks = [row for row in rows if row.get("event") in ("start", "end")]
    ended = bool(marks) and marks[-1]["event"] == "end"
    status = str(marks[-1]["status"]) if ended else "no end recorded: still running, or killed"
    css = re.split(r"\W", status)[0]
    found = f'<header><h1>{name}</h1><p class="status {css}">{escape(status)}</p></header>'
    if bad := [row for row in rows if row.get("nonfinite")]:
        names = escape(", ".join(sorted({name for row in bad for name in row["nonfinite"]})))
        found += f'<p class="warning">{len(bad)} rows hold values that are not finite ({names}), '
        found += f"the first at step {bad[0]['step']}.</p>"
    return found


def _tiles(rows: Sequence[MetricsRow], env: MetricsRow) -> str:
    """The run's headline figures, each with a note."""
    starts = [row for row in rows if row.get("event") == "start"]
    start: MetricsRow = starts[-1] if starts else {}
    tiles: list[tuple[str, str, str]] = []
    if kind := env.get("device_kind"):
        count = env.get("device_count", 1)
        tiles.append(("device", f"{count} x {kind}" if count > 1 else kind, ""))
    if start.get("parameters"):
        tiles.append(("parameters", format_count(start["parameters"]), ""))
    if train := _values(rows, "train", "step"):
        note = f"of {start['total_steps']:,}" if "total_steps" in start else ""
        tiles.append(("steps", f"{train[-1]['step']:,}", note))
        if "tokens" in train[-1]:
            tiles.append(("tokens", format_count(train[-1]["tokens"]), ""))
    if found := goodput(rows):
        tiles.append(("goodput", f"{found.share:.1%}", "of the wall-clock"))
    if rows:
        resumes = len(starts) - 1
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
    for name, label, show, note in (
        ("tokens_per_s", "tokens per second", lambda xs: f"{median(xs):,.0f}", "median"),
        ("mfu", "MFU", lambda xs: f"{median(xs):.1%}", "median, of the dense bf16 peak"),
        ("memory_bytes", "peak memory", lambda xs: format_bytes(max(xs)), ""),
    ):
        if values := [row[name] for row in _values(rows, "train", name)]:
            tiles.append((label, show(values), note))
    shown = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
        for label, value, note in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def _charts(rows: Sequence[MetricsRow]) -> str:
    seconds = max((row["time"] for row in rows), default=0)
    scale, unit = (
        (3600, "hours") if seconds > 7200 else (60, "minutes") if seconds > 180 else (1, "seconds")
    )

    def series(kind: str, name: str, label: str, scale_y: Number = 1) -> list[Series]:
        some = _values(rows, kind, name)
        xs, ys = [row["step"] for row in some], [row[name] * scale_y for row in some]
        return [Series(label, xs, ys)] if some else []

    def lines(spec: ChartSpec) -> list[Series]:
        if len(spec.columns) > 1:
            return [s for c in spec.columns for s in series("train", c, c.rpartition("_")[2])]
        kinds = ("train", "validation")
        return [s for k in kinds for c in spec.columns for s in series(k, c, k, spec.scale)]

    by_step = lines(ChartSpec("", ("loss",)))
    seconds_of = lambda kind: [row["time"] / scale for row in _values(rows, kind, "loss")]
    by_time = [line._replace(x=seconds_of(line.label)) for line in by_step]
    of = "pair" if _values(rows, "train", "accuracy") else "token"
    last: MetricsRow = next((row for row in reversed(rows) if "expert_load_0" in row), {})
    loads = {k.rpartition("_")[2]: v for k, v in last.items() if re.match(r"expert_load_\d+$", k)}
    trained = next((row["trained"] for row in reversed(rows) if row.get("trained")), {})
    charts = [
        line_chart(f"Loss (nats per {of}) by step", "step", by_step),
        line_chart(f"Loss by time ({unit})", unit, by_time),
        *(
            line_chart(s.title, "step", lines(s), from_zero=s.from_zero, smooth=s.smooth)
            for s in CHARTS
        ),
        bars("Load of each expert at the end, of the mean (mean of all layers)", loads),
        bars(*_trained(trained)),
    ]
    return f'<div class="charts">{"".join(charts) or "<p>No rows yet.</p>"}</div>'


def _trained(parts: dict[str, list[int]]) -> tuple[str, dict[str, Number]]:
    """Title and bars of a finetune's trainable parameters: percent of each matrix, or of the whole
    model for parameters that belong to no matrix."""
    ours, all_ = (sum(part[i] for part in parts.values()) for i in (0, 1))
    shares = {name: 100 * a / (b or all_) for name, (a, b) in parts.items() if a}
    ratio = f"{ours / max(all_, 1):.2%} of the model's {format_count(all_)}"
    return f"What trains: {format_count(ours)} parameters, {ratio} (here % of each matrix)", shares


def _samples(folder: Path) -> str:
    blocks = []
    for i, path in enumerate(sorted(folder.glob("*.txt"))[-MAX_SAMPLES:][::-1]):
        text = visible(path.read_text("utf-8", errors="replace"))
        more = "\n[...]" if len(text) > MAX_SAMPLE_CHARS else ""
        title = re.sub(r"^step_0*(?=\d)", "step ", path.stem)
        blocks.append(
            f"<details{' open' * (i == 0)}><summary>{escape(title)}</summary>"
            f"<pre>{escape(text[:MAX_SAMPLE_CHARS], quote=False)}{more}</pre></details>"
        )
    return "\n".join(["<h2>Samples</h2>" * bool(blocks), *blocks])


def _environment(values: MetricsRow) -> str:
    shown = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        elif name.endswith("_bytes") and value:
            value = format_bytes(value)
        if value is not None:
            shown[name.removesuffix("_bytes").replace("_", " ")] = value
    return html_table(shown.items())


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print its path. Returns 0, or 2 after a one-line UserError."""
    run = report_parser().parse_args(argv).run
    page = write_report(run)
    send_results(run, page)
    print(page)
    return 0
