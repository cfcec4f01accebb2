"""One self-contained HTML page about a sweep, finished or not."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from jaxtrain.runs.report import STYLE
from jaxtrain.runs.report_charts import bars, html_table
from jaxtrain.storage.disk import write_whole
from jaxtrain.sweep.charts import (
    ChartAxis,
    Line,
    TrialPoint,
    map_chart,
    number_axis,
    parallel_chart,
    parameter_axis,
    points_chart,
)
from jaxtrain.sweep.load import Scalar
from jaxtrain.sweep.results import SweepResults, TrialRow, best_first, labels_of
from jaxtrain.sweep.statistics import MeanInterval, interval, paired
from jaxtrain.sweep.transfer import title_of

BEST = 10  # one trial in so many is drawn as one of the best
MOST_ROWS = 400  # of the table of trials
OWN_STYLE = Path(__file__).with_name("report.css")


def write_sweep_report(found: SweepResults) -> Path:
    """Write `report.html` into the sweep's folder; returns its path."""
    c, name = found.config, escape(found.config.name)
    best = best_first(c, found.trials)
    parts = [
        _header(found),
        _tiles(found, best),
        _front(found, best) if len(c.objectives) > 1 else "",
        f'<div class="charts">{_progress(found, best)}{_importance(found)}</div>',
        _parallel(found, best),
        _slices(found, best),
        _interaction(found, best),
        _confirmed(found),
        _transferred(found),
        _paired(found, best),
        _table(found, best),
    ]
    styles = STYLE.read_text() + OWN_STYLE.read_text()
    head = f'<meta charset="utf-8"><title>{name}</title><style>{styles}</style>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    page = "\n".join([f'<!doctype html><html lang="en"><head>{head}</head><body>', *parts])
    path = c.folder / "report.html"
    write_whole(path, f"{page}</body></html>\n".encode(errors="replace"))
    return path


def _header(found: SweepResults) -> str:
    left = sum(row.state in ("waiting", "running") for row in found.trials)
    status = f"{left} trials left" if left else "finished"
    css = "" if left else " finished"
    name = escape(found.config.name)
    return f'<header><h1>{name}</h1><p class="status{css}">sweep, {status}</p></header>'


def _tiles(found: SweepResults, best: Sequence[TrialRow]) -> str:
    c = found.config
    count = lambda state: sum(row.state == state for row in found.trials)
    note = ", ".join(f"{count(s)} {s}" for s in ("finished", "pruned", "failed") if count(s))
    tiles = [("trials", str(len(found.trials)), note), ("seeds of a trial", str(c.seeds), "")]
    tiles.append(("sampler", c.sampler.name, f"pruner {c.pruner.name}"))
    if len(c.objectives) > 1:
        tiles.append(("Pareto front", f"{len(found.front)} trials", ""))
    elif best:
        label = f"best {c.goal.metric} in the sweep"
        tiles.append((label, f"{best[0].scores[0]:.5g}", f"trial {best[0].number}"))
    if found.confirmed and found.confirmed[0].number is not None:
        first = found.confirmed[0]
        note = f"trial {first.number}, {first.fresh.count} seeds"
        tiles.append(("on fresh seeds", str(first.fresh), note))
    shown = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
        for label, value, note in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def _note(found: SweepResults, row: TrialRow) -> str:
    """Tooltip of a trial."""
    goals = zip(found.config.objectives, row.scores)
    scores = [f"{goal.metric} {score:.5g}" for goal, score in goals]
    labels = labels_of(found.config)
    values = [f"{labels[key]} {_text(value)}" for key, value in row.values.items()]
    return "; ".join([f"trial {row.number}", *scores, *values])


def _text(value: Scalar) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _score_axis(found: SweepResults, best: Sequence[TrialRow], which: int = 0) -> ChartAxis:
    """Axis of an objective, maybe without the worst tenth: diverging trials would hide the rest."""
    scores = sorted(row.scores[which] for row in best)
    if len(scores) > 20:
        cut = len(scores) // 10
        scores = scores[cut:] if found.config.objectives[which].maximize else scores[:-cut]
    return number_axis(found.config.objectives[which].metric, scores)


def _css(found: SweepResults, row: TrialRow, best: Sequence[TrialRow]) -> str:
    if len(found.config.objectives) > 1:
        return "best" if row.number in found.front else ""
    return "best" if row in best[: max(1, len(best) // BEST)] else ""


def _progress(found: SweepResults, best: Sequence[TrialRow]) -> str:
    """Scores by trial, and the best so far."""
    if not best or len(found.config.objectives) > 1:
        return ""
    better = max if found.config.goal.maximize else min
    line: list[tuple[int, float]] = []
    for row in sorted(best, key=lambda row: row.number):
        line.append((row.number, better([row.scores[0], *(y for _, y in line[-1:])])))
    points = [
        TrialPoint(row.number, row.scores[0], _css(found, row, best), _note(found, row))
        for row in best
    ]
    x = number_axis("trial", [0, max(1, len(found.trials) - 1)])
    y = _score_axis(found, best)
    title = f"{y.label} by trial, and the best so far"
    return points_chart(title, x, y, points, line)


def _front(found: SweepResults, best: Sequence[TrialRow]) -> str:
    """A chart of each pair of objectives, with the Pareto front marked."""
    charts = []
    goals = found.config.objectives
    for i, first in enumerate(goals):
        for j, second in enumerate(goals[i + 1 :], i + 1):
            x, y = _score_axis(found, best, i), _score_axis(found, best, j)
            points = [
                TrialPoint(row.scores[i], row.scores[j], "front" * (row.number in found.front),
                      _note(found, row))
                for row in best
            ]  # fmt: skip
            title = f"{second.metric} over {first.metric}; the Pareto front in orange"
            charts.append(points_chart(title, x, y, points))
    return f'<h2>Pareto front</h2><div class="charts">{"".join(charts)}</div>' if best else ""


def _importance(found: SweepResults) -> str:
    if not found.importance:
        return ""
    labels = labels_of(found.config)
    shares = {labels[key]: round(100 * share, 1) for key, share in found.importance.items()}
    return bars("Importance for being among the best tenth (PED-ANOVA, % of all)", shares)


def _parallel(found: SweepResults, best: Sequence[TrialRow]) -> str:
    """Parallel coordinates of the finished trials."""
    if not best:
        return ""
    c = found.config
    ends = [_score_axis(found, best, i) for i in range(len(c.objectives))]
    axes = [*_axes(found).values(), *ends]
    lines = [
        Line([*(row.values[key] for key in c.parameters), *row.scores], _css(found, row, best),
             _note(found, row))
        for row in best
        if all(-0.05 <= axis.to_unit(x) <= 1.05 for axis, x in zip(ends, row.scores))
    ]  # fmt: skip
    return parallel_chart("Parallel coordinates; the best trials in orange", axes, lines)


def _axes(found: SweepResults) -> dict[str, ChartAxis]:
    """Axis of each parameter."""
    labels = labels_of(found.config)
    return {k: parameter_axis(p, labels[k]) for k, p in found.config.parameters.items()}


def _ranked(found: SweepResults) -> list[str]:
    """Parameters, the most important first."""
    order = found.importance or dict.fromkeys(found.config.parameters, 0.0)
    return sorted(order, key=lambda key: -order[key])


def _slices(found: SweepResults, best: Sequence[TrialRow]) -> str:
    """Charts of the first objective over each parameter."""
    if not best:
        return ""
    axes, charts, y = _axes(found), [], _score_axis(found, best)
    for key in _ranked(found):
        points = [
            TrialPoint(row.values[key], row.scores[0], _css(found, row, best), _note(found, row))
            for row in best
        ]
        charts.append(points_chart(f"{y.label} over {axes[key].label}", axes[key], y, points))
    return f'<h2>Slices</h2><div class="charts">{"".join(charts)}</div>'


def _interaction(found: SweepResults, best: Sequence[TrialRow]) -> str:
    """Chart of the two most important parameters together."""
    c, ranked = found.config, _ranked(found)
    if len(ranked) < 2:
        return ""
    first, second = ranked[:2]
    x, y = (_axes(found)[key] for key in (first, second))
    points = [
        TrialPoint(row.values[first], row.values[second], _css(found, row, best), _note(found, row))
        for row in best
    ]
    scores = [row.scores[0] for row in best]
    title = f"{y.label} (upwards) and {x.label}: darker is a better {c.goal.metric}"
    shown = map_chart(title, x, y, points, scores, c.goal.maximize)
    return f'<h2>Interaction</h2><div class="charts">{shown}</div>' if shown else ""


def _confirmed(found: SweepResults) -> str:
    """Winner's curse: the chosen trials on seeds that the search has not used."""
    if not found.confirmed:
        return ""
    metric = found.config.goal.metric
    text = lambda value: "" if value is None else _text(value)
    rows = [
        (
            "baseline" if one.number is None else f"trial {one.number}",
            text(one.searched), str(one.fresh), text(one.optimism),
            "" if one.over_baseline is None else str(one.over_baseline),
        )
        for one in found.confirmed
    ]  # fmt: skip
    head = ("", f"{metric} in the sweep", "on fresh seeds", "too good by", "minus the baseline")
    why = (
        "The best of many noisy scores is better than it deserves: the winner's curse. So the best "
        "trials were run again on seeds that took no part in the choice. Intervals are 95% "
        "(Student's t over the fresh seeds); differences to the baseline are paired by seed. "
        "<em>Too good by</em> compares different seeds, and also holds what these differ by."
    )
    return f"<h2>Fresh seeds (winner's curse)</h2><p>{why}</p>{html_table(rows, head)}"


def _transferred(found: SweepResults) -> str:
    """Gains over the baseline at the sweep's size and at the other one."""
    if found.transferred is None:
        return ""
    assert found.config.transfer
    rank, metric = found.transferred.rank_correlation, found.config.goal.metric
    rows = [
        (title_of(one.of, one.only), one.rank, str(one.own or ""), str(one.other or ""))
        for one in found.transferred.rows
    ]
    other = escape(" ".join(found.config.transfer.overrides))
    correlation = (
        "" if rank is None else f" Spearman's rank correlation of whole trials is {rank:.2f}."
    )
    why = (
        f"{escape(metric)} minus that of the configuration without the sweep's values, on fresh "
        f"seeds, at the sweep's size and with <code>{other}</code>. Intervals are 95%, paired by "
        f"seed.{correlation}"
    )
    head = ("", "rank in the sweep", "at the sweep's size", "at the other size")
    return f"<h2>What carries over to another size</h2><p>{why}</p>{html_table(rows, head)}"


def _paired(found: SweepResults, best: Sequence[TrialRow]) -> str:
    """Scores of the best trials by seed, and the difference of each trial to the first."""
    if found.config.seeds < 2 or not best:
        return ""
    metric = found.config.goal.metric
    first, rows = best[0].by_seed(metric), []
    for row in best[:BEST]:
        scores = row.by_seed(metric)
        apart: MeanInterval | str = paired(scores, first) if row is not best[0] else ""
        each = [f"{scores[seed]:.5g}" for seed in sorted(scores)]
        rows.append((f"trial {row.number}", *each, interval([*scores.values()]), apart))
    seeds = [f"seed {seed}" for seed in sorted(first)]
    head = ("", *seeds, f"mean {metric}", f"minus trial {best[0].number} (paired)")
    return f"<h2>Seeds</h2><p>Intervals are 95%.</p>{html_table(rows, head)}"


def _table(found: SweepResults, best: Sequence[TrialRow]) -> str:
    """All trials, the best first."""
    c = found.config
    rest = [row for row in found.trials if not row.scores]
    rows = [
        (
            row.number, row.state, *([f"{x:.5g}" for x in row.scores] or [""] * len(c.objectives)),
            *(_text(row.values[key]) if key in row.values else "" for key in c.parameters),
            row.note,
        )
        for row in [*best, *rest][:MOST_ROWS]
    ]  # fmt: skip
    labels = labels_of(c).values()
    head = ("trial", "state", *(goal.metric for goal in c.objectives), *labels, "")
    more = f"<p>{len(found.trials) - MOST_ROWS} more are in results.json.</p>"
    shown = html_table(rows, head) + more * (len(found.trials) > MOST_ROWS)
    return f"<h2>Trials</h2>{shown}"
