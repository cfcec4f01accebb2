"""One self-contained HTML page about a run, finished or not: `jaxtrain report RUN`."""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from statistics import median

from jaxtrain.runs.arguments import report_parser
from jaxtrain.runs.history import MetricsRow, read_rows
from jaxtrain.runs.metrics import Number, format_bytes, format_duration
from jaxtrain.runs.report_charts import Series, bars, chart, format_count
from jaxtrain.runs.report_data import data_section
from jaxtrain.runs.report_tasks import tasks_section
from jaxtrain.settings import UserError, command, read_object, visible
from jaxtrain.storage.disk import write_whole

MAX_SAMPLES, MAX_SAMPLE_CHARS = 40, 6000


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from whatever the run has written so far; returns its path.

    Raises UserError when the folder is not a run.
    """
    rows = _read_run(run_dir)
    name = run_dir.resolve().name
    config = run_dir / "config.yaml"
    env: MetricsRow = {}
    with suppress(UserError):  # not written yet, or torn by a crash
        env = read_object(run_dir / "env.json")
    status = _status(rows)
    sections = [
        f"<header><h1>{escape(name)}</h1>",
        f'<p class="status {re.split(r"\W", status)[0]}">{escape(status)}</p></header>',
        f'<div class="tiles">{_part("env.json", lambda: _tiles(rows, env))}</div>',
        *_warnings(rows),
        f'<div class="charts">{_part("metrics.jsonl", lambda: _charts(rows))}</div>',
        _part("data.json", lambda: data_section(run_dir, rows)),
        _part("tasks.json", lambda: tasks_section(run_dir)),
        _samples(run_dir / "samples"),
    ]
    if config.exists():
        text = escape(config.read_text("utf-8", errors="replace"), quote=False)
        sections.append(f"<h2>Configuration</h2><pre>{text}</pre>")
    if env:
        sections.append(f'<h2>Environment</h2><div class="wide">{_table(env)}</div>')
    page = PAGE.replace("{title}", escape(name)).replace("{body}", "\n".join(sections))
    write_whole(run_dir / "report.html", page.encode(errors="replace"))
    return run_dir / "report.html"


def _part(file: str, make: Callable[[], str]) -> str:
    """A part of the page; a warning in its place, where the file that it shows is damaged."""
    try:
        return make()
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        return f'<p class="warning">{file} is damaged: what it says is left out here</p>'


def _read_run(run_dir: Path) -> list[MetricsRow]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            f"{run_dir} is not a run: it has no metrics.jsonl (give a folder such as runs/NAME)"
        )
    return read_rows(path)


def _values(rows: Sequence[MetricsRow], kind: str, name: str) -> list[MetricsRow]:
    """The rows of one kind where `name` is a finite number."""
    return [row for row in rows if row["kind"] == kind and row.get(name) is not None]


def _status(rows: Sequence[MetricsRow]) -> str:
    marks = [row for row in rows if row.get("event") in ("start", "end")]
    if marks and marks[-1]["event"] == "end":
        return str(marks[-1]["status"])
    return "no end recorded: still running, or killed"


def _warnings(rows: Sequence[MetricsRow]) -> list[str]:
    bad = [row for row in rows if row.get("nonfinite")]
    if not bad:
        return []
    names = ", ".join(sorted({name for row in bad for name in row["nonfinite"]}))
    text = f"{len(bad)} rows hold values that are not finite ({names}), the first at step "
    return [f'<p class="warning">{escape(text)}{bad[0]["step"]}.</p>']


def _tiles(rows: Sequence[MetricsRow], env: MetricsRow) -> str:
    start: MetricsRow = next((row for row in reversed(rows) if row.get("event") == "start"), {})
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


def _charts(rows: Sequence[MetricsRow]) -> str:
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

    def pair(name: str) -> list[Series]:
        """One of two quantities in a chart, called by the end of its name."""
        some = _values(rows, "train", name)
        xs, ys = [row["step"] for row in some], [row[name] for row in some]
        return [Series(name.rpartition("_")[2], xs, ys)] if some else []

    of = "pair" if _values(rows, "train", "accuracy") else "token"
    last: MetricsRow = next((row for row in reversed(rows) if "expert_load_0" in row), {})
    loads = {k.rpartition("_")[2]: v for k, v in last.items() if re.match(r"expert_load_\d+$", k)}
    trained = next((row["trained"] for row in reversed(rows) if row.get("trained")), {})
    charts = [
        chart(f"Loss (nats per {of}) by step", "step", series("loss")),
        chart(f"Loss by time ({unit})", unit, series("loss", "time", scale)),
        chart("Bits per byte", "step", series("bpb")),
        chart("Pairs in the right order (%)", "step", series("accuracy", scale_y=100)),
        chart("Reward margin, chosen over rejected", "step", series("reward_margin")),
        chart("Rewards", "step", [*pair("reward_chosen"), *pair("reward_rejected")]),
        chart(
            "Expert load, of the mean (extremes of all layers)",
            "step",
            [*pair("expert_load_max"), *pair("expert_load_min")],
            from_zero=True,
        ),
        bars("Load of each expert at the end, of the mean (mean of all layers)", loads),
        bars(*_trained(trained)),
        chart("Learning rate", "step", series("lr"), from_zero=True, smooth=False),
        chart("Tokens per second", "step", series("tokens_per_s"), from_zero=True),
        chart("MFU (%)", "step", series("mfu", scale_y=100), from_zero=True),
        chart("Gradient norm", "step", series("grad_norm"), from_zero=True),
        chart("Loss scale (fp16)", "step", series("loss_scale"), from_zero=True, smooth=False),
        chart(
            "Memory (GiB)",
            "step",
            series("memory_bytes", scale_y=2**-30),
            from_zero=True,
            smooth=False,
        ),
    ]
    return "".join(charts) or "<p>No rows yet.</p>"


def _trained(parts: dict[str, list[int]]) -> tuple[str, dict[str, Number]]:
    """Title and bars of what a tuning trains, in percent of the parameters of each matrix, and
    of all for what belongs to none."""
    ours, all_ = (sum(part[i] for part in parts.values()) for i in (0, 1))
    shares = {name: 100 * a / (b or all_) for name, (a, b) in parts.items() if a}
    ratio = f"{ours / max(all_, 1):.2%} of the model's {format_count(all_)}"
    return f"What trains: {format_count(ours)} parameters, {ratio} (here % of each matrix)", shares


def _samples(folder: Path) -> str:
    paths = sorted(folder.glob("*.txt"))[-MAX_SAMPLES:][::-1]
    if not paths:
        return ""
    blocks = ["<h2>Samples</h2>"]
    for i, path in enumerate(paths):
        text = visible(path.read_text("utf-8", errors="replace"))
        more = "\n[...]" if len(text) > MAX_SAMPLE_CHARS else ""
        title = re.sub(r"^step_0*(?=\d)", "step ", path.stem)
        blocks.append(
            f"<details{' open' * (i == 0)}><summary>{escape(title)}</summary>"
            f"<pre>{escape(text[:MAX_SAMPLE_CHARS], quote=False)}{more}</pre></details>"
        )
    return "\n".join(blocks)


def _table(values: MetricsRow) -> str:
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
figcaption i.validation::before, figcaption i.rejected::before, figcaption i.min::before {
  background: var(--validation); }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
.mid { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--line); }
path.line { fill: none; stroke: var(--train); stroke-width: 1.8; stroke-linejoin: round; }
path.validation, path.rejected, path.min { stroke: var(--validation); }
path.faint { opacity: .3; stroke-width: 1; }
circle.dot, .bar { fill: var(--train); }
circle.validation, circle.rejected, circle.min { fill: var(--validation); }
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


@command
def main(argv: Sequence[str] | None = None) -> int:
    """The command line: prints the report's path; 2 and one line on stderr for a UserError."""
    print(write_report(report_parser().parse_args(argv).run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
