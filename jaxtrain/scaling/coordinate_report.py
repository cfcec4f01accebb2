"""coordinates.html: the coordinate check as one self-contained page."""

from html import escape
from pathlib import Path
from typing import Any

from jaxtrain.runs.report import STYLE as CSS
from jaxtrain.runs.report_charts import html_table
from jaxtrain.scaling.charts import STYLE, ChartCurve, log_chart
from jaxtrain.storage.disk import write_whole

TITLES = {
    "before": "RMS at the start",
    "after": "RMS after the steps",
    "change": "RMS of the change by the steps",
}


def write_coordinates(path: Path, tree: dict[str, Any]) -> Path:
    """Write the page of a coordinates.json; returns its path."""
    kinds = list(dict.fromkeys(one["kind"] for one in tree["measured"]))
    charts = []
    for what, title in TITLES.items():
        curves = []
        for color, kind in enumerate(kinds):
            by_size: dict[int, list[float]] = {}
            for one in tree["measured"]:
                if one["kind"] == kind and one[what] > 0:
                    by_size.setdefault(one["size"], []).append(one[what])
            means = [sum(values) / len(values) for values in by_size.values()]
            curves.append(ChartCurve(kind, list(by_size), means, "curve", color))
            points = [(size, y) for size, values in by_size.items() for y in values]
            xs, ys = [float(x) for x, _ in points], [y for _, y in points]
            curves.append(ChartCurve(kind, xs, ys, "marks", color))
        charts.append(log_chart(title, curves, tree["axis"], log_y=True))
    rows = [
        (f"{one['kind']}, {one['what']}", slope_text(one), one["verdict"]) for one in tree["slopes"]
    ]
    name = escape(f"Coordinate check: {tree['config']}")
    facts = f"{tree['steps']} steps; {tree['when']}"
    head = f'<meta charset="utf-8"><title>{name}</title><style>{CSS.read_text()}{STYLE}</style>'
    parts = [
        f'<!doctype html><html lang="en"><head>{head}</head><body>',
        f'<header><h1>{name}</h1><p class="status">{escape(facts)}</p></header>',
        f'<div class="charts">{"".join(charts)}</div>',
        html_table(rows, ("activation", f"slope over {tree['axis']} (interval)", "verdict")),
        "</body></html>\n",
    ]
    write_whole(path, "\n".join(parts).encode(errors="replace"))
    return path


def slope_text(one: dict[str, Any]) -> str:
    if one["value"] is None:
        return "not determined"
    return f"{one['value']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f})"
