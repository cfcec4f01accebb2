"""Charts and tables of a run's report as HTML and SVG, without a script."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from jaxtrain.runs.metrics import Number

WIDTH, HEIGHT = 480, 250  # size of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 48, 462, 26, 226  # edges of a chart's frame
MAX_POINTS = 250  # points drawn per line
MAX_HOVERS = 100  # vertical strips of a chart that show values on hover
MAX_BARS = 64


class Series(NamedTuple):
    """One line of a chart, sorted by x."""

    label: str
    x: Sequence[Number]
    y: Sequence[Number]


class Frame(NamedTuple):
    """Maps data to SVG units; x starts at 0."""

    x_high: Number
    y_low: Number
    y_high: Number

    def x(self, x: Number) -> Number:
        return round(LEFT + x / self.x_high * (RIGHT - LEFT), 1)

    def y(self, y: Number) -> Number:
        return round(BOTTOM - (y - self.y_low) / (self.y_high - self.y_low) * (BOTTOM - TOP), 1)


def line_chart(
    title: str,
    x_name: str,
    lines: Sequence[Series],
    *,
    from_zero: bool = False,
    smooth: bool = True,
) -> str:
    """A line chart that shows values on hover; empty without lines."""
    if not lines:
        return ""
    frame = Frame(max(line.x[-1] for line in lines) or 1, *y_range(lines, from_zero))
    parts = []
    for x in ticks(0, frame.x_high, 6):
        parts.append(f'<text x="{frame.x(x)}" y="{HEIGHT - 5}" class="mid">{_number(x)}</text>')
    for y in ticks(frame.y_low, frame.y_high):
        parts.append(f'<path class="grid" d="M{LEFT} {frame.y(y)}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{frame.y(y) + 4}" class="end">{_number(y)}</text>')
    for line in lines:
        noisy = smooth and len(line.x) > 40
        parts.append(_path(frame, line, "line faint" if noisy else "line"))
        if noisy:
            parts.append(_path(frame, line._replace(y=smoothed(line.y)), "line"))
        if len(line.x) <= 30:
            parts.append(_path(frame, line, "dots"))
    legend = "".join(f'<i class="{line.label}">{line.label}</i>' for line in lines)
    caption = f"<figcaption>{escape(title)}{legend if len(lines) > 1 else ''}</figcaption>"
    drawn = "".join([*parts, *_hovers(frame, x_name, lines)])
    return f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}">{drawn}</svg></figure>'


def bars(title: str, values: Mapping[str, Number]) -> str:
    """A bar chart of named values from zero; empty without values."""
    if not values:
        return ""
    most = max(values.values()) or 1
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{_number(value)}</td>"
        f'<td><b class="bar" style="width: {100 * max(value, 0) / most:.1f}%"></b></td></tr>'
        for name, value in list(values.items())[:MAX_BARS]
    )
    if len(values) > MAX_BARS:
        title += f"; {len(values) - MAX_BARS} more are not drawn"
    caption = f"<figcaption>{escape(title)}</figcaption>"
    return f'<figure class="bars">{caption}<table>{rows}</table></figure>'


def html_table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """A table whose first column contains row headers; every cell is escaped."""
    lines = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"] if head else []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
        lines.append(f"<tr><th>{escape(str(first))}</th>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def format_count(count: Number) -> str:
    """123_456_789 -> '123M': three significant digits."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * unit:
            scaled = count / unit
            return f"{scaled:.{max(0, 2 - int(math.log10(scaled)))}f}{suffix}"
    return f"{count:g}"


def thinned(xs: Sequence[Number], ys: Sequence[Number]) -> list[tuple[Number, Number]]:
    """Downsample: the lowest and highest point of each of at most MAX_POINTS / 2 buckets."""
    size = math.ceil(len(ys) / (MAX_POINTS // 2))
    buckets = [range(i, min(i + size, len(ys))) for i in range(0, len(ys), size)]
    picked = {pick(bucket, key=ys.__getitem__) for bucket in buckets for pick in (min, max)}
    return [(xs[i], ys[i]) for i in sorted(picked)]


def smoothed(ys: Sequence[Number]) -> Sequence[Number]:
    """Centred, Hann-weighted moving average over a twentieth of the points."""
    window = np.hanning(max(3, len(ys) // 20) + 2)[1:-1]
    total = np.convolve(ys, window, "same")
    return (total / np.convolve(np.ones(len(ys)), window, "same")).tolist()


def y_range(lines: Sequence[Series], from_zero: bool) -> tuple[Number, Number]:
    """(low, high) of the y axis. A few extremes (the first steps, a spike) may lie above it."""
    values = np.concatenate([np.asarray(line.y, float) for line in lines])
    low, high = np.quantile(values, [0.0, 0.97 if len(values) > 40 else 1.0]).tolist()
    if from_zero:
        return min(0.0, low), (high * 1.08) or 1.0
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad


def ticks(low: Number, high: Number, count: int = 5) -> list[Number]:
    """About `count` round values (1, 2 or 5 times a power of ten) from low to high."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _path(frame: Frame, line: Series, css: str) -> str:
    """The line or dots of a series; points outside the frame are drawn at its edge."""
    inside = lambda y: min(max(frame.y(y), TOP - 4), BOTTOM + 4)
    points = [f"{frame.x(x)} {inside(y)}" for x, y in thinned(line.x, line.y)]
    path = "M" + ("h0M" if css == "dots" else "L").join(points) + "h0"
    return f'<path class="{css} {line.label}" d="{path}"/>'


def _hovers(frame: Frame, x_name: str, lines: Sequence[Series]) -> list[str]:
    """At most MAX_HOVERS adjacent strips; each shows the values at its right end on hover."""
    longest = max((line.x for line in lines), key=len)
    count = min(MAX_HOVERS, len(longest))
    width, strips = (RIGHT - LEFT) / count, []
    for i in range(count):
        ends = [(line, bisect_right(line.x, frame.x_high * (i + 1) / count)) for line in lines]
        values = [f"{line.label} {_number(line.y[end - 1])}" for line, end in ends if end]
        x = max((line.x[end - 1] for line, end in ends if end), default=0)
        text = ", ".join([f"{x_name} {_number(x)}", *values])
        strips.append(
            f'<g><rect x="{LEFT + i * width:.1f}" y="{TOP}" width="{width:.1f}" height="200"/>'
            f'<text x="{RIGHT}" y="15" class="end">{text}</text></g>'
        )
    return strips


def _number(value: Number) -> str:
    if value >= 100_000:
        return format_count(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
