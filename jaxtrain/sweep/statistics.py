"""Means with confidence intervals, paired differences, and the winner's curse of a search."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from scipy import stats

LEVEL = 0.95  # of every interval


class MeanInterval(NamedTuple):
    """A mean, and half the width of its two-sided confidence interval (Student's t)."""

    mean: float
    half: float | None  # None for one value
    count: int

    def __str__(self) -> str:
        half = "" if self.half is None else f" \u00b1 {self.half:.2g}"
        return f"{self.mean:.5g}{half}"


def interval(values: Sequence[float]) -> MeanInterval:
    """Confidence interval of the mean of independent values."""
    count = len(values)
    if count < 2:
        return MeanInterval(values[0], None, count)
    t = float(stats.t.ppf((1 + LEVEL) / 2, count - 1))
    return MeanInterval(mean(values), t * stdev(values) / math.sqrt(count), count)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> MeanInterval:
    """Interval of ours minus theirs, over common seeds: what a seed does to both cancels."""
    common = sorted(ours.keys() & theirs.keys())
    return interval([ours[seed] - theirs[seed] for seed in common])


class WinnersCurse(NamedTuple):
    """A trial that the search chose, on the seeds of the search and on fresh ones.

    The best of many noisy scores is too good on average. Fresh seeds took no part in the choice,
    and so give an unbiased score.
    """

    number: int | None  # of the trial; None: the configuration without the sweep's parameters
    searched: float | None  # mean over the seeds of the search
    fresh: MeanInterval
    optimism: float | None  # fresh - searched; for a maximized metric searched - fresh
    over_baseline: MeanInterval | None  # paired, on the fresh seeds: this minus the baseline


def winners_curse(
    searched: Mapping[int, float],
    fresh: Mapping[int | None, Mapping[int, float]],
    maximize: bool = False,
) -> list[WinnersCurse]:
    """Compare search and fresh scores of each trial with fresh ones; best first, the baseline last.

    searched: trial -> its mean score in the search. fresh: trial (None: baseline) -> seed -> score.
    """
    sign, found = -1 if maximize else 1, []
    for number, scores in fresh.items():
        again = interval(list(scores.values()))
        before = None if number is None else searched[number]
        optimism = None if before is None else sign * (again.mean - before)
        base = fresh.get(None) if number is not None else None
        over = paired(scores, base) if base else None
        found.append(WinnersCurse(number, before, again, optimism, over))
    return sorted(found, key=lambda one: (one.number is None, sign * one.fresh.mean))
