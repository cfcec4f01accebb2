"""A trial: its runs, one per seed, each an ordinary run directory; and its outcome."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxtrain.config.resolve import Resolved
from jaxtrain.runs.compare import rate_of, training_seconds
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.metrics import MetricsWriter
from jaxtrain.settings import UserError
from jaxtrain.sweep.config import OF_VALIDATION, SweepConfig
from jaxtrain.sweep.load import Values, run_config
from jaxtrain.train.evaluator import Evaluator
from jaxtrain.train.events import Event
from jaxtrain.train.guard import DivergedError
from jaxtrain.train.loop import train
from jaxtrain.train.program import OutOfMemoryError
from jaxtrain.train.step import State
from jaxtrain.train.stop_signal import StopSignal

Figures = dict[str, float]  # metric -> its value in a run
# (training steps, figures of the validation there) -> whether the run is to stop
Prune = Callable[[int, Figures], bool]


class Pruned(NamedTuple):
    """Step at which a trial was stopped because others were better."""

    step: int


class Failed(NamedTuple):
    """Reason why a trial has no figures."""

    reason: str


Outcome = dict[int, Figures] | Pruned | Failed  # of a trial; figures by seed


class PruneEvent(Event):
    """Asks after each validation whether to stop the run, and records a stop in its metrics."""

    def __init__(
        self,
        prune: Prune,
        stopped: list[int],
        c: Resolved,
        evaluator: Evaluator,
        metrics: MetricsWriter,
        stop: StopSignal,
    ):
        super().__init__(c.eval.every)
        self.prune, self.stopped = prune, stopped  # the step at which the run was pruned
        self.evaluator, self.metrics, self.stop = evaluator, metrics, stop

    def run(self, step: int, state: State) -> None:
        if self.prune(step, self.evaluator.last):
            self.stopped.append(step)
            self.metrics.write(step, "event", {"pruned": "worse than other trials of the sweep"})
            self.stop.ask()


def run_name(number: int, seed: int) -> str:
    """Folder of a run of a trial."""
    return f"trial-{number:04d}-seed{seed}"


def run_trial(c: SweepConfig, values: Values, number: int, prune: Prune | None = None) -> Outcome:
    """Train or resume the runs of a trial; the first one may be pruned.

    Raises KeyboardInterrupt if a signal has stopped a run, which is saved.
    """
    found: dict[int, Figures] = {}
    for seed in range(1, c.seeds + 1):
        one = run_one(c, values, run_name(number, seed), seed, prune if seed == 1 else None)
        if not isinstance(one, dict):
            return one
        found[seed] = one
    return found


def run_one(
    c: SweepConfig,
    values: Values,
    name: str,
    seed: int,
    prune: Prune | None = None,
    larger: Sequence[str] = (),
) -> Figures | Pruned | Failed:
    """Train or resume one run. Returns its figures. larger: as in `run_config`.

    Raises KeyboardInterrupt if a signal has stopped it, and UserError for what is wrong with all
    runs of the sweep.
    """
    try:
        config = run_config(c, values, name, seed, larger)
    except UserError as error:  # this combination of values; each value alone was checked
        return Failed(str(error))
    run_dir = config.run_dir
    if not is_finished(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        stopped: list[int] = []
        events = [functools.partial(PruneEvent, prune, stopped)] if prune else []
        with (run_dir / "train.log").open("a") as log, contextlib.redirect_stdout(log):
            try:
                result = train(config, events=events)
            except (DivergedError, OutOfMemoryError) as error:
                return Failed(str(error))
        if stopped:
            return Pruned(stopped[-1])
        if result.stopped:
            raise KeyboardInterrupt
    return checked_figures(c, run_dir)


def checked_figures(c: SweepConfig, run_dir: Path) -> Figures:
    """Figures of a finished run. Raises UserError if an objective is not among them."""
    figures = run_figures(run_dir)
    if missing := [goal.metric for goal in c.objectives if goal.metric not in figures]:
        raise UserError(
            f"objectives: {run_dir} has no {missing[0]}; it has {', '.join(sorted(figures))}"
        )
    return figures


def is_finished(run_dir: Path) -> bool:
    """Whether a run reached its last step."""
    metrics = run_dir / "metrics.jsonl"
    rows = read_rows(metrics) if metrics.is_file() else []
    return bool(rows) and rows[-1].get("status") == "finished"


def run_figures(run_dir: Path) -> Figures:
    """Figures of a finished run: its last validation, seconds of training, tokens/s, bytes."""
    rows = read_rows(run_dir / "metrics.jsonl")
    start = next(row for row in rows if row.get("event") == "start")
    trained = [row for row in rows if row["kind"] == "train"]
    validated = [row for row in rows if row["kind"] == "validation"]
    last = validated[-1] if validated else {}
    found = {name: last[name] for name in OF_VALIDATION if last.get(name) is not None}
    found["seconds"] = training_seconds(trained, start["tokens_per_step"])[1][-1]
    found["peak_bytes"] = max(row["memory_bytes"] for row in trained)
    if rate := rate_of(trained):
        found["tokens_per_s"] = rate
    return {name: float(value) for name, value in found.items()}
