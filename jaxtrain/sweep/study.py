"""Study of a sweep: Optuna's samplers, pruners and storage behind a queue of trials.

All trials are queued when the study is made. A worker claims one; a worker that stops returns its
trial to the queue under the same number. No other module depends on how Optuna identifies trials.
"""

import fcntl
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from jaxtrain.runs.lock import Holder, known_gone, myself
from jaxtrain.sweep.config import (
    ASHA,
    CMAES,
    GP,
    NSGA2,
    TPE,
    Direction,
    Hyperband,
    IntRange,
    LogUniform,
    MedianStopping,
    Parameter,
    SweepConfig,
    Uniform,
)
from jaxtrain.sweep.load import Values

BEATS = 4  # heartbeats that may be missing before a trial is queued again
MOST_ATTEMPTS = 3  # of a trial whose worker is killed each time
DATABASE_WAIT = 100  # seconds for another process's write


def suggest(trial: Trial, key: str, parameter: Parameter) -> None:
    """Choose a trial's value of a parameter, if it has none yet."""
    if isinstance(parameter, (Uniform, LogUniform)):
        log = isinstance(parameter, LogUniform)
        trial.suggest_float(key, parameter.low, parameter.high, log=log)
    elif isinstance(parameter, IntRange):
        trial.suggest_int(key, parameter.low, parameter.high, step=parameter.step)
    else:
        trial.suggest_categorical(key, parameter.values)


def make_sampler(c: SweepConfig, number: int) -> optuna.samplers.BaseSampler:
    """Sampler for one trial. Its seed follows from the sweep's seed and the trial's number, so that
    several workers draw different values, and a resumed sweep repeats none."""
    s, random = c.sampler, optuna.samplers
    seed = int(np.random.SeedSequence([s.seed, number]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if isinstance(s, TPE):
            return random.TPESampler(
                seed=seed, n_startup_trials=s.startup_trials, multivariate=s.multivariate,
                constant_liar=True,
            )  # fmt: skip
        if isinstance(s, GP):
            return random.GPSampler(
                seed=seed, n_startup_trials=s.startup_trials, warn_independent_sampling=False
            )
        if isinstance(s, CMAES):
            return random.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        if isinstance(s, NSGA2):
            return random.NSGAIISampler(seed=seed, population_size=s.population_size)
        return random.RandomSampler(seed=seed)  # for a grid, every value is given


def make_pruner(c: SweepConfig) -> optuna.pruners.BasePruner:
    """The pruner of a sweep; its resource is training steps."""
    p, kinds = c.pruner, optuna.pruners
    if isinstance(p, ASHA):
        return kinds.SuccessiveHalvingPruner(p.min_steps, p.reduction_factor)
    if isinstance(p, Hyperband):
        return kinds.HyperbandPruner(p.min_steps, p.max_steps, p.reduction_factor)
    if isinstance(p, MedianStopping):
        return kinds.MedianPruner(p.startup_trials, p.warmup_steps)
    return kinds.NopPruner()


class TrialQueue:
    """Trials of a study in a database that several processes and hosts share.

    name: of the study. directions: of its objectives.
    """

    def __init__(self, c: SweepConfig, name: str, directions: Sequence[Direction]):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.config, self.lock = c, c.folder / "sweep.lock"
        url = c.storage or f"sqlite:///{(c.folder / 'study.db').absolute()}"
        options = {} if c.storage else {"connect_args": {"timeout": DATABASE_WAIT}}
        with self._alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self.storage = optuna.storages.RDBStorage(
                url, heartbeat_interval=1, grace_period=max(1, round(BEATS * c.heartbeat)),
                engine_kwargs=options,
            )  # fmt: skip
            self.study = optuna.create_study(
                storage=self.storage, study_name=name, load_if_exists=True,
                directions=list(directions), pruner=make_pruner(c), sampler=make_sampler(c, 0),
            )  # fmt: skip

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock that excludes the other processes of the sweep."""
        with self.lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def fill(self, wanted: Sequence[tuple[Values, Mapping[str, Any]]]) -> None:
        """Queue missing trials, each with given values and with attributes that identify it."""
        with self._alone():
            there = [t.user_attrs for t in self.trials()]
            for values, notes in wanted:
                if not any(notes.items() <= attributes.items() for attributes in there):
                    self.study.enqueue_trial(values, user_attrs=dict(notes))

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Trials in these states (default: all), by number."""
        return self.study.get_trials(deepcopy=False, states=states or None)

    def unfinished(self) -> list[FrozenTrial]:
        """Trials that wait or run."""
        return self.trials(TrialState.WAITING, TrialState.RUNNING)

    def claim(self, parameters: bool = True) -> Trial | None:
        """Claim a waiting trial for this process, and choose its values. None if none waits.

        A trial whose worker was killed is queued again: at once on the worker's machine, elsewhere
        after a time without heartbeats.
        """
        with self._alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            silent = self.storage._get_stale_trial_ids(self.study._study_id)
            for frozen in self.trials(TrialState.RUNNING):
                gone = known_gone(Holder(**frozen.user_attrs["worker"]))
                if gone or (gone is None and frozen._trial_id in silent):
                    self._wait_again(frozen._trial_id)
            for frozen in self.trials(TrialState.WAITING):
                number = frozen._trial_id
                self.storage.record_heartbeat(number)
                me = myself(self.config.heartbeat)._asdict()
                self.storage.set_trial_user_attr(number, "worker", me)
                if not self.storage.set_trial_state_values(number, TrialState.RUNNING):
                    continue
                self.study.sampler = make_sampler(self.config, frozen.number)
                trial = Trial(self.study, number)
                trial.set_user_attr("attempts", trial.user_attrs.get("attempts", 0) + 1)
                for key, parameter in (self.config.parameters if parameters else {}).items():
                    suggest(trial, key, parameter)
                return trial
        return None

    def claim_some(self, count: int, parameters: bool = True) -> list[Trial]:
        """Claim `count` waiting trials, or as many as there are."""
        found = (self.claim(parameters) for _ in range(count))
        return [trial for trial in found if trial is not None]

    def give_back(self, trial: Trial, counts: bool = True) -> None:
        """Queue a claimed trial again. counts: whether this was one of its attempts."""
        if not counts:
            trial.set_user_attr("attempts", trial.user_attrs.get("attempts", 1) - 1)
        self._wait_again(trial._trial_id)

    def leave_to(self, trial: Trial, holder: Mapping[str, Any]) -> None:
        """Return a trial that seemed lost to its worker, which is still alive."""
        trial.set_user_attr("worker", dict(holder))
        trial.set_user_attr("attempts", trial.user_attrs["attempts"] - 1)

    def end(
        self,
        trial: Trial,
        state: TrialState,
        values: Sequence[float] | None,
        notes: Mapping[str, Any],
    ) -> None:
        """End a claimed trial. Does nothing if another worker has ended it in the meantime."""
        with self._alone(), suppress(UpdateFinishedTrialError):
            # A trial that seemed lost is in state WAITING.
            self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
            for key, note in notes.items():
                trial.set_user_attr(key, note)
            self.study.tell(trial, values, state=state)

    def _wait_again(self, number: int) -> None:
        with suppress(UpdateFinishedTrialError):  # in the meantime
            self.storage.set_trial_state_values(number, TrialState.WAITING)

    @contextmanager
    def heartbeat(self, trial: Trial) -> Iterator[None]:
        """Record heartbeats of a claimed trial, from a thread."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self.config.heartbeat):
                self.storage.record_heartbeat(trial._trial_id)
            self.storage.remove_session()  # of this thread

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Close the database."""
        self.storage.remove_session()
        self.storage.engine.dispose()


def importance_of(study: optuna.Study) -> dict[str, float]:
    """PED-ANOVA importance (Watanabe et al. 2023, arXiv:2304.10255) of parameters; shares of 1.

    {} if too few trials have finished.
    """
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(finished) < 4:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.importance.get_param_importances(study)


def directions_of(c: SweepConfig) -> list[Direction]:
    """Directions of the objectives, in Optuna's words."""
    return ["maximize" if goal.maximize else "minimize" for goal in c.objectives]
