"""All fits of a study's runs, the content of fit.json."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxtrain.scaling.batch import CriticalBatch, batch_law, critical_batches
from jaxtrain.scaling.laws import (
    Bootstrap,
    Interval,
    Parabola,
    ParametricLaw,
    PowerLaw,
    Rows,
    fit_parabola,
    fit_parametric,
    fit_power_law,
    refitted,
    resamples,
)
from jaxtrain.scaling.points import Point
from jaxtrain.settings import UserError


class Law(NamedTuple):
    """y = coefficient * x^exponent, both with intervals."""

    coefficient: Interval
    exponent: Interval

    @property
    def law(self) -> PowerLaw:
        return PowerLaw(self.coefficient.value, self.exponent.value)


class Minimum(NamedTuple):
    """The lowest loss along one axis, among runs that share the value `at`."""

    at: float  # FLOPs, parameters or tokens that the runs share
    best: Interval  # x of the lowest loss
    tokens: float  # training tokens at the minimum
    curve: Parabola
    left_out: int  # resamples that allow no parabola


class Minima(NamedTuple):
    """Minima, and the power laws of the best x and of the tokens over the shared value."""

    minima: list[Minimum]
    best: Law | None  # from minima inside the range of their runs; None for fewer than two
    tokens: Law | None
    ratio: Interval | None  # geometric mean of tokens / x over the minima


class Parametric(NamedTuple):
    """The parametric law, with an interval for each unknown."""

    E: Interval
    A: Interval
    B: Interval
    alpha: Interval
    beta: Interval
    flops_per: float  # FLOPs per parameter and token, median of the runs
    residual: float  # RMS of the residuals of log losses
    optimal: list["Optimal"]

    @property
    def law(self) -> ParametricLaw:
        return ParametricLaw(*(one.value for one in self[:5]))


class Optimal(NamedTuple):
    """The compute-optimal model of a budget according to the parametric law."""

    flops: float
    parameters: Interval
    tokens_per_parameter: Interval


class Prediction(NamedTuple):
    """Predicted loss of a run that is not trained yet."""

    run: str
    parameters: float
    tokens: int
    flops: float
    loss: Interval
    level: float
    runs: list[str]  # runs that it is fitted to


def arrays(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parameters, tokens, losses."""
    columns = zip(*((p.parameters, float(p.tokens), p.loss) for p in points))
    n, d, loss = (np.array(column, float) for column in columns)
    return n, d, loss


# ---- minima along an axis ----------------------------------------------------------------------


def fit_minima(
    points: Sequence[Point],
    shared: Callable[[Point], float],
    axis: Callable[[Point], float],
    bootstrap: Bootstrap,
) -> Minima | None:
    """Fit a parabola in log `axis` per value of `shared`, and power laws through their minima.

    A value needs runs with at least three different x; returns None if no value has them.
    Resamples draw within the runs of each value.
    """
    groups: dict[float, list[Point]] = {}
    for one in points:
        groups.setdefault(shared(one), []).append(one)
    groups = {k: v for k, v in sorted(groups.items()) if len({axis(p) for p in v}) >= 3}
    if not groups:
        return None
    kept = [p for group in groups.values() for p in group]
    labels = [i for i, group in enumerate(groups.values()) for _ in group]
    whole = [_minimum(key, group, axis) for key, group in groups.items()]
    drawn = [
        [_minimum(key, part, axis) for key, part in zip(groups, _parts(kept, labels, rows))]
        for rows in resamples(labels, bootstrap)
    ]
    minima = []
    for i, one in enumerate(whole):
        found = [d for sample in drawn if (d := sample[i]) is not None]
        assert one is not None
        best = bootstrap.interval(one.best.value, [d.best.value for d in found])
        minima.append(one._replace(best=best, left_out=len(drawn) - len(found)))
    laws = [_laws([one for one in sample if one]) for sample in [whole, *drawn]]
    return Minima(minima, *_law_intervals(laws, bootstrap))


def _parts(points: Sequence[Point], labels: Sequence[int], rows: Rows) -> list[list[Point]]:
    parts: list[list[Point]] = [[] for _ in range(max(labels) + 1)]
    for row in rows.tolist():
        parts[labels[row]].append(points[row])
    return parts


def _minimum(at: float, points: Sequence[Point], axis: Callable[[Point], float]) -> Minimum | None:
    """The minimum of one group of runs; None for fewer than three different x."""
    x = np.array([axis(p) for p in points], float)
    if len(np.unique(x)) < 3:
        return None
    curve = fit_parabola(x, np.array([p.loss for p in points]))
    tokens = np.array([float(p.tokens) for p in points])
    slope, level = np.polyfit(np.log(x), np.log(tokens), 1)  # tokens vary with FLOPs per token
    there = math.exp(float(level + slope * math.log(curve.best)))
    return Minimum(at, Interval(curve.best, curve.best, curve.best), there, curve, 0)


def _laws(minima: Sequence[Minimum]) -> tuple[PowerLaw | None, PowerLaw | None, float]:
    inside = [one for one in minima if one.curve.inside]
    if not inside:
        return None, None, math.nan
    at, best, tokens = (
        np.array(column) for column in zip(*((m.at, m.best.value, m.tokens) for m in inside))
    )
    ratio = math.exp(float(np.mean(np.log(tokens / best))))
    if len(inside) < 2:
        return None, None, ratio
    return fit_power_law(at, best), fit_power_law(at, tokens), ratio


def _law_intervals(
    laws: Sequence[tuple[PowerLaw | None, PowerLaw | None, float]], bootstrap: Bootstrap
) -> tuple[Law | None, Law | None, Interval | None]:
    """Intervals of both laws and of the ratio. laws: those of the runs, then of each resample."""
    whole, drawn = laws[0], laws[1:]

    def interval(i: int) -> Law | None:
        one = whole[i]
        if not isinstance(one, PowerLaw):
            return None
        others = [sample[i] for sample in drawn if isinstance(sample[i], PowerLaw)]
        return law_interval(one, [p for p in others if isinstance(p, PowerLaw)], bootstrap)

    ratio = whole[2]
    rest = [sample[2] for sample in drawn]
    return (
        interval(0), interval(1),
        None if math.isnan(ratio) else bootstrap.interval(ratio, rest),
    )  # fmt: skip


def law_interval(one: PowerLaw, drawn: Sequence[PowerLaw], bootstrap: Bootstrap) -> Law:
    return Law(
        bootstrap.interval(one.coefficient, [p.coefficient for p in drawn]),
        bootstrap.interval(one.exponent, [p.exponent for p in drawn]),
    )


# ---- the parametric law ------------------------------------------------------------------------


class ParametricFit(NamedTuple):
    """The law fitted to all runs, and the laws fitted to their resamples."""

    law: ParametricLaw
    drawn: list[ParametricLaw]
    residuals: np.ndarray  # log(loss / loss by the law)


def bootstrap_parametric(points: Sequence[Point], bootstrap: Bootstrap) -> ParametricFit:
    """Fit the parametric law to runs and to resamples. Raises UserError for too few runs."""
    n, d, loss = arrays(points)
    law = fit_parametric(n, d, loss)
    again = lambda rows: fit_parametric(n[rows], d[rows], loss[rows], law)
    drawn = refitted(again, resamples([0] * len(points), bootstrap))
    fitted = np.array([law(*one) for one in zip(n.tolist(), d.tolist())])
    return ParametricFit(law, drawn, np.log(loss / fitted))


def parametric_of(
    fit: ParametricFit, points: Sequence[Point], budgets: Sequence[float], bootstrap: Bootstrap
) -> Parametric:
    """Intervals of the unknowns, and the compute-optimal model of each budget."""
    k = float(np.median([p.flops / (p.parameters * p.tokens) for p in points]))
    unknowns = [
        bootstrap.interval(value, [one[i] for one in fit.drawn]) for i, value in enumerate(fit.law)
    ]
    optimal = []
    for flops in budgets:
        sizes = [one.optimal_parameters(flops, k) for one in (fit.law, *fit.drawn)]
        ratios = [flops / (k * n * n) for n in sizes]
        best, ratio = (bootstrap.interval(x[0], x[1:]) for x in (sizes, ratios))
        optimal.append(Optimal(flops, best, ratio))
    rms = float(np.sqrt(np.mean(fit.residuals**2)))
    e, a, b, alpha, beta = unknowns
    return Parametric(e, a, b, alpha, beta, k, rms, optimal)


def predict(
    fit: ParametricFit,
    points: Sequence[Point],
    run: str,
    parameters: float,
    tokens: int,
    flops: float,
    bootstrap: Bootstrap,
) -> Prediction:
    """Predict the loss of a run. The interval covers the law's uncertainty (resampled runs) and a
    single run's noise (resampled residuals)."""
    random = np.random.default_rng(bootstrap.seed + 1)
    # Fitting five unknowns makes the residuals too small; correct by the degrees of freedom.
    wide = math.sqrt(len(points) / max(1, len(points) - 5))
    errors = random.choice(fit.residuals, len(fit.drawn)) * wide
    drawn = [
        one(parameters, float(tokens)) * math.exp(e) for one, e in zip(fit.drawn, errors.tolist())
    ]
    loss = bootstrap.interval(fit.law(parameters, float(tokens)), drawn)
    names = [p.name for p in points]
    return Prediction(run, parameters, tokens, flops, loss, bootstrap.level, names)


# ---- all of them -------------------------------------------------------------------------------


class Fits(NamedTuple):
    """All fits of a study. A fit that the runs do not determine is None; `missing` says why."""

    isoflop: Minima | None
    parametric: Parametric | None
    learning_rate: Minima | None
    batch: Minima | None
    critical: list[CriticalBatch]
    critical_law: PowerLaw | None
    missing: dict[str, str]


def of_kind(points: Sequence[Point], *kinds: str) -> list[Point]:
    return [p for p in points if not {*kinds}.isdisjoint(p.kinds)]


def grid_of(points: Sequence[Point]) -> list[Point]:
    """The runs that the laws of parameters and tokens are fitted to."""
    return of_kind(points, "isoflop", "tokens")


def fit_all(points: Sequence[Point], targets: int, bootstrap: Bootstrap) -> Fits:
    """Every fit that the runs determine. Raises UserError if they determine none."""
    missing: dict[str, str] = {}
    grid, iso = grid_of(points), [p for p in of_kind(points, "isoflop") if p.budget]
    isoflop = fit_minima(iso, lambda p: p.budget or 0.0, lambda p: p.parameters, bootstrap)
    if iso and isoflop is None:
        missing["isoflop"] = "no budget has runs of 3 sizes or more"
    parametric = None
    try:
        if grid:
            fit = bootstrap_parametric(grid, bootstrap)
            budgets = sorted({p.budget for p in iso if p.budget}) or [max(p.flops for p in grid)]
            parametric = parametric_of(fit, grid, budgets, bootstrap)
    except UserError as error:
        missing["parametric"] = str(error)
    rates = of_kind(points, "learning_rates")
    rate = fit_minima(rates, lambda p: p.parameters, lambda p: p.multiplier, bootstrap)
    batches = of_kind(points, "batch_sizes")
    best = best_rates(batches)
    batch = fit_minima(best, lambda p: float(p.tokens), lambda p: float(p.batch_tokens), bootstrap)
    longest = [p for p in batches if p.tokens > 0.9 * max(q.tokens for q in batches)]
    critical = critical_batches(longest, targets, bootstrap) if longest else []
    if batches and not critical:
        missing["critical_batch"] = "no loss is reached with 3 batch sizes or more"
    if not (isoflop or parametric or rate or batch or critical):
        raise UserError(
            "too few runs for any fit: " + ("; ".join(missing.values()) or "there are none")
        )
    law = batch_law(critical) if len({c.fit.least_tokens for c in critical}) > 1 else None
    return Fits(isoflop, parametric, rate, batch, critical, law, missing)


def best_rates(points: Sequence[Point]) -> list[Point]:
    """The run with the lowest loss for each batch size, number of tokens and seed. Token counts up
    to 10% apart count as equal, since they are rounded to whole steps."""
    found: dict[tuple[int, int, int], Point] = {}
    horizons: list[int] = []
    for one in sorted(points, key=lambda p: p.tokens):
        if not horizons or one.tokens > 1.1 * horizons[-1]:
            horizons.append(one.tokens)
        key = horizons[-1], one.batch_tokens, one.seed
        if key not in found or one.loss < found[key].loss:
            found[key] = one._replace(tokens=horizons[-1])
    return list(found.values())


@runtime_checkable
class Record(Protocol):
    """A named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


def plain(value: Record) -> dict[str, Any]:
    """A JSON object of a named tuple: nested tuples as objects, infinities as null."""
    return {name: _plain(one) for name, one in value._asdict().items()}


def _plain(value: object) -> object:
    if isinstance(value, Record):
        return plain(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
