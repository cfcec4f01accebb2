"""Worker of a sweep: claims trials, runs them, and records their outcomes."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from optuna.trial import Trial, TrialState

from jaxtrain.runs.lock import InUseError
from jaxtrain.settings import UserError
from jaxtrain.sweep.config import SweepConfig
from jaxtrain.sweep.load import Values, grid_points
from jaxtrain.sweep.results import TrialRow, best_first, labels_of, means_of, row_of
from jaxtrain.sweep.study import MOST_ATTEMPTS, TrialQueue, directions_of
from jaxtrain.sweep.transfer import run_again, run_title, transfer_run_of, transfer_runs
from jaxtrain.sweep.trials import Failed, Figures, Outcome, Pruned, run_one, run_trial

LOOK = 1.0  # seconds between checks for a trial, while others run the last ones
Run = Callable[[Sequence[Trial]], list[Outcome]]  # of claimed trials


class Queues(NamedTuple):
    """The studies of a sweep."""

    search: TrialQueue
    confirm: TrialQueue | None
    transfer: TrialQueue | None

    def close(self) -> None:
        """Close the database."""
        for queue in filter(None, self):
            queue.close()


def open_queues(c: SweepConfig) -> Queues:
    """Open the studies, with all trials of the search queued."""
    search = TrialQueue(c, "search", directions_of(c))
    points = grid_points(c.parameters) if c.sampler.name == "grid" else [{}] * (c.trials or 0)
    search.fill([(point, {"slot": i}) for i, point in enumerate(points)])
    confirm = TrialQueue(c, "confirm", directions_of(c)) if c.confirm else None
    transfer = TrialQueue(c, "transfer", directions_of(c)) if c.transfer else None
    return Queues(search, confirm, transfer)


def work(c: SweepConfig, queues: Queues, once: bool = False) -> bool:
    """Run trials until there are none. Returns whether any may be left.

    once: return after one trial. Raises KeyboardInterrupt after a signal, with the trial queued
    again, and UserError for what is wrong with every run.
    """
    search = lambda trials: [searched(c, trial) for trial in trials]
    if c.population > 1:
        from jaxtrain.sweep.population import run_trials

        search = functools.partial(run_trials, c)
    if run_queue(c, queues.search, search, once, c.population):
        return True
    if queues.confirm is not None:
        queues.confirm.fill(fresh_runs(c, queues.search))
        fresh = lambda trials: [confirmed(c, queues.search, trial) for trial in trials]
        if run_queue(c, queues.confirm, fresh, once):
            return True
    if queues.transfer is None:
        return False
    rows = best_first(c, map(row_of, queues.search.trials()))
    ranked, values = [row.number for row in rows], {row.number: row.values for row in rows}
    queues.transfer.fill([({}, run._asdict()) for run in transfer_runs(c, ranked)])
    again = lambda trials: [
        run_again(c, values, transfer_run_of(trial.user_attrs)) for trial in trials
    ]
    return run_queue(c, queues.transfer, again, once)


def run_queue(c: SweepConfig, queue: TrialQueue, run: Run, once: bool, at_once: int = 1) -> bool:
    """Claim trials of a queue, `at_once` at a time, and run them until all have ended. Returns
    whether to call this again."""
    said = False
    while queue.unfinished():
        trials = queue.claim_some(at_once, parameters=queue.study.study_name == "search")
        if not trials:
            if not said:
                others = len(queue.trials(TrialState.RUNNING))
                print(f"sweep    waiting for {others} trials of other workers", flush=True)
            said = True
            time.sleep(LOOK)
        elif run_claimed(c, queue, run, trials) and once:
            return True
    return False


def run_claimed(c: SweepConfig, queue: TrialQueue, run: Run, trials: Sequence[Trial]) -> bool:
    """Run claimed trials and record their outcomes. False if another process has them."""
    begun = time.perf_counter()
    with contextlib.ExitStack() as stack:
        for trial in trials:
            stack.enter_context(queue.heartbeat(trial))
        try:
            outcomes = attempt(trials, run)
        except InUseError as error:
            print(f"sweep    a trial was not lost, as it seemed: {error}", flush=True)
            if len(trials) == 1:
                queue.leave_to(trials[0], error.holder._asdict())
            else:  # the worker of the one that is in use will report it
                for trial in trials:
                    queue.give_back(trial, counts=False)
            time.sleep(LOOK)
            return False
        except BaseException as error:
            for trial in trials:
                queue.give_back(trial, counts=not isinstance(error, KeyboardInterrupt | UserError))
            raise
        for trial, outcome in zip(trials, outcomes, strict=True):
            record(c, queue, trial, outcome)
    for trial in trials:
        print(progress(c, queue, trial.number, time.perf_counter() - begun), flush=True)
    return True


def attempt(trials: Sequence[Trial], run: Run) -> list[Outcome]:
    """Run trials, except those whose workers died MOST_ATTEMPTS times."""
    able = [trial for trial in trials if trial.user_attrs["attempts"] <= MOST_ATTEMPTS]
    found = iter(run(able) if able else [])
    dead = Failed(f"its worker died {MOST_ATTEMPTS} times")
    return [next(found) if trial in able else dead for trial in trials]


def searched(c: SweepConfig, trial: Trial) -> Outcome:
    """Run a trial of the search."""
    metric, known = c.goal.metric, set(trial_steps(trial))

    def prune(step: int, figures: Figures) -> bool:
        if metric not in figures:
            raise UserError(
                f"objectives: a validation has no {metric}; it has {', '.join(figures)}"
            )
        if not math.isfinite(figures[metric]):
            return False  # the run's own guard stops it, with the reason
        if step not in known:  # a run resumed from a checkpoint validates again
            trial.report(figures[metric], step)
            known.add(step)
        return bool(trial.should_prune())

    pruned = c.pruner.name != "none"
    return run_trial(c, trial.params, trial.number, prune if pruned else None)


def trial_steps(trial: Trial) -> list[int]:
    """Training steps whose validations are recorded."""
    frozen = next(t for t in trial.study.get_trials(deepcopy=False) if t.number == trial.number)
    return [*frozen.intermediate_values]


def record(c: SweepConfig, queue: TrialQueue, trial: Trial, outcome: Outcome) -> None:
    """Record the outcome of a trial. A failed one is worse than all others, and has its reason."""
    if isinstance(outcome, Pruned):
        queue.end(trial, TrialState.PRUNED, None, {"pruned": outcome.step})
    elif isinstance(outcome, Failed) and len(c.objectives) > 1:
        queue.end(trial, TrialState.FAIL, None, {"failed": outcome.reason})
    elif isinstance(outcome, Failed):  # with a value, so that the sampler learns to avoid it
        worst = -math.inf if c.goal.maximize else math.inf
        queue.end(trial, TrialState.COMPLETE, [worst], {"failed": outcome.reason})
    else:
        runs = {str(seed): figures for seed, figures in outcome.items()}
        means = means_of(c, [*outcome.values()])
        queue.end(trial, TrialState.COMPLETE, means, {"runs": runs})


# ---- fresh seeds -------------------------------------------------------------------------------


def fresh_runs(c: SweepConfig, search: TrialQueue) -> list[tuple[Values, dict[str, int | None]]]:
    """Attributes of the runs on fresh seeds: of the baseline, then of the best trials."""
    assert c.confirm
    best = best_first(c, map(row_of, search.trials()))[: c.confirm.best]
    chosen = [*([None] if c.confirm.baseline else []), *(row.number for row in best)]
    seeds = range(c.seeds + 1, c.seeds + 1 + c.confirm.seeds)
    return [({}, {"of": number, "seed": seed}) for number in chosen for seed in seeds]


def confirmed(c: SweepConfig, search: TrialQueue, trial: Trial) -> Outcome:
    """Run a trial of the search again on a fresh seed."""
    number, seed = trial.user_attrs["of"], trial.user_attrs["seed"]
    what = "baseline" if number is None else f"confirm-{number:04d}"
    values = {} if number is None else search.trials()[number].params
    found = run_one(c, values, f"{what}-seed{seed}", seed)
    return {seed: found} if isinstance(found, dict) else found


# ---- the screen --------------------------------------------------------------------------------


def progress(c: SweepConfig, queue: TrialQueue, number: int, seconds: float) -> str:
    """A line about a trial that has ended, and the best trial so far."""
    frozen = queue.trials()
    rows = [row_of(one) for one in frozen]
    ended, row = sum(r.state in ("finished", "pruned", "failed") for r in rows), rows[number]
    line = f"sweep    {ended}/{len(rows)}"
    if queue.study.study_name == "confirm":
        of, seed = (frozen[number].user_attrs[key] for key in ("of", "seed"))
        name = "baseline" if of is None else f"trial {of}"
        return f"{line} {name} on fresh seed {seed}: {scores_text(c, row) or row.note}"
    if queue.study.study_name == "transfer":
        title = run_title(transfer_run_of(frozen[number].user_attrs))
        return f"{line} {title}: {scores_text(c, row) or row.note}"
    line += f" trial {number}: {scores_text(c, row) or row.note or row.state}, {seconds:.0f} s"
    best = best_first(c, rows)
    if best and len(c.objectives) == 1:
        line += f"; best {scores_text(c, best[0])} of trial {best[0].number}"
    return f"{line} ({values_text(c, row.values)})"


def scores_text(c: SweepConfig, row: TrialRow) -> str:
    """`bpb 2.1034`, for each objective."""
    return ", ".join(f"{g.metric} {x:.5g}" for g, x in zip(c.objectives, row.scores))


def values_text(c: SweepConfig, values: Values) -> str:
    """`matrix_lr 0.0314`, for each parameter."""
    labels = labels_of(c)
    show = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    return ", ".join(f"{labels[key]} {show(value)}" for key, value in values.items())
