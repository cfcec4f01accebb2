"""The critical batch size, from the steps and examples that runs need to equal losses.

McCandlish et al. 2018 (arXiv:1812.06162): (S / S_min - 1) (E / E_min - 1) = 1, with S steps and
E = S x batch examples (here tokens); the critical batch size is E_min / S_min.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from jaxtrain.scaling.laws import (
    Bootstrap,
    Interval,
    PowerLaw,
    Vector,
    fit_power_law,
    refitted,
    resamples,
)
from jaxtrain.scaling.points import Point
from jaxtrain.settings import UserError


class TradeOff(NamedTuple):
    """S_min and E_min of one target loss: the fewest steps and the fewest tokens to reach it."""

    least_steps: float
    least_tokens: float

    @property
    def critical(self) -> float:
        """The critical batch size in tokens, at which a run takes twice the fewest steps and twice
        the fewest tokens."""
        return self.least_tokens / self.least_steps

    def steps(self, batch_tokens: float) -> float:
        """Steps to the loss with `batch_tokens` tokens per step."""
        return self.least_steps * (1 + self.critical / batch_tokens)


class CriticalBatch(NamedTuple):
    """Critical batch size of one target loss, and the points that it is fitted to."""

    loss: float
    batch_tokens: list[float]
    steps: list[float]
    fit: TradeOff
    critical: Interval
    left_out: int  # resamples that allow no fit


def fit_trade_off(batch_tokens: Vector, steps: Vector) -> TradeOff:
    """Least squares fit of log steps. Raises UserError for fewer than three batch sizes."""
    if len(np.unique(batch_tokens)) < 3:
        raise UserError(
            "the critical batch size needs 3 different batch sizes or more that reach the loss; "
            f"there are {len(np.unique(batch_tokens))}"
        )
    log_b, log_s = np.log(batch_tokens), np.log(steps)

    def squares(p: np.ndarray) -> tuple[float, np.ndarray]:
        residual = p[0] + np.logaddexp(0.0, p[1] - log_b) - log_s
        by_critical = residual / (1 + np.exp(log_b - p[1]))
        return float(residual @ residual), 2 * np.array([residual.sum(), by_critical.sum()])

    low, high = log_b.min() - 7.0, log_b.max() + 7.0
    starts = np.linspace(log_b.min() - 1, log_b.max() + 1, 5)
    bounds = [(None, None), (low, high)]
    found = [
        minimize(
            squares, np.array([log_s.min() - 0.5, b]), method="L-BFGS-B", jac=True, bounds=bounds
        )
        for b in starts
    ]
    s, b = min(found, key=lambda one: one.fun).x.tolist()
    return TradeOff(math.exp(s), math.exp(s + b))


def steps_to(point: Point, loss: float) -> float | None:
    """Steps at which a run's validation curve first reaches a loss, interpolated in log steps.

    None if it never does, or if its first validation is below the loss already.
    """
    below = next((i for i, one in enumerate(point.losses) if one <= loss), None)
    if not below:
        return None
    high, low = point.losses[below - 1], point.losses[below]
    share = (high - loss) / (high - low)
    first, last = (math.log(point.steps[i]) for i in (below - 1, below))
    return math.exp(first + share * (last - first))


def fewest_steps(points: Sequence[Point], loss: float) -> dict[tuple[int, int], float]:
    """(batch tokens, seed) -> steps to the loss with the best learning rate."""
    found: dict[tuple[int, int], float] = {}
    for one in points:
        steps = steps_to(one, loss)
        if steps is not None:
            key = one.batch_tokens, one.seed
            found[key] = min(steps, found.get(key, math.inf))
    return found


def targets_of(points: Sequence[Point], count: int) -> list[float]:
    """`count` target losses, from early in training to the lowest that every batch size reaches."""
    ends: dict[int, float] = {}
    for one in points:
        ends[one.batch_tokens] = min(min(one.losses), ends.get(one.batch_tokens, math.inf))
    last = max(ends.values())
    begun = max(one.losses[0] for one in points)
    middle = last + 0.35 * (begun - last)
    return np.linspace(middle, last, count).tolist()


def critical_batches(
    points: Sequence[Point], targets: int, bootstrap: Bootstrap
) -> list[CriticalBatch]:
    """Critical batch sizes at each target loss that at least three batch sizes reach."""
    found = []
    for loss in targets_of(points, targets):
        reached = fewest_steps(points, loss)
        batch = np.array([key[0] for key in reached], float)
        steps = np.array(list(reached.values()))
        if len(np.unique(batch)) < 3:
            continue
        fit = fit_trade_off(batch, steps)
        drawn = resamples([0] * len(batch), bootstrap)
        fits = refitted(lambda rows, b=batch, s=steps: fit_trade_off(b[rows], s[rows]), drawn)
        interval = bootstrap.interval(fit.critical, [one.critical for one in fits])
        found.append(
            CriticalBatch(
                loss, batch.tolist(), steps.tolist(), fit, interval, len(drawn) - len(fits)
            )
        )
    return found


def batch_law(found: Sequence[CriticalBatch]) -> PowerLaw:
    """Power law of the critical batch size (in tokens) over the fewest tokens to the loss."""
    tokens = np.array([one.fit.least_tokens for one in found])
    return fit_power_law(tokens, np.array([one.fit.critical for one in found]))
