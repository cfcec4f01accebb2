"""Points and fitted curves over logarithmic axes as SVG, in the style of a run's report."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from jaxtrain.runs.metrics import Number
from jaxtrain.runs.report_charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    format_count,
    ticks,
)

COLORS = 8
STYLE = """
.k0 { --k: light-dark(#2563eb, #6ea8fe); } .k1 { --k: light-dark(#e8590c, #ffa057); }
.k2 { --k: light-dark(#1a7f4b, #51cf8a); } .k3 { --k: light-dark(#9c36b5, #da9cf0); }
.k4 { --k: light-dark(#c92a2a, #ff8787); } .k5 { --k: light-dark(#087f8c, #58d5e0); }
.k6 { --k: light-dark(#7a5b00, #e0b93a); } .k7 { --k: light-dark(#5c6370, #adb5bd); }
svg path.curve { stroke: var(--k); stroke-width: 1.6; }
svg path.band { stroke: var(--k); stroke-width: 1.2; stroke-dasharray: 4 3; }
svg path.marks { stroke: var(--k); stroke-width: 7; stroke-linecap: round; }
svg path.ring { stroke: var(--k); stroke-width: 1.6; fill: none; }
figcaption i[class^="k"]::before { background: var(--k); }
figcaption i { white-space: nowrap; }
"""


class ChartCurve(NamedTuple):
    """One series of a chart. style: curve, band (dashed) or marks. color: index of a colour."""

    label: str
    x: Sequence[Number]
    y: Sequence[Number]
    style: str = "curve"
    color: int = 0


class Axis(NamedTuple):
    """Maps values to SVG units from `start` to `end`."""

    low: Number
    high: Number
    log: bool
    start: Number
    end: Number

    def at(self, value: Number) -> Number:
        """The position of a value in SVG units, clipped to just beyond the ends of the axis."""
        a, b, v = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        share = min(max((v - a) / (b - a), -0.02), 1.02)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[Number]:
        """Round tick values: 1, 2, 5 times powers of ten, or fewer if they are too many."""
        if not self.log:
            return ticks(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [m * 10.0**k for k in decades for m in steps]
            found = [x for x in found if self.low <= x <= self.high]
            if len(found) <= 7:
                break
        return found[:: math.ceil(len(found) / 7)] if found else [self.low, self.high]


def axis_of(values: Sequence[Number], log: bool, start: Number, end: Number) -> Axis:
    """An axis with some room around the values."""
    low, high = min(values), max(values)
    if log:
        pad = max((high / low) ** 0.06, 1.03)
        return Axis(low / pad, high * pad, True, start, end)
    pad = 0.07 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low - pad, high + pad, False, start, end)


def log_chart(
    title: str,
    curves: Sequence[ChartCurve],
    x_name: str,
    *,
    log_y: bool = False,
    y_from: Sequence[Number] | None = None,
) -> str:
    """A figure with a logarithmic x axis; "" without curves.

    y_from: values that set the range of the y axis, if curves may go beyond it.
    """
    curves = [one for one in curves if len(one.x)]
    if not curves:
        return ""
    x = axis_of([v for one in curves for v in one.x], True, LEFT + 6, RIGHT)
    y = axis_of(y_from or [v for one in curves for v in one.y], log_y, BOTTOM - 12, TOP)
    parts = []
    for tick in x.ticks():
        parts.append(f'<path class="grid" d="M{x.at(tick)} {TOP}V{BOTTOM - 12}"/>')
        parts.append(f'<text x="{x.at(tick)}" y="{HEIGHT - 20}" class="mid">{short(tick)}</text>')
    for tick in y.ticks():
        parts.append(f'<path class="grid" d="M{LEFT + 6} {y.at(tick)}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT}" y="{y.at(tick) + 4}" class="end">{short(tick)}</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" class="mid">{escape(x_name)}</text>')
    for one in curves:
        points = [f"{x.at(a)} {y.at(b)}" for a, b in zip(one.x, one.y)]
        path = "M" + ("h0M" if one.style == "marks" else "L").join(points) + "h0"
        parts.append(f'<path class="{one.style} k{one.color % COLORS}" d="{path}"/>')
        if one.style == "marks":
            parts += [
                f'<circle cx="{x.at(a)}" cy="{y.at(b)}" r="7" fill-opacity="0">'
                f"<title>{escape(one.label)}: {short(a)}, {b:.4g}</title></circle>"
                for a, b in zip(one.x, one.y)
            ]
    named = dict.fromkeys((one.label, one.color % COLORS) for one in curves if one.label)
    legend = "".join(f'<i class="k{color}">{escape(label)}</i>' for label, color in named)
    caption = f"<figcaption>{escape(title)}{legend}</figcaption>"
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'
    return f"<figure>{caption}{svg}</figure>"


def between(low: Number, high: Number, count: int = 60) -> list[float]:
    """`count` log-spaced values from low to high."""
    ratio = high / low
    return [low * ratio ** (i / (count - 1)) for i in range(count)]


def short(value: Number) -> str:
    """A value formatted in few characters."""
    if abs(value) >= 1e15:
        return f"{value:.3g}".replace("e+", "e")
    if value >= 1000:
        return format_count(value)
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.4g}"
