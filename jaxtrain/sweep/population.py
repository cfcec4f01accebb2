"""Several trials at once: their runs are the members of one population on one device."""

import contextlib
from collections.abc import Sequence

from optuna.trial import Trial

from jaxtrain.config import Config
from jaxtrain.settings import UserError
from jaxtrain.sweep.config import SweepConfig
from jaxtrain.sweep.load import run_config
from jaxtrain.sweep.trials import Failed, Figures, Outcome, checked_figures, is_finished, run_name
from jaxtrain.train.population import train_population


def run_trials(c: SweepConfig, trials: Sequence[Trial]) -> list[Outcome]:
    """Train or resume the runs of several trials at once. Returns their outcomes.

    Raises KeyboardInterrupt if a signal has stopped the runs, which are saved, and UserError for
    values in which members of a population may not differ.
    """
    found: list[Outcome] = []
    runs: dict[int, dict[int, Config]] = {}  # of the trials that can run, by index and seed
    for index, trial in enumerate(trials):
        found.append({})
        try:
            runs[index] = {
                seed: run_config(c, trial.params, run_name(trial.number, seed), seed)
                for seed in range(1, c.seeds + 1)
            }
        except UserError as error:  # this combination of values
            found[index] = Failed(str(error))
    configs = [one for of_trial in runs.values() for one in of_trial.values()]
    failures = train_as_population([one for one in configs if not is_finished(one.run_dir)])
    for index, of_trial in runs.items():
        reasons = [failures[one.run.name] for one in of_trial.values() if one.run.name in failures]
        if reasons:
            found[index] = Failed(reasons[0])
        else:
            figures: dict[int, Figures] = {
                seed: checked_figures(c, one.run_dir) for seed, one in of_trial.items()
            }
            found[index] = figures
    return found


def train_as_population(configs: Sequence[Config]) -> dict[str, str]:
    """Train runs at once. Returns the reasons of those that failed, by run name."""
    if not configs:
        return {}
    for one in configs:
        one.run_dir.mkdir(parents=True, exist_ok=True)
    log = (configs[0].run_dir / "train.log").open("a")
    with log, contextlib.redirect_stdout(log):
        results = train_population(configs)
    if any(result.stopped and not result.failure for result in results):
        raise KeyboardInterrupt
    return {one.run.name: result.failure for one, result in zip(configs, results) if result.failure}
