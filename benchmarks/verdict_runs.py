"""Trains the runs that verdicts are made of: each technique on each seed, and the baseline.

Losses come from runs that share a GPU, several at a time. Seconds come from one run of each
technique whose steps have the GPU to themselves, once its programs have been compiled: runs of
other techniques start meanwhile, and wait for their turn.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import NamedTuple

import jax

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.cluster.runtime import start
from jaxtrain.config import find_config, load_config
from jaxtrain.runs.compare import read_run, training_seconds
from jaxtrain.train.loop import train

# Nothing is kept of a run but its metrics.
PLAIN = ("checkpoint={every: null, final: false}", "metrics={every: 10, tensorboard: false}",
         "eval.every=null", "sample={every: null, prompts: []}")  # fmt: skip


class Job(NamedTuple):
    """One training run."""

    name: str  # of the technique
    config: str
    overrides: tuple[str, ...]
    seed: int  # of the initial weights and of the order of the data
    steps: int


class Outcome(NamedTuple):
    """What one run came to; `error` in its place where it failed."""

    bpb: float | None = None  # held-out bits per byte after the last step
    seconds: float | None = None  # of training, without compiling and validating
    step_bytes: int | None = None  # of a device's memory, as compiled: the largest phase
    tokens: int | None = None
    env: dict[str, object] | None = None
    error: str | None = None


class OneAtATime(Coordinator):
    """Steps of several processes on one device, each run's without the others'."""

    def __init__(self, turn: Semaphore):
        super().__init__()
        self.turn, self.has_it = turn, False

    def begin(self, step: int) -> None:
        """Everything is compiled now: wait until no other run takes steps."""
        if not self.has_it:
            self.turn.acquire()
            self.has_it = True
        super().begin(step)

    def give_back(self) -> None:
        if self.has_it:
            self.turn.release()


TURN: Semaphore | None = None  # of this process, where its runs are timed


def take_turns(turn: Semaphore | None) -> None:
    """Set up a process of the pool."""
    global TURN
    TURN = turn
    start(quiet=True)


def train_job(job: Job, folder: Path) -> Outcome:
    """Train one run in this process, its output into a file; the run directory is removed."""
    name = f"{job.name}-{job.seed}-{job.steps}"
    overrides = [*PLAIN, *job.overrides, f"run.name={name}", f"run.directory={folder}",
                 f"run.seed={job.seed}", f"data.seed={job.seed}",
                 f"train.steps={job.steps}"]  # fmt: skip
    run_dir, log = folder / name, folder / f"{name}.log"
    coordinator = OneAtATime(TURN) if TURN else Coordinator()
    try:
        with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            train(load_config(find_config(job.config), overrides), coordinator)
        return read_outcome(run_dir)
    except Exception as error:  # one technique's fault must not end the others' runs
        return Outcome(error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    finally:
        if isinstance(coordinator, OneAtATime):
            coordinator.give_back()
        shutil.rmtree(run_dir, ignore_errors=True)
        jax.clear_caches()


def read_outcome(run_dir: Path) -> Outcome:
    """The figures of a finished run."""
    run = read_run(run_dir)
    checks = [row["bpb"] for row in run.rows if row["kind"] == "validation"]
    train = [row for row in run.rows if row["kind"] == "train"]
    size = run.config["train"]
    steps, seconds = training_seconds(train, size["batch_size"] * size["sequence_length"])
    needs = [row["step_bytes"] for row in run.rows if "step_bytes" in row]
    tokens = steps[-1] * size["batch_size"] * size["sequence_length"]
    return Outcome(checks[-1], seconds[-1], max(needs), tokens, run.env)


def train_all(
    jobs: Sequence[Job], timed: Sequence[Job], workers: int
) -> Iterator[tuple[Job, Outcome]]:
    """Outcomes as they come: first of `jobs`, several at a time, then of `timed`, one by one."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{0.9 / workers:.3f}"
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(dir=_memory_disk()) as folder:
        for batch, turn in ((jobs, None), (timed, context.Semaphore(1))):
            with ProcessPoolExecutor(
                workers, mp_context=context, initializer=take_turns, initargs=(turn,)
            ) as pool:
                waiting = [(job, pool.submit(train_job, job, Path(folder))) for job in batch]
                for job, future in waiting:
                    outcome = future.result()
                    print(_line(job, outcome, turn is not None), flush=True)
                    yield job, outcome


def _memory_disk() -> str | None:
    """A disk in memory, where there is one: run directories are small and short-lived."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _line(job: Job, outcome: Outcome, timed: bool) -> str:
    name = f"{job.name} seed {job.seed}, {job.steps} steps"
    if outcome.error:
        return f"{name}: failed: {outcome.error}"
    seconds = f", {outcome.seconds:.2f} s of training" if timed else ""
    return f"{name}: {outcome.bpb:.4f} bits per byte{seconds}"
