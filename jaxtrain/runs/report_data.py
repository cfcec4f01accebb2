"""Sections of a run's report: data, goodput, events and in-context tasks."""

import json
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from jaxtrain.data import counts_phrase
from jaxtrain.runs.goodput import goodput
from jaxtrain.runs.history import MetricsRow
from jaxtrain.runs.metrics import format_duration
from jaxtrain.runs.report_charts import bars, html_table

MAX_EVENTS = 100
EPOCH = ("epochs", "cropped in the last whole one", "its padding", "documents left out")


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if it is missing or incomplete."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text("utf-8"))
    return {}


def data_section(run_dir: Path, rows: Sequence[MetricsRow]) -> str:
    """Sources, crop rate and document lengths, from `data.json` and the training rows.

    Empty if data.json is missing or incomplete.
    """
    sources = _read(run_dir / "data.json")
    if not sources:
        return ""
    last: MetricsRow = next((row for row in reversed(rows) if "data_crop" in row), {})
    lines = ["<h2>Data</h2>"]
    if last:
        crop, fill = last["data_crop"], last["data_fill"]
        lines.append(
            f"<p>Of the tokens that were read, packing cropped {crop:.2%}; "
            f"of the rows, {fill:.2%} are text and {1 - fill:.2%} padding.</p>"
        )
    if shares := [row["data_wait"] for row in rows if "data_wait" in row]:
        lines.append(
            f"<p>Steps waited for data in {median(shares):.2%} of their time (median).</p>"
        )
    for name, source in sources.items():
        if "unanswered" in source:  # conversations
            lines.append(f"<p>{escape(name)}: {counts_phrase(source)}.</p>")
        for shard, count in source.get("skipped", {}).items():
            damage = f"{escape(shard)} is damaged: its {count:,} documents are left out."
            lines.append(f'<p class="warning">{damage}</p>')
    lines.append(_sources(sources, last))
    lines += [_filters(name, s["filters"]) for name, s in sources.items() if s.get("filters")]
    lengths = [_lengths(name, source["lengths"]) for name, source in sources.items()]
    return "\n".join([*lines, '<div class="charts">', *lengths, "</div>"])


def _sources(sources: dict[str, Any], last: MetricsRow) -> str:
    head = ["source", "documents", "tokens", "bytes per token", "tokens per document"]
    several, epochs = len(sources) > 1, any(key.startswith("data_epochs") for key in last)
    head += ["share of rows"] * several + [*EPOCH] * epochs
    lines = []
    for name, source in sources.items():
        documents, tokens = source["documents"], source["tokens"]
        cells = [name, f"{documents:,}", f"{tokens:,}", f"{source['bytes'] / tokens:.2f}"]
        cells.append(f"{tokens / documents:,.0f}")
        tail = f"_{name}" if several else ""
        if several:
            cells.append(f"{last.get(f'data_share{tail}', 0.0):.1%}")
        lines.append(cells + (_epoch(last, tail) if epochs else []))
    return html_table(lines, head)


def _epoch(last: MetricsRow, tail: str) -> list[str]:
    """Cells: epochs of a source; crop, padding and left-out documents of the last whole epoch."""
    cells = [f"{last.get(f'data_epochs{tail}', 0.0):.3g}"]
    if f"data_epoch_crop{tail}" not in last:
        return cells + ["-"] * (len(EPOCH) - 1)
    kinds = ("cropped", "crop", "fill", "left_out")
    cropped, crop, fill, left = (last[f"data_epoch_{kind}{tail}"] for kind in kinds)
    return [*cells, f"{cropped:,.0f} ({crop:.2%} of tokens)", f"{1 - fill:.2%}", f"{left:,.0f}"]


def _filters(name: str, report: dict[str, Any]) -> str:
    """Table of the documents that each filter of a source removed, in the order of filtering."""

    def cells(what: str, documents: int, size: int, why: str = "") -> list[str]:
        share = documents / report["read"]["documents"]
        return [what, f"{documents:,}", f"{share:.2%}", f"{size / 1e6:,.1f}", why]

    rows = []
    for row in report["filters"]:
        why = ", ".join(f"{reason} {count:,}" for reason, count in row["reasons"].items())
        rows.append(cells(row["name"], row["documents"], row["bytes"] + row["cut_bytes"], why))
    rows.append(cells("left", report["kept"]["documents"], report["kept"]["bytes"]))
    shown = html_table(rows, ("filter", "documents", "share", "MB", "why"))
    return f"<p>What filters removed: {escape(name)}</p>{shown}"


def _lengths(name: str, counts: dict[str, int]) -> str:
    """Histogram of document lengths. A bar labelled N counts lengths above N/2 and up to N."""
    there = [int(end) for end, count in counts.items() if count]
    ends = [int(end) for end in counts if there and there[0] <= int(end) <= there[-1]]
    shown = {f"{end:,}": counts[str(end)] for end in ends}
    return bars(f"{name}: documents by length, tokens up to", shown)


def goodput_section(rows: Sequence[MetricsRow]) -> str:
    """Breakdown of the wall-clock time of all sessions; empty if the run has not logged it."""
    found = goodput(rows)
    if found is None:
        return ""
    lines = [
        (name, format_duration(seconds), f"{seconds / found.seconds:.1%}")
        for name, seconds in found.parts.items()
        if seconds
    ]
    again = f" {found.lost_steps:,} steps were lost and computed again."
    idle = (
        f" Between them it was idle for {format_duration(found.idle)}, which is not in the share."
    )
    text = (
        f"{found.share:.1%} of {format_duration(found.seconds)} went into training steps whose "
        f"result was kept, in {found.sessions} session{'s' * (found.sessions > 1)}."
        f"{again if found.lost_steps else ''}{idle if found.idle else ''}"
    )
    return f"<h2>Goodput</h2><p>{text}</p>{html_table(lines, ('what', 'time', 'share'))}"


def events_section(rows: Sequence[MetricsRow]) -> str:
    """Table of the last MAX_EVENTS event messages; empty if there are none."""
    said = [
        [f"{row['step']:,}", name.replace("_", " "), value]
        for row in rows
        if row["kind"] == "event"
        for name, value in row.items()
        if isinstance(value, str) and name not in ("kind", "event", "status")
    ]
    if not said:
        return ""
    return f"<h2>Events</h2>{html_table(said[-MAX_EVENTS:], ('step', 'event', 'what'))}"


def tasks_section(run_dir: Path) -> str:
    """Table of the in-context tasks in `run_dir/tasks.json`; empty if there are none."""
    result = _read(run_dir / "tasks.json")
    if not result.get("tasks"):
        return ""
    rows = [
        [
            label,
            f"{r['examples']:,}",
            f"{r['accuracy']:.4f} \u00b1 {r['error']:.4f}, chance {r['chance']:.3f}",
            f"{r['centered']:.4f}",
        ]
        for label, r in result["tasks"].items()
    ]
    if "core" in result:
        rows.append(["CORE", "", "", f"{result['core']:.4f}"])
    return f"<h2>Tasks</h2>{html_table(rows, ('task', 'examples', 'accuracy', 'centered'))}"
