"""Charts of a sweep as SVG, without a script: points, parallel coordinates, a map of two values."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from scipy.interpolate import griddata

from jaxtrain.runs.metrics import Number
from jaxtrain.runs.report_charts import ticks
from jaxtrain.sweep.config import Choice, LogUniform, Parameter
from jaxtrain.sweep.load import Scalar

WIDTH, HEIGHT = 480, 270  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 62, 462, 14, 228
CELLS = 24  # of a map, along an axis
LEVELS = 5  # shades of a map


class ChartAxis(NamedTuple):
    """An axis of a chart: it maps a value to 0 to 1, and has tick labels."""

    label: str
    to_unit: Callable[[Scalar], Number]
    marks: list[tuple[Number, str]]


def number_axis(label: str, values: Sequence[Number], log: bool = False) -> ChartAxis:
    """Axis from the least value to the greatest, with a margin."""
    scale = math.log10 if log else lambda x: x
    low, high = scale(min(values)), scale(max(values))
    pad = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - pad, high + pad
    to_unit = lambda value: (scale(value) - low) / (high - low)
    if log:
        candidates = [
            (m, e) for e in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)
        ]
        inside = [m * 10.0**e for m, e in candidates if low <= math.log10(m * 10.0**e) <= high]
        tens = [x for x in inside if f"{x:e}".startswith("1.0")]
        found = tens if len(tens) >= 3 else inside
    else:
        found = ticks(low, high)
    return ChartAxis(label, to_unit, [(to_unit(x), value_label(x)) for x in found])


def parameter_axis(parameter: Parameter, label: str) -> ChartAxis:
    """Axis of a parameter, over its whole range."""
    if isinstance(parameter, Choice):
        count = len(parameter.values)
        known = {repr(value): (i + 0.5) / count for i, value in enumerate(parameter.values)}
        marks = [(known[repr(value)], value_label(value)) for value in parameter.values]
        return ChartAxis(label, lambda value: known[repr(value)], marks)
    return number_axis(label, [parameter.low, parameter.high], isinstance(parameter, LogUniform))


def value_label(value: Scalar) -> str:
    """Label of a value on an axis."""
    return f"{value:.3g}" if isinstance(value, (int, float)) else str(value)[:12]


class TrialPoint(NamedTuple):
    """A trial in a chart. css: `best`, `front` or none. note: its tooltip."""

    x: Scalar
    y: Scalar
    css: str
    note: str


def points_chart(
    title: str,
    x: ChartAxis,
    y: ChartAxis,
    points: Sequence[TrialPoint],
    line: Sequence[tuple[Number, Number]] = (),
) -> str:
    """Points over two axes, and a step line through some values; empty without points."""
    if not points:
        return ""
    parts = [*_frame(x, y)]
    if line:
        places = [(_x(x.to_unit(a)), _y(y.to_unit(b))) for a, b in line]
        path = f"M{places[0][0]} {places[0][1]}" + "".join(f"H{a}V{b}" for a, b in places[1:])
        parts.append(f'<path class="line" d="{path}"/>')
    parts += [_circle(x, y, point) for point in sorted(points, key=lambda p: p.css != "")]
    return _figure(title, "".join(parts))


def map_chart(
    title: str,
    x: ChartAxis,
    y: ChartAxis,
    points: Sequence[TrialPoint],
    scores: Sequence[Number],
    maximize: bool,
) -> str:
    """Points over two axes, on a shaded map of their scores (linear interpolation by Delaunay
    triangles; no shading outside the points). Darker is better; empty below 4 points."""
    if len(points) < 4:
        return ""
    at = np.array([(x.to_unit(p.x), y.to_unit(p.y)) for p in points])
    rank = np.argsort(np.argsort(np.asarray(scores) * (1 if maximize else -1))) / (len(points) - 1)
    cells = []
    if min(np.ptp(at[:, 0]), np.ptp(at[:, 1])) > 0:
        middle = (np.arange(CELLS) + 0.5) / CELLS
        grid = np.stack(np.meshgrid(middle, middle), axis=-1).reshape(-1, 2)
        shades = griddata(at, rank, grid, method="linear")
        wide, high = (RIGHT - LEFT) / CELLS, (BOTTOM - TOP) / CELLS
        for (a, b), shade in zip(grid.tolist(), shades.tolist()):
            if math.isfinite(shade):
                level = math.ceil(shade * LEVELS) / LEVELS
                cells.append(
                    f'<rect class="cell" x="{_x(a) - wide / 2:.1f}" y="{_y(b) - high / 2:.1f}" '
                    f'width="{wide + 0.3:.1f}" height="{high + 0.3:.1f}" '
                    f'fill-opacity="{0.6 * level:.2f}"/>'
                )
    drawn = [*cells, *_frame(x, y), *(_circle(x, y, point) for point in points)]
    return _figure(title, "".join(drawn))


class Line(NamedTuple):
    """A trial in a chart of parallel axes."""

    values: Sequence[Scalar]
    css: str
    note: str


def parallel_chart(title: str, axes: Sequence[ChartAxis], lines: Sequence[Line]) -> str:
    """Each line crosses each axis at its value (Inselberg 1985); empty without lines."""
    if not lines:
        return ""
    width, low, high = 1080, 250, 34
    at = lambda i: round(60 + i * (width - 120) / max(len(axes) - 1, 1), 1)
    up = lambda share: round(low - share * (low - high), 1)
    parts = []
    for line in sorted(lines, key=lambda one: one.css == "best"):
        places = [f"{at(i)} {up(a.to_unit(v))}" for i, (a, v) in enumerate(zip(axes, line.values))]
        parts.append(
            f'<path class="thread {line.css}" d="M{"L".join(places)}">'
            f"<title>{escape(line.note)}</title></path>"
        )
    for i, axis in enumerate(axes):
        parts.append(f'<path class="grid axis" d="M{at(i)} {high}V{low}"/>')
        side = "start" if i == 0 else "end" if i == len(axes) - 1 else "mid"
        x = at(i) - 56 if i == 0 else at(i) + 56 if i == len(axes) - 1 else at(i)
        parts.append(f'<text x="{x}" y="20" class="{side} name">{escape(axis.label)}</text>')
        for share, text in axis.marks:
            parts.append(f'<text x="{at(i) + 5}" y="{up(share) + 4}" class="mark">{text}</text>')
    inner = f'<svg viewBox="0 0 {width} 264">{"".join(parts)}</svg>'
    return (
        f'<figure class="parallel"><figcaption>{escape(title)}</figcaption>'
        f'<div class="scroll">{inner}</div></figure>'
    )


def _x(share: Number) -> Number:
    return round(LEFT + share * (RIGHT - LEFT), 1)


def _y(share: Number) -> Number:
    return round(BOTTOM - share * (BOTTOM - TOP), 1)


def _circle(x: ChartAxis, y: ChartAxis, point: TrialPoint) -> str:
    clip = lambda share: min(max(share, 0.0), 1.0)
    cx, cy = _x(clip(x.to_unit(point.x))), _y(clip(y.to_unit(point.y)))
    radius = 5 if point.css else 3.5
    title = f"<title>{escape(point.note)}</title>"
    return f'<circle class="{point.css}" cx="{cx}" cy="{cy}" r="{radius}">{title}</circle>'


def _frame(x: ChartAxis, y: ChartAxis) -> list[str]:
    parts = []
    for share, text in y.marks:
        parts.append(f'<path class="grid" d="M{LEFT} {_y(share)}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{_y(share) + 4}" class="end">{escape(text)}</text>')
    for share, text in x.marks:
        parts.append(f'<text x="{_x(share)}" y="{BOTTOM + 17}" class="mid">{escape(text)}</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" class="mid name">{escape(x.label)}</text>')
    return parts


def _figure(title: str, drawn: str) -> str:
    caption = f"<figcaption>{escape(title)}</figcaption>"
    return f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}">{drawn}</svg></figure>'
