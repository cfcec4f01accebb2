"""Results of a sweep so far: trials, the best ones, fresh seeds; and the same as JSON."""

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial, TrialState

from jaxtrain.sweep.config import SweepConfig
from jaxtrain.sweep.load import Values
from jaxtrain.sweep.statistics import WinnersCurse, winners_curse
from jaxtrain.sweep.study import TrialQueue, importance_of
from jaxtrain.sweep.transfer import (
    SIZES,
    TransferResults,
    TransferRun,
    transfer_run_of,
    transferred,
)
from jaxtrain.sweep.trials import Figures

STATES = {
    TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed",
    TrialState.RUNNING: "running", TrialState.WAITING: "waiting",
}  # fmt: skip


class TrialRow(NamedTuple):
    """A trial and its outcome."""

    number: int
    state: str  # finished, pruned, failed, running or waiting
    values: Values
    runs: dict[int, Figures]  # by seed
    scores: tuple[float, ...]  # of the objectives, means over the seeds; () before the end
    note: str  # why it failed, or where it was pruned

    def by_seed(self, metric: str) -> dict[int, float]:
        """A metric of each run, by seed."""
        return {seed: figures[metric] for seed, figures in self.runs.items() if metric in figures}


class SweepResults(NamedTuple):
    """All results of a sweep."""

    config: SweepConfig
    trials: list[TrialRow]
    front: list[int]  # numbers of the best trial, or of the Pareto front
    importance: dict[str, float]  # parameter -> share of 1
    confirmed: list[WinnersCurse]
    transferred: TransferResults | None


def row_of(frozen: FrozenTrial) -> TrialRow:
    """Row of a trial of the search."""
    attributes = frozen.user_attrs
    runs = {int(seed): figures for seed, figures in attributes.get("runs", {}).items()}
    state = "failed" if "failed" in attributes else STATES[frozen.state]
    scores = tuple(frozen.values) if state == "finished" and frozen.values else ()
    note = attributes.get("failed", "")
    if state == "pruned":
        note = f"pruned at step {attributes['pruned']:,}"
    return TrialRow(frozen.number, state, frozen.params, runs, scores, note)


def best_first(c: SweepConfig, rows: Iterable[TrialRow]) -> list[TrialRow]:
    """Finished trials, sorted from the best to the worst by the first objective."""
    sign = -1 if c.goal.maximize else 1
    return sorted((r for r in rows if r.scores), key=lambda r: (sign * r.scores[0], r.number))


def labels_of(c: SweepConfig) -> dict[str, str]:
    """Parameter -> its name in tables and charts, without the section if that is unique."""
    last = [key.rpartition(".")[2] for key in c.parameters]
    return {k: name if last.count(name) == 1 else k for k, name in zip(c.parameters, last)}


def results_of(
    search: TrialQueue, confirm: TrialQueue | None, transfer: TrialQueue | None
) -> SweepResults:
    """Results that the database has by now."""
    c = search.config
    rows = [row_of(frozen) for frozen in search.trials()]
    best = best_first(c, rows)
    front = [row.number for row in best[:1]]
    if len(c.objectives) > 1:
        finished = {row.number for row in best}
        front = [t.number for t in search.study.best_trials if t.number in finished]
    again: list[WinnersCurse] = []
    if confirm is not None:
        scores = {row.number: row.scores[0] for row in best}
        again = winners_curse(scores, fresh_scores(confirm), c.goal.maximize)
    carried = None
    if transfer is not None:
        carried = transferred(c, [row.number for row in best], transfer_scores(transfer))
    return SweepResults(c, rows, front, importance_of(search.study), again, carried)


def fresh_scores(confirm: TrialQueue) -> dict[int | None, dict[int, float]]:
    """Trial (None: the baseline) -> seed -> score, for the runs on fresh seeds."""
    found: dict[int | None, dict[int, float]] = {}
    for frozen in confirm.trials(TrialState.COMPLETE):
        attributes = frozen.user_attrs
        if "failed" not in attributes:
            found.setdefault(attributes["of"], {})[attributes["seed"]] = frozen.values[0]
    return found


def transfer_scores(transfer: TrialQueue) -> dict[TransferRun, float]:
    """Scores of the runs at both sizes that have ended."""
    ended = transfer.trials(TrialState.COMPLETE)
    return {
        transfer_run_of(frozen.user_attrs): frozen.values[0]
        for frozen in ended
        if "failed" not in frozen.user_attrs
    }


def means_of(c: SweepConfig, runs: Sequence[Figures]) -> list[float]:
    """Each objective's mean over the runs of a trial."""
    return [mean(figures[goal.metric] for figures in runs) for goal in c.objectives]


def as_json(found: SweepResults) -> dict[str, Any]:
    """Plain values of the results, for results.json."""
    return {
        "sweep": found.config.model_dump(mode="json"),
        "trials": [row._asdict() for row in found.trials],
        "best": found.front,
        "importance": found.importance,
        "confirmed": [
            one._asdict()
            | {"fresh": one.fresh._asdict()}
            | {"over_baseline": one.over_baseline and one.over_baseline._asdict()}
            for one in found.confirmed
        ],
        "transferred": found.transferred and transfer_json(found.transferred),
    }


def transfer_json(found: TransferResults) -> dict[str, Any]:
    """Plain values of the transfer results, for results.json."""
    gains = lambda row: {size: getattr(row, size) for size in SIZES}
    rows = [
        row._asdict() | {size: gain and gain._asdict() for size, gain in gains(row).items()}
        for row in found.rows
    ]
    return {"rank_correlation": found.rank_correlation, "rows": rows}
