"""Charts of a run's report as SVG, without a script: lines by step or time, and bars."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxtrain.runs.metrics import Number

WIDTH, HEIGHT = 480, 250  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 48, 18, 26, 24  # its margins
MAX_POINTS = 250  # drawn per line
MAX_HOVERS = 100  # places of a chart that show their values under the pointer
MAX_BARS = 64  # of a chart; more are summed up in the last
NAMED = 12  # bars that have room for their value, and for a name of more than a few letters
WIDEST = 60  # of a bar


class Series(NamedTuple):
    """One line of a chart, sorted by x."""

    label: str
    x: Sequence[Number]
    y: Sequence[Number]


def format_count(count: Number) -> str:
    """123_456_789 -> '123M'; three digits are kept."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * unit:
            scaled = count / unit
            return f"{scaled:.{max(0, 2 - int(math.log10(scaled)))}f}{suffix}"
    return f"{count:g}"


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


def chart(title: str, x_name: str, lines: Sequence[Series], *, from_zero=False, smooth=True) -> str:
    """An SVG figure of the lines, or nothing where there are none; the values show on hover."""
    if not lines:
        return ""
    frame = Frame(max(line.x[-1] for line in lines) or 1, *y_range(lines, from_zero))
    parts = y_axis(frame)
    for x in ticks(0, frame.x_high, 6):
        parts.append(f'<text x="{frame.x(x)}" y="{HEIGHT - 5}" class="mid">{_tick(x)}</text>')
    x, y, wide, high = LEFT, TOP - 4, WIDTH - LEFT - RIGHT + 4, HEIGHT - TOP - BOTTOM + 8
    # A nested svg clips what leaves the frame.
    parts.append(f'<svg x="{x}" y="{y}" width="{wide}" height="{high}" ')
    parts.append(f'viewBox="{x} {y} {wide} {high}">')
    for line in lines:
        if smooth and len(line.x) > 40:
            parts.append(_path(frame, line.x, line.y, f"{line.label} faint"))
            parts.append(_path(frame, line.x, smoothed(line.y), line.label))
        else:
            parts.append(_path(frame, line.x, line.y, line.label))
    parts.append("</svg>")
    parts += _hovers(frame, x_name, lines)
    legend = "".join(f'<i class="{line.label}">{line.label}</i>' for line in lines)
    caption = f"<figcaption>{escape(title)}{legend if len(lines) > 1 else ''}</figcaption>"
    return f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg></figure>'


def bars(title: str, values: Mapping[str, Number]) -> str:
    """An SVG figure of a bar for each value from zero, or nothing; names and values below hover."""
    if not values:
        return ""
    names, heights = list(values)[:MAX_BARS], list(values.values())[:MAX_BARS]
    frame = Frame(1, *y_range([Series("", [], heights)], from_zero=True))
    parts = y_axis(frame)
    step = (WIDTH - LEFT - RIGHT) / len(names)
    wide = min(0.8 * step, WIDEST)
    for i, (name, value) in enumerate(zip(names, heights)):
        middle, top = LEFT + (i + 0.5) * step, frame.y(max(value, 0))
        box = f'x="{middle - wide / 2:.1f}" width="{wide:.1f}"'
        parts.append(f'<rect class="bar" {box} y="{top}" height="{HEIGHT - BOTTOM - top:.1f}"/>')
        if len(names) <= NAMED or i % math.ceil(len(names) / NAMED) == 0:
            shown = name.rpartition("/")[2][:9]
            parts.append(
                f'<text x="{middle:.1f}" y="{HEIGHT - 5}" class="mid">{escape(shown)}</text>'
            )
        parts.append(
            f'<g><rect x="{LEFT + i * step:.1f}" y="0" width="{step:.1f}" height="{HEIGHT}"/>'
            f'<text x="{WIDTH - RIGHT}" y="15" class="end">{escape(name)} {_number(value)}</text>'
            "</g>"
        )
    more = len(values) - len(names)
    title += f"; {more} more are not drawn" if more else ""
    caption = f"<figcaption>{escape(title)}</figcaption>"
    return f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg></figure>'


def y_axis(frame: Frame) -> list[str]:
    """Lines across, and their values."""
    parts = []
    for y in ticks(frame.y_low, frame.y_high):
        parts.append(f'<path class="grid" d="M{LEFT} {frame.y(y)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{frame.y(y) + 4:.1f}" class="end">{_tick(y)}</text>')
    return parts


def _path(frame: Frame, xs: Sequence[Number], ys: Sequence[Number], css: str) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in thinned(xs, ys)]
    dots = points if len(points) <= 30 else []
    circles = "".join(f'<circle class="dot {css}" cx="{x}" cy="{y}" r="2.5"/>' for x, y in dots)
    return f'<path class="line {css}" d="M{" ".join(f"{x} {y}" for x, y in points)}"/>{circles}'


def thinned(xs: Sequence[Number], ys: Sequence[Number]) -> list[tuple[Number, Number]]:
    """All points, or the lowest and the highest of each of MAX_POINTS / 2 buckets."""
    if len(xs) <= MAX_POINTS:
        return list(zip(xs, ys))
    points = []
    for bucket in np.array_split(np.arange(len(xs)), MAX_POINTS // 2):
        indices = bucket.tolist()
        picked = {min(indices, key=ys.__getitem__), max(indices, key=ys.__getitem__)}
        points += [(xs[i], ys[i]) for i in sorted(picked)]
    return points


def smoothed(ys: Sequence[Number]) -> Sequence[Number]:
    """Centred, weighted moving mean over a twentieth of the points."""
    window = np.hanning(max(3, len(ys) // 20) + 2)[1:-1]
    total = np.convolve(ys, window, "same")
    return (total / np.convolve(np.ones(len(ys)), window, "same")).tolist()


def y_range(lines: Sequence[Series], from_zero: bool) -> tuple[Number, Number]:
    """Low and high end of the y axis; a few extremes (the first steps, a spike) may leave it."""
    values = np.concatenate([np.asarray(line.y, float) for line in lines])
    low, high = np.quantile(values, [0.0, 0.97 if len(values) > 40 else 1.0]).tolist()
    if from_zero:
        return min(0.0, low), (high * 1.08) or 1.0
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad


def ticks(low: Number, high: Number, count: int = 5) -> list[Number]:
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
