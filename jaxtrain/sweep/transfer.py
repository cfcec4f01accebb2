"""Transfer of a search's results to another size: trials and single values, on equal fresh seeds.

A sweep of small models is useful only as far as its ranking holds for large ones. So some trials,
and each value of the best one by itself, are trained at both sizes, together with the configuration
without the sweep's values.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from jaxtrain.sweep.config import SweepConfig, Transfer
from jaxtrain.sweep.load import Values
from jaxtrain.sweep.statistics import MeanInterval, paired
from jaxtrain.sweep.trials import Outcome, run_one

SIZES = ("own", "other")


class TransferRun(NamedTuple):
    """One training run. Its fields are the attributes by which the queue identifies it."""

    of: int | None  # trial; None: the configuration without the sweep's values
    only: str | None  # the only field with the trial's value; None: all fields have it
    size: str  # of SIZES
    seed: int


class Transferred(NamedTuple):
    """A trial, or one value of it, at both sizes: score minus the baseline's, paired by seed."""

    of: int
    only: str | None
    rank: int  # of the trial in the search, from 1
    own: MeanInterval | None  # None if no run has ended
    other: MeanInterval | None


class TransferResults(NamedTuple):
    """rank_correlation: Spearman's, of whole trials' gains at both sizes; None for fewer than 4."""

    rows: list[Transferred]
    rank_correlation: float | None


def chosen_ranks(t: Transfer, count: int) -> list[int]:
    """Indices into the ranking, from 0: the best, and others evenly down to the last."""
    best = range(min(t.best, count))
    others = np.linspace(t.best, count - 1, t.spread + 1)[1:] if count > t.best else []
    return sorted({*best, *(round(x) for x in others)})


def transfer_runs(c: SweepConfig, ranked: Sequence[int]) -> list[TransferRun]:
    """All runs to train. ranked: numbers of the finished trials, the best first."""
    assert c.transfer
    whole: list[tuple[int | None, str | None]] = [(None, None)]
    whole += [(ranked[i], None) for i in chosen_ranks(c.transfer, len(ranked))]
    if c.transfer.single and ranked and len(c.parameters) > 1:
        whole += [(ranked[0], key) for key in c.parameters]
    seeds = range(c.seeds + 1, c.seeds + 1 + c.transfer.seeds)
    return [TransferRun(of, only, size, s) for s in seeds for size in SIZES for of, only in whole]


def transfer_run_of(notes: Mapping[str, Any]) -> TransferRun:
    """Run with the given attributes of the queue."""
    return TransferRun(**{field: notes[field] for field in TransferRun._fields})


def run_title(run: TransferRun) -> str:
    """Title of a run, for the screen."""
    size = "the sweep's own size" if run.size == "own" else "the other size"
    return f"{title_of(run.of, run.only)} at {size}, seed {run.seed}"


def title_of(of: int | None, only: str | None) -> str:
    """`baseline`, `trial 7`, `trial 7, optim.matrix_lr alone`."""
    if of is None:
        return "baseline"
    return f"trial {of}" if only is None else f"trial {of}, {only} alone"


def run_again(c: SweepConfig, values: Mapping[int, Values], run: TransferRun) -> Outcome:
    """Train or resume one run. values: of each trial."""
    assert c.transfer
    own = {} if run.of is None else values[run.of]
    if run.only is not None:
        own = {run.only: own[run.only]}
    what = "baseline" if run.of is None else f"{run.of:04d}"
    name = "-".join(["transfer", run.size, what, *([run.only] if run.only else [])])
    larger = c.transfer.overrides if run.size == "other" else ()
    found = run_one(c, own, f"{name}-seed{run.seed}", run.seed, larger=larger)
    return {run.seed: found} if isinstance(found, dict) else found


def transferred(
    c: SweepConfig, ranked: Sequence[int], scores: Mapping[TransferRun, float]
) -> TransferResults:
    """Results of the runs so far. ranked: as in `transfer_runs`. scores: of the runs that ended."""
    by_seed: dict[tuple[int | None, str | None, str], dict[int, float]] = {}
    for run, score in scores.items():
        by_seed.setdefault((run.of, run.only, run.size), {})[run.seed] = score

    def gain(of: int, only: str | None, size: str) -> MeanInterval | None:
        ours, base = by_seed.get((of, only, size), {}), by_seed.get((None, None, size), {})
        return paired(ours, base) if ours.keys() & base.keys() else None

    tried = dict.fromkeys((r.of, r.only) for r in transfer_runs(c, ranked) if r.of is not None)
    rows = [
        Transferred(of, only, ranked.index(of) + 1, *(gain(of, only, size) for size in SIZES))
        for of, only in tried
    ]
    pairs = [(r.own.mean, r.other.mean) for r in rows if r.only is None and r.own and r.other]
    ranks = [stats.rankdata(gains) for gains in zip(*pairs)]
    rank = float(np.corrcoef(ranks)[0, 1]) if len(pairs) >= 4 else None
    return TransferResults(rows, rank)
