"""The part of a run's report about its data: what the sources hold and what packing made of it."""

import json
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from jaxtrain.data import counts_phrase

WIDTH, HEIGHT, BASE = 480, 170, 150  # of a histogram, in SVG units; BASE is its x axis
LEAST_BARS = 8
EPOCH = ("epochs", "cropped in the last whole one", "its padding", "documents left out")
MetricsRow = dict[str, Any]


def data_section(run_dir: Path, rows: Sequence[MetricsRow]) -> str:
    """Sources, crop rate and document lengths, from `data.json` and the training rows.

    Empty for a run without a data.json, or with one that a crash has torn.
    """
    sources: dict[str, MetricsRow] = {}
    with suppress(OSError, ValueError):
        sources = json.loads((run_dir / "data.json").read_text("utf-8"))
    if not sources:
        return ""
    last = next((row for row in reversed(rows) if "data_crop" in row), {})
    lines = ["<h2>Data</h2>", _packing(last), _waited(rows), *_conversations(sources)]
    lines += [*_skipped(sources), '<div class="wide">', _table(sources, last)]
    histograms = [_histogram(name, source["lengths"]) for name, source in sources.items()]
    lines += [
        *(_filters(n, s["filters"]) for n, s in sources.items() if s.get("filters")),
        "</div>",
    ]
    return "\n".join([*lines, '<div class="charts">', *histograms, "</div>"])


def _packing(last: MetricsRow) -> str:
    if not last:
        return ""
    crop, fill = last["data_crop"], last["data_fill"]
    return (
        f"<p>Of the tokens that were read, packing cropped {crop:.2%}; "
        f"of the rows, {fill:.2%} are text and {1 - fill:.2%} padding.</p>"
    )


def _waited(rows: Sequence[MetricsRow]) -> str:
    shares = [row["data_wait"] for row in rows if "data_wait" in row]
    if not shares:
        return ""
    return f"<p>Steps waited for data in {median(shares):.2%} of their time (median).</p>"


def _conversations(sources: dict[str, MetricsRow]) -> list[str]:
    talk = {name: source for name, source in sources.items() if "unanswered" in source}
    return [f"<p>{escape(name)}: {counts_phrase(source)}.</p>" for name, source in talk.items()]


def _skipped(sources: dict[str, MetricsRow]) -> list[str]:
    lost = [item for source in sources.values() for item in source.get("skipped", {}).items()]
    return [
        f'<p class="warning">{escape(name)} is damaged: its {count:,} documents are left out.</p>'
        for name, count in lost
    ]


def _table(sources: dict[str, MetricsRow], last: MetricsRow) -> str:
    names = ["source", "documents", "tokens", "bytes per token", "tokens per document"]
    several, epochs = len(sources) > 1, any(key.startswith("data_epochs") for key in last)
    names += ["share of rows"] * several + [*EPOCH] * epochs
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = [f"<table><tr>{head}</tr>"]
    for name, source in sources.items():
        documents, tokens = source["documents"], source["tokens"]
        cells = [f"{documents:,}", f"{tokens:,}", f"{source['bytes'] / tokens:.2f}"]
        cells.append(f"{tokens / documents:,.0f}")
        tail = f"_{name}" if several else ""
        if several:
            cells.append(f"{last.get(f'data_share{tail}', 0.0):.1%}")
        if epochs:
            cells += _epoch(last, tail)
        lines.append(f"<tr><th>{escape(name)}</th>{_cells(cells)}</tr>")
    return "\n".join([*lines, "</table>"])


def _epoch(last: MetricsRow, tail: str) -> list[str]:
    """How many epochs of a source there were, and what packing did in the last whole one."""
    cells = [f"{last.get(f'data_epochs{tail}', 0.0):.3g}"]
    if f"data_epoch_crop{tail}" not in last:
        return cells + ["-"] * (len(EPOCH) - 1)
    kinds = ("cropped", "crop", "fill", "left_out")
    cropped, crop, fill, left = (last[f"data_epoch_{kind}{tail}"] for kind in kinds)
    return [*cells, f"{cropped:,.0f} ({crop:.2%} of tokens)", f"{1 - fill:.2%}", f"{left:,.0f}"]


def _filters(name: str, report: MetricsRow) -> str:
    """What the filters of a source removed of its documents, each of what those before it left."""
    read, kept = report["read"], report["kept"]
    head = "".join(f"<th>{x}</th>" for x in ("filter", "documents", "share", "MB", "why"))
    lines = [f"<p>What filters removed: {escape(name)}</p><table><tr>{head}</tr>"]
    for row in report["filters"]:
        why = ", ".join(f"{reason} {count:,}" for reason, count in row["reasons"].items())
        lost = (row["bytes"] + row["cut_bytes"]) / 1e6
        cells = [f"{row['documents']:,}", f"{row['documents'] / read['documents']:.2%}"]
        cells += [f"{lost:,.1f}", escape(why)]
        lines.append(f"<tr><th>{row['name']}</th>{_cells(cells)}</tr>")
    left = [f"{kept['documents']:,}", f"{kept['documents'] / read['documents']:.2%}"]
    left += [f"{kept['bytes'] / 1e6:,.1f}", ""]
    return "\n".join([*lines, f"<tr><th>left</th>{_cells(left)}</tr></table>"])


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _histogram(name: str, lengths: dict[str, int]) -> str:
    """Documents by their length; each bar is of lengths above half of what stands below it."""
    ends, counts = [int(end) for end in lengths], list(lengths.values())
    there = [i for i, count in enumerate(counts) if count]
    if not there:
        return ""
    # Of one document, or of documents of one length, the bars beside it are shown empty.
    middle = (there[0] + there[-1] + 1 - LEAST_BARS) // 2
    first = max(0, min(there[0], middle, len(counts) - LEAST_BARS))
    shown = range(first, min(len(counts), max(there[-1] + 1, first + LEAST_BARS)))
    most, wide = max(counts), (WIDTH - 20) / len(shown)
    parts = []
    for place, i in enumerate(shown):
        high = (BASE - 20) * counts[i] / most
        x, y = 10 + place * wide, BASE - high
        middle = f'x="{x + wide / 2:.1f}" class="mid"'
        parts.append(f'<text {middle} y="{BASE + 15}">{_short(ends[i])}</text>')
        if counts[i]:
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" height="{high:.1f}" '
                'style="fill:var(--train)"/>'
            )
            parts.append(f'<text {middle} y="{y - 4:.1f}">{counts[i]:,}</text>')
    caption = f"<figcaption>{escape(name)}: documents by length, tokens up to</figcaption>"
    return f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg></figure>'


def _short(count: int) -> str:
    return (
        f"{count >> 20}M"
        if count >= 1 << 20
        else f"{count >> 10}K"
        if count >= 1024
        else f"{count}"
    )
