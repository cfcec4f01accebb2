"""Sweeps of the smallest runs, and of no runs at all: scores of a function."""

import math

import yaml
from tiny import FEW_PARTS, run_overrides

from jaxtrain.sweep import work
from jaxtrain.sweep.folder import open_folder
from jaxtrain.sweep.load import load_sweep
from jaxtrain.sweep.results import results_of, row_of

LR = {"optim.matrix_lr": {"name": "log_uniform", "low": 0.001, "high": 0.1}}
TWO = LR | {"optim.weight_decay": {"name": "uniform", "low": 0.0, "high": 0.5}}
RATE = {"optim.learning_rate": LR["optim.matrix_lr"]}  # of ADAMW
ADAMW = "optim.name=adamw"
OURS = ("run.directory=", "run.name=")


def write_sweep(folder, **fields):
    """The file of a sweep of tiny runs."""
    overrides = [line for line in run_overrides("x", **FEW_PARTS) if not line.startswith(OURS)]
    base = {"directory": str(folder / "runs"), "config": str(folder / "config.yaml")}
    base |= {"overrides": overrides, "parameters": LR, "sampler": {"name": "random"}, "trials": 3}
    (folder / "config.yaml").write_text("run: {name: x}\n")
    path = folder / "lr.yaml"
    tree = {key: value for key, value in (base | fields).items() if value is not None}
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def bowl(values, seed):
    """A score that is best at a rate of 0.01, and a little different for each seed."""
    lr = values.get("optim.matrix_lr", 0.02)
    return {
        "bpb": (math.log10(lr) + 2) ** 2 + 0.01 * (seed % 3), "seconds": 10 - math.log10(lr),
    }  # fmt: skip


def no_runs(monkeypatch, score=bowl):
    """Trials that train nothing; returns the list of those that have run."""
    seen = []

    def run_trial(c, values, number, prune=None):
        seen.append(number)
        found = {seed: score(values, seed) for seed in range(1, c.seeds + 1)}
        bad = [one for one in found.values() if not isinstance(one, dict)]
        return bad[0] if bad else found

    monkeypatch.setattr(work, "run_trial", run_trial)
    monkeypatch.setattr(work, "run_one", lambda c, values, name, seed: score(values, seed))
    return seen


def open_sweep(path, *overrides):
    """(configuration, queues) of a sweep."""
    c = load_sweep(path, overrides)
    open_folder(c)
    return c, work.open_queues(c)


def swept(path, *overrides):
    """What a whole sweep finds."""
    c, queues = open_sweep(path, *overrides)
    try:
        work.work(c, queues)
        return results_of(*queues)
    finally:
        queues.close()


def rows_now(queues):
    return [row_of(frozen) for frozen in queues.search.trials()]
