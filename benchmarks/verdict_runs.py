"""Trains the runs that verdicts are made of: each technique on each seed, and the baseline.

Losses come from runs that share a GPU, several at a time. Seconds come from one run of each
technique that has the GPU to itself, once its programs have been compiled by the others.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from jaxtrain.runs.compare import read_run, training_seconds

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


def train_job(job: Job, folder: Path) -> Outcome:
    """Train one run in this process, its output into a file; the run directory is removed."""
    import jax

    from jaxtrain.main import main

    name = f"{job.name}-{job.seed}-{job.steps}"
    argv = ["--config", job.config, *PLAIN, *job.overrides, f"run.name={name}",
            f"run.directory={folder}", f"run.seed={job.seed}", f"data.seed={job.seed}",
            f"train.steps={job.steps}"]  # fmt: skip
    run_dir, log = folder / name, folder / f"{name}.log"
    try:
        with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            code = main(argv)
        if code:
            return Outcome(error=log.read_text().strip().splitlines()[-1])
        return read_outcome(run_dir)
    except Exception as error:  # one technique's fault must not end the others' runs
        return Outcome(error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    finally:
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
    with tempfile.TemporaryDirectory(dir=_memory_disk()) as folder:
        for batch, width in ((jobs, workers), (timed, 1)):
            if not batch:
                continue
            share = f"{0.9 / width:.3f}"
            os.environ["XLA_CLIENT_MEM_FRACTION"] = share
            with ProcessPoolExecutor(width, mp_context=get_context("spawn")) as pool:
                futures = [(job, pool.submit(train_job, job, Path(folder))) for job in batch]
                for job, future in futures:
                    begun = time.perf_counter()
                    outcome = future.result()
                    waited = time.perf_counter() - begun
                    print(_line(job, outcome, width, waited), flush=True)
                    yield job, outcome


def _memory_disk() -> str | None:
    """A disk in memory, where there is one: run directories are small and short-lived."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _line(job: Job, outcome: Outcome, width: int, waited: float) -> str:
    name = f"{job.name} seed {job.seed}, {job.steps} steps"
    if outcome.error:
        return f"{name}: failed: {outcome.error}"
    alone = f", {outcome.seconds:.2f} s of training alone" if width == 1 else ""
    return f"{name}: {outcome.bpb:.4f} bits per byte{alone} (waited {waited:.0f} s)"
