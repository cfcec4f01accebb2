"""scaling.html: a self-contained page about a study; and the summary for the terminal."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxtrain.runs.report import STYLE as CSS
from jaxtrain.runs.report_charts import html_table
from jaxtrain.scaling.charts import STYLE, ChartCurve, between, log_chart, short
from jaxtrain.scaling.fit import Fits, Law, Minima, Parametric, grid_of
from jaxtrain.scaling.laws import Interval, Parabola
from jaxtrain.scaling.points import Point
from jaxtrain.storage.disk import write_whole

Tree = dict[str, Any]


def write_fit_report(path: Path, tree: Tree, points: Sequence[Point], fits: Fits) -> Path:
    """Write the page; returns its path. tree: the content of fit.json."""
    name = escape(str(tree["name"]))
    charts = [
        *isoflop_charts(fits.isoflop, points, tree["measure"]),
        *parametric_charts(fits, points, tree),
        *rate_charts(fits.learning_rate, points, tree["measure"]),
        *batch_charts(fits, tree["measure"]),
    ]
    parts = [
        f'<header><h1>{name}</h1><p class="status">{escape(tree["when"])}</p></header>',
        html_table(fit_rows(tree, fits)),
        f'<div class="charts">{"".join(charts)}</div>',
        "<h2>Minima</h2>" + minima_table(fits),
        "<h2>Runs</h2>" + runs_table(points),
    ]
    head = f'<meta charset="utf-8"><title>{name}</title><style>{CSS.read_text()}{STYLE}</style>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    page = "\n".join([f'<!doctype html><html lang="en"><head>{head}</head><body>', *parts])
    write_whole(path, f"{page}</body></html>\n".encode(errors="replace"))
    return path


def summary_lines(tree: Tree, fits: Fits) -> list[str]:
    """Summary lines for the terminal."""
    return [f"{name:34s} {value}" for name, value in fit_rows(tree, fits)]


# ---- figures -----------------------------------------------------------------------------------


def interval_text(one: Interval, form: Callable[[float], str] = short) -> str:
    """Format as "value (low to high)"."""
    return f"{form(one.value)} ({form(one.low)} to {form(one.high)})"


def law_text(law: Law, x: str) -> str:
    return f"{law.coefficient.value:.3g} x {x}^{interval_text(law.exponent)}"


def fit_rows(tree: Tree, fits: Fits) -> list[tuple[str, str]]:
    """Rows (name, value) of all results."""
    level = f"{tree['intervals']['level']:.0%} intervals, {tree['intervals']['samples']} resamples"
    rows = [("runs", f"{len(tree['runs'])}; {level}")]
    if missing := tree.get("missing_runs"):
        rows.append(("missing runs", f"{len(missing)}: {', '.join(missing[:4])}"))
    if iso := fits.isoflop:
        if iso.best and iso.tokens:
            rows.append(("isoFLOP: optimal parameters", law_text(iso.best, "FLOPs")))
            rows.append(("isoFLOP: optimal tokens", law_text(iso.tokens, "FLOPs")))
        if iso.ratio:
            rows.append(("isoFLOP: tokens per parameter", interval_text(iso.ratio)))
        outside = [m for m in iso.minima if not m.curve.inside]
        if outside:
            rows.append(
                ("budgets without a minimum inside", ", ".join(short(m.at) for m in outside))
            )
    if p := fits.parametric:
        rows += parametric_rows(p)
    if (rate := fits.learning_rate) and rate.best:
        rows.append(("best rate multiplier", law_text(rate.best, "parameters")))
    if fits.batch and fits.batch.best:
        rows.append(("best batch (tokens a step)", law_text(fits.batch.best, "tokens")))
    for one in fits.critical[-1:]:
        rows.append((f"critical batch at {one.loss:.3f} (tokens)", interval_text(one.critical)))
    if law := fits.critical_law:
        rows.append(("critical batch", f"{law.coefficient:.3g} x tokens^{law.exponent:.3g}"))
    rows += [(f"no {name}", reason) for name, reason in fits.missing.items()]
    return rows + held_out_rows(tree.get("held_out"))


def parametric_rows(p: Parametric) -> list[tuple[str, str]]:
    names = ("E", "A", "B", "alpha", "beta")
    rows = [(f"L = E + A/N^alpha + B/D^beta: {n}", interval_text(getattr(p, n))) for n in names]
    rows.append(("residual of log loss (RMS)", f"{p.residual:.2g}"))
    for one in p.optimal:
        rows.append(
            (
                f"tokens per parameter at {one.flops:.3g} FLOPs",
                f"{interval_text(one.tokens_per_parameter)}, of "
                f"{interval_text(one.parameters)} parameters",
            )
        )
    return rows


def held_out_rows(found: Tree | None) -> list[tuple[str, str]]:
    """Rows of the held-out run: the prediction and the outcome."""
    if not found:
        return []
    one, digits = found["prediction"], lambda x: f"{x:.4f}"
    interval = interval_text(Interval(**one["loss"]), digits)
    rows = [("held-out run", f"{one['run']}, {one['flops']:.3g} FLOPs")]
    rows.append((f"predicted {found['when']}", f"{interval}, {one['level']:.0%}"))
    if found["loss"] is not None:
        word = "inside" if found["inside"] else "OUTSIDE"
        off = found["loss"] / one["loss"]["value"] - 1
        rows.append(("its loss", f"{found['loss']:.4f}: {word} ({off:+.2%} of the prediction)"))
    return rows


# ---- charts ------------------------------------------------------------------------------------


def parabola_curves(
    label: str, parabola: Parabola, xs: Sequence[float], runs: Sequence[Point], color: int
) -> list[ChartCurve]:
    """Marks of the runs at `xs`, and the parabola through them if it has a minimum."""
    marks = ChartCurve(label, xs, [p.loss for p in runs], "marks", color)
    if parabola.curvature <= 0:
        return [marks]
    line = between(min(xs), max(xs))
    return [marks, ChartCurve(label, line, [parabola(x) for x in line], "curve", color)]


def isoflop_charts(iso: Minima | None, points: Sequence[Point], measure: str) -> list[str]:
    if iso is None:
        return []
    curves: list[ChartCurve] = []
    for color, one in enumerate(iso.minima):
        runs = [p for p in points if p.budget == one.at and "isoflop" in p.kinds]
        xs = [p.parameters for p in runs]
        curves += parabola_curves(f"{one.at:.2e} FLOPs", one.curve, xs, runs, color)
    lowest = [p.loss for p in points if "isoflop" in p.kinds]
    charts = [
        log_chart(f"Validation {measure} of equal FLOPs", curves, "parameters", y_from=lowest)
    ]
    good = [m for m in iso.minima if m.curve.inside]
    if iso.best and iso.tokens and good:
        at = [m.at for m in good]
        line = between(min(at), max(at))
        n, d = iso.best.law, iso.tokens.law
        charts.append(
            log_chart(
                "Compute-optimal parameters and tokens",
                [
                    ChartCurve("parameters", at, [m.best.value for m in good], "marks", 0),
                    ChartCurve("parameters", line, [n(x) for x in line], "curve", 0),
                    ChartCurve("tokens", at, [m.tokens for m in good], "marks", 1),
                    ChartCurve("tokens", line, [d(x) for x in line], "curve", 1),
                ],
                "FLOPs",
                log_y=True,
            )
        )
    return charts


def parametric_charts(fits: Fits, points: Sequence[Point], tree: Tree) -> list[str]:
    if fits.parametric is None:
        return []
    law, grid = fits.parametric.law, grid_of(points)
    curves: list[ChartCurve] = []
    for color, n in enumerate(sorted({p.parameters for p in grid})):
        runs = sorted((p for p in grid if p.parameters == n), key=lambda p: p.tokens)
        xs, label = [float(p.tokens) for p in runs], short(n)
        line = between(min(xs), max(xs) * 1.001)
        curves.append(ChartCurve(label, xs, [p.loss for p in runs], "marks", color))
        curves.append(ChartCurve(label, line, [law(n, x) for x in line], "curve", color))
    chart = log_chart(f"Parametric law: {tree['measure']} of each size", curves, "tokens")
    at = [one.flops for one in fits.parametric.optimal]
    ratios = [one.tokens_per_parameter for one in fits.parametric.optimal]
    bands = [
        ChartCurve("parametric law", at, [r.value for r in ratios], "curve", 0),
        ChartCurve("parametric law", at, [r.low for r in ratios], "band", 0),
        ChartCurve("parametric law", at, [r.high for r in ratios], "band", 0),
    ]
    if fits.isoflop:
        good = [m for m in fits.isoflop.minima if m.curve.inside]
        xs, ys = [m.at for m in good], [m.tokens / m.best.value for m in good]
        bands.append(ChartCurve("isoFLOP minima", xs, ys, "marks", 1))
    wide = [y for one in bands[:1] + bands[3:] for y in one.y]
    ratio = log_chart("Tokens per parameter", bands, "FLOPs", y_from=[*wide, 0.7 * min(wide)])
    return [chart, ratio if len(at) > 1 else ""]


def rate_charts(rate: Minima | None, points: Sequence[Point], measure: str) -> list[str]:
    if rate is None:
        return []
    curves: list[ChartCurve] = []
    for color, one in enumerate(rate.minima):
        runs = [p for p in points if p.parameters == one.at and "learning_rates" in p.kinds]
        xs = [p.multiplier for p in runs]
        curves += parabola_curves(f"{short(one.at)} parameters", one.curve, xs, runs, color)
    return [log_chart(f"Validation {measure} by learning rate", curves, "rate multiplier")]


def batch_charts(fits: Fits, measure: str) -> list[str]:
    curves: list[ChartCurve] = []
    for color, one in enumerate(fits.critical):
        label = f"{measure} {one.loss:.3f}"
        tokens = [b * s for b, s in zip(one.batch_tokens, one.steps)]
        curves.append(ChartCurve(label, one.steps, tokens, "marks", color))
        sizes = between(min(one.batch_tokens) / 1.5, max(one.batch_tokens) * 1.5)
        steps = [one.fit.steps(b) for b in sizes]
        line = [b * s for b, s in zip(sizes, steps)]
        curves.append(ChartCurve(label, steps, line, "curve", color))
    return [log_chart("Tokens against steps to equal losses", curves, "steps", log_y=True)]


# ---- tables ------------------------------------------------------------------------------------


def minima_table(fits: Fits) -> str:
    rows: list[tuple[object, ...]] = []
    for name, minima in (
        ("parameters at FLOPs", fits.isoflop),
        ("rate multiplier at parameters", fits.learning_rate),
        ("batch tokens at tokens", fits.batch),
    ):
        for m in minima.minima if minima else ():
            inside = "yes" if m.curve.inside else "no: extrapolated"
            rows.append(
                (
                    f"{name} {short(m.at)}",
                    interval_text(m.best),
                    f"{m.curve.lowest:.4f}",
                    inside,
                    m.left_out,
                )
            )
    for one in fits.critical:
        rows.append(
            (f"critical batch at {one.loss:.4f}", interval_text(one.critical), "", "", one.left_out)
        )
    head = ("", "best (interval)", "lowest loss", "inside the runs", "resamples without a fit")
    return html_table(rows, head) if rows else "<p>None.</p>"


def runs_table(points: Sequence[Point]) -> str:
    head = ("run", "for", "parameters", "tokens", "FLOPs", "batch tokens", "rate", "loss")
    rows = [
        (
            p.name, " ".join(p.kinds), f"{p.parameters:,.0f}", f"{p.tokens:,}", f"{p.flops:.3e}",
            f"{p.batch_tokens:,}", f"{p.multiplier:g}", f"{p.loss:.4f}",
        )
        for p in points
    ]  # fmt: skip
    return html_table(rows, head)
