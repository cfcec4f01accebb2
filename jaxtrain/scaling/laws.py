"""Scaling laws fitted to runs: isoFLOP parabolas, the parametric loss, power laws, intervals.

Hoffmann et al. 2022 (arXiv:2203.15556), with the corrections of Besiroglu et al. 2024
(arXiv:2404.10102): the Huber losses are summed, not averaged, the optimizer converges,
and intervals come from a bootstrap over runs.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize

from jaxtrain.settings import UserError

DELTA = 1e-3  # delta of the Huber loss on residuals of log losses
LEAST_RUNS = 6  # fewest runs for the five unknowns of the parametric law
STARTS = 12  # L-BFGS starts: the points of GRID with the lowest residuals
BOUNDS = ((-60.0, 60.0), (-60.0, 60.0), (-12.0, 6.0), (0.0, 4.0), (0.0, 4.0))
# Hoffmann et al., appendix D.3: log A, log B, log E, alpha, beta.
GRID = tuple(
    product(
        (0.0, 5.0, 10.0, 15.0, 20.0, 25.0), (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
        (-1.0, -0.5, 0.0, 0.5, 1.0), (0.0, 0.5, 1.0, 1.5, 2.0), (0.0, 0.5, 1.0, 1.5, 2.0),
    )
)  # fmt: skip

Vector = Float[np.ndarray, " n"]
Rows = Int[np.ndarray, " n"]


class Interval(NamedTuple):
    """An estimate with its interval."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value lies inside the interval."""
        return self.low <= value <= self.high


class PowerLaw(NamedTuple):
    """y = coefficient * x^exponent."""

    coefficient: float
    exponent: float

    def __call__(self, x: float) -> float:
        return self.coefficient * x**self.exponent


class Parabola(NamedTuple):
    """loss = lowest + curvature * (log x - log best)^2, fitted by least squares."""

    best: float
    lowest: float
    curvature: float  # if <= 0 there is no minimum
    inside: bool  # whether the minimum lies between the smallest and the largest x

    def __call__(self, x: float) -> float:
        return self.lowest + self.curvature * (math.log(x) - math.log(self.best)) ** 2


class ParametricLaw(NamedTuple):
    """L(N, D) = E + A / N^alpha + B / D^beta. N: parameters. D: training tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __call__(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimal_parameters(self, flops: float, flops_per: float) -> float:
        """N of the lowest loss at `flops`, if a run costs flops_per x N x D FLOPs (about 6 N D)."""
        a, b = max(self.alpha, 1e-9), max(self.beta, 1e-9)
        log_g = (math.log(a * max(self.A, 1e-30)) - math.log(b * max(self.B, 1e-30))) / (a + b)
        return bounded_exp(log_g + b / (a + b) * math.log(flops / flops_per))


def bounded_exp(x: float) -> float:
    """exp(x), clipped to 1e-65 .. 1e65, since a resample may determine a law badly."""
    return math.exp(min(max(x, -150.0), 150.0))


# ---- fits --------------------------------------------------------------------------------------


def fit_power_law(x: Vector, y: Vector) -> PowerLaw:
    """Least squares fit in logarithms. Raises UserError for fewer than two different x."""
    if len(np.unique(x)) < 2:
        raise UserError(
            f"a power law needs 2 different values or more; there is {len(np.unique(x))}"
        )
    exponent, log_coefficient = np.polyfit(np.log(x), np.log(y), 1).tolist()
    return PowerLaw(bounded_exp(log_coefficient), exponent)


def fit_parabola(x: Vector, loss: Vector) -> Parabola:
    """Least squares fit in log x. Raises UserError for fewer than three different x."""
    if len(np.unique(x)) < 3:
        raise UserError(
            f"a parabola needs 3 different values or more; there are {len(np.unique(x))}"
        )
    log_x = np.log(x)
    middle = float(log_x.mean())
    curvature, slope, level = np.polyfit(log_x - middle, loss, 2).tolist()
    if curvature <= 0:
        return Parabola(float(x[np.argmin(loss)]), float(loss.min()), curvature, False)
    vertex = middle - slope / (2 * curvature)
    inside = bool(log_x.min() <= vertex <= log_x.max())
    lowest = level - slope**2 / (4 * curvature)
    return Parabola(math.exp(min(max(vertex, -80.0), 80.0)), lowest, curvature, inside)


class _Data(NamedTuple):
    """Logarithms of N, D and L; log N and log D are centred, so that L-BFGS converges."""

    n: np.ndarray
    d: np.ndarray
    loss: np.ndarray
    n_mean: float
    d_mean: float


def _log_losses(p: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Logarithms of the law's three terms, [..., n, 3], for unknowns [..., 5] and runs [n]."""
    a, b, e, alpha, beta = np.moveaxis(p[..., None], -2, 0)
    terms = (a - alpha * n, b - beta * d, np.broadcast_to(e, (*p.shape[:-1], len(n))))
    return np.stack(terms, -1)


def _objective(p: np.ndarray, data: _Data) -> tuple[float, np.ndarray]:
    """Sum of Huber losses and its gradient, both divided by DELTA."""
    terms = _log_losses(p, data.n, data.d)
    fitted = np.logaddexp.reduce(terms, -1)
    shares = np.exp(terms - np.expand_dims(fitted, -1))
    residual = fitted - data.loss
    small = np.abs(residual) <= DELTA
    huber = np.where(small, residual**2 / 2, DELTA * (np.abs(residual) - DELTA / 2))
    slope: np.ndarray = np.clip(residual, -DELTA, DELTA)
    by_term = shares * slope[:, None]
    gradient = [*by_term.sum(0), -(by_term[:, 0] @ data.n), -(by_term[:, 1] @ data.d)]
    return float(huber.sum()) / DELTA, np.asarray(gradient) / DELTA


def fit_parametric(
    parameters: Vector, tokens: Vector, loss: Vector, start: ParametricLaw | None = None
) -> ParametricLaw:
    """Minimize the Huber loss (delta 1e-3) of log residuals by L-BFGS from a grid of starts.

    start: the only start, as for a resample. Raises UserError for fewer than LEAST_RUNS runs, or
    fewer than three different sizes or token counts.
    """
    check_enough(parameters, tokens)
    n, d = np.log(parameters), np.log(tokens)
    data = _Data(n - n.mean(), d - d.mean(), np.log(loss), float(n.mean()), float(d.mean()))
    if start is not None:
        logs = [math.log(max(x, 1e-25)) for x in (start.A, start.B, start.E)]
        raw = np.asarray([[*logs, start.alpha, start.beta]])
    else:
        raw = np.asarray(GRID)
    centred = raw.copy()
    centred[:, 0] -= raw[:, 3] * data.n_mean
    centred[:, 1] -= raw[:, 4] * data.d_mean
    centred = np.clip(centred, *np.asarray(BOUNDS).T)
    residuals = np.logaddexp.reduce(_log_losses(centred, data.n, data.d), -1) - data.loss
    order = np.argsort(np.abs(residuals).sum(-1), kind="stable")[:STARTS]
    options = {"maxiter": 3000, "ftol": 1e-13, "gtol": 1e-9}
    found = [
        minimize(_objective, one, (data,), "L-BFGS-B", jac=True, bounds=BOUNDS, options=options)
        for one in centred[order]
    ]
    best = min(found, key=lambda one: one.fun).x.tolist()
    a, b = best[0] + best[3] * data.n_mean, best[1] + best[4] * data.d_mean
    return ParametricLaw(math.exp(best[2]), math.exp(a), math.exp(b), best[3], best[4])


def check_enough(parameters: Vector, tokens: Vector) -> None:
    """Raise UserError for runs that do not determine the parametric law."""
    sizes, horizons = len(np.unique(parameters)), len(np.unique(tokens))
    if len(parameters) < LEAST_RUNS or sizes < 3 or horizons < 3:
        raise UserError(
            f"the parametric law needs {LEAST_RUNS} runs or more, of 3 sizes and 3 numbers of "
            f"tokens; there are {len(parameters)} runs of {sizes} sizes and {horizons} numbers of "
            "tokens"
        )


# ---- intervals ---------------------------------------------------------------------------------


class Bootstrap(NamedTuple):
    """Settings of bootstrap intervals: percentiles over resamples of the runs."""

    samples: int = 500
    level: float = 0.9
    seed: int = 0

    def interval(self, value: float, drawn: Sequence[float] | Vector) -> Interval:
        """The percentile interval of the resamples' finite values, extended to contain the estimate
        itself."""
        finite = np.asarray(drawn, float)
        finite = finite[np.isfinite(finite)]
        if not len(finite):
            return Interval(value, -math.inf, math.inf)
        tail = (1 - self.level) / 2
        low, high = np.quantile(finite, [tail, 1 - tail]).tolist()
        return Interval(value, min(low, value), max(high, value))


def resamples(groups: Sequence[int] | Rows, bootstrap: Bootstrap) -> list[Rows]:
    """Indices drawn with replacement; each group keeps its size.

    groups: the group of each index; all equal for a plain bootstrap. The same seed draws the same
    indices.
    """
    random, labels = np.random.default_rng(bootstrap.seed), np.asarray(groups)
    parts = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return [
        np.concatenate([random.choice(part, len(part)) for part in parts])
        for _ in range(bootstrap.samples)
    ]


def refitted[Fit](fit: Callable[[Rows], Fit], drawn: Sequence[Rows]) -> list[Fit]:
    """The fits of the resamples, without those that have too few different runs."""
    found = []
    for rows in drawn:
        try:
            found.append(fit(rows))
        except UserError:
            continue
    return found
