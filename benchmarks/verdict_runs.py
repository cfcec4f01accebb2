"""Train the runs behind the verdicts: each technique with each seed, and the baseline.

Losses come from runs that share a GPU, several at a time. Seconds come from one run of each
technique alone on the GPU, after the others have compiled its programs: processes load and lower
programs in parallel, but run their steps one process at a time. One worker means a single process
that does everything sequentially, for models whose steps are so short that other host work matters.
CUDA_VISIBLE_DEVICES=0,1,2 spreads the workers over these GPUs; one process then times on each GPU.
"""

import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import IO, NamedTuple, override

import jax

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.cluster.runtime import start
from jaxtrain.config import find_config, load_config
from jaxtrain.runs.compare import rate_of, read_run, tokens_of
from jaxtrain.runs.history import MetricsRow
from jaxtrain.train.loop import train

# Only the metrics of a run are kept.
PLAIN = ("checkpoint={every: null, final: false}", "metrics={every: 10, tensorboard: false}",
         "eval.every=null", "sample={every: null, prompts: []}")  # fmt: skip


class Job(NamedTuple):
    """One training run."""

    name: str  # of the technique
    config: str
    overrides: tuple[str, ...]
    seed: int  # of the initial weights and the data order
    steps: int


class Outcome(NamedTuple):
    """Results of one run, or its `error` if it failed."""

    bpb: float | None = None  # held-out bits per byte after the last step
    seconds: float | None = None  # of training alone, without compiling and validating
    step_bytes: int | None = None  # device memory as compiled, of the largest phase
    tokens: int | None = None
    env: dict[str, object] | None = None
    error: str | None = None
    text_bytes: int | None = None  # bytes of text of its tokens; None if its metrics lack them
    seconds_range: tuple[float, float] | None = None  # of two runs: the first and last of a call
    fill: float | None = None  # share of positions in its rows that are no padding


class ExclusiveSteps(Coordinator):
    """A process that runs its steps while no other one with the same lock file does.

    It takes the lock after compiling, before its first step, and holds it until the file is closed.
    """

    def __init__(self, lock: IO[str]):
        super().__init__()
        self.lock = lock

    @override
    def begin(self, step: int) -> None:
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        super().begin(step)


def train_job(job: Job, folder: Path, alone: bool = False) -> Outcome:
    """Train one run in this process with its output in a file; the run directory is removed.

    alone: no other run with `alone` in this folder runs steps on this GPU at the same time.
    """
    own = hashlib.sha256(repr(job.overrides).encode()).hexdigest()[:8]  # tells tuned values apart
    name = f"{job.name}-{job.seed}-{job.steps}-{own}"
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    overrides = [*PLAIN, *job.overrides, f"run.name={name}", f"run.directory={folder}",
                 f"run.seed={job.seed}", f"data.seed={job.seed}",
                 f"train.steps={job.steps}"]  # fmt: skip
    run_dir, log = folder / name, folder / f"{name}.log"
    try:
        with (
            log.open("w") as file, redirect_stdout(file), redirect_stderr(file),
            (folder / f"steps{device}.lock").open("w") as lock,
        ):  # fmt: skip
            coordinator = ExclusiveSteps(lock) if alone else None
            train(load_config(find_config(job.config), overrides), coordinator)
        return read_outcome(run_dir)
    except Exception as error:  # a failing technique must not stop the others
        return Outcome(error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
        jax.clear_caches()


def read_outcome(run_dir: Path) -> Outcome:
    """The results of a finished run."""
    run = read_run(run_dir)
    checks = [row["bpb"] for row in run.rows if row["kind"] == "validation"]
    train = [row for row in run.rows if row["kind"] == "train"]
    size = run.config["train"]
    seconds = steady_seconds(train, size["batch_size"] * size["sequence_length"])
    needs = [row["step_bytes"] for row in run.rows if "step_bytes" in row]
    tokens = round(train[-1]["tokens"])
    text, fill = text_bytes_of(train), train[-1].get("data_fill")
    return Outcome(checks[-1], seconds, max(needs), tokens, run.env, text_bytes=text, fill=fill)


def steady_seconds(rows: Sequence[MetricsRow], tokens_per_step: int) -> float:
    """Seconds of training without the start of each phase, which dominates short runs.

    Each phase counts with the median rate of its rows. A row with `start_s` begins a phase. That
    row and the next one, in which a GPU records its CUDA graphs, are ignored if there are others.
    """
    seconds, before, phase = 0.0, 0, []
    for row, following in zip(rows, (*rows[1:], None)):
        phase.append(row)
        if following is None or "start_s" in following:
            total = tokens_of(row, tokens_per_step)
            rate = rate_of(phase[2:]) or rate_of(phase[1:]) or rate_of(phase) or rate_of(rows)
            seconds += (total - before) / rate if rate else 0.0
            before, phase = total, []
    return seconds


def text_bytes_of(rows: Sequence[MetricsRow]) -> int | None:
    """Bytes of text that a run has trained on, from bytes per token = bits per token / bits per
    byte. The rows must hold means over all their steps."""
    total, before = 0.0, 0
    for row in rows:
        if not row.get("bpb"):
            return None
        total += (row["tokens"] - before) * row["loss"] / (math.log(2) * row["bpb"])
        before = row["tokens"]
    return round(total)


def train_all(
    jobs: Sequence[Job], timed: Sequence[Job], workers: int, done: Path
) -> Iterator[tuple[Job, Outcome]]:
    """Yield outcomes: first of `jobs`, `workers` at a time, then of `timed`, whose steps run alone
    on their GPU.

    The first run that a process times takes 5 to 6% longer at d12 (LOG.md): it is trained again,
    and its outcome has the seconds of both.
    done: a file with one outcome per line; jobs in it are not trained again.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    gpus, spawn = visible_gpus(), get_context("spawn")
    known = read_done(done) if done.exists() else {}
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_memory_disk()) as folder, done.open("a") as file:
        for batch, alone in ((jobs, False), (timed, True)):
            had = {
                j: known[j] for j in batch if j in known and not (alone and not known[j].seconds)
            }
            yield from had.items()
            count = len(gpus) if alone and gpus else workers
            together = math.ceil(count / max(1, len(set(gpus))))  # processes per GPU
            # A waiting process holds only its state, and it exits after its turn.
            share = 0.4 if alone and not gpus else 0.9 / together
            os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{share:.3f}"
            turns: SimpleQueue[str] = SimpleQueue(ctx=spawn)
            for gpu in itertools.islice(itertools.cycle(gpus), count):
                turns.put(gpu)
            left = [job for job in batch if job not in had]
            with ProcessPoolExecutor(
                count, mp_context=spawn, initializer=start_on, initargs=(turns, bool(gpus)),
                max_tasks_per_child=1 if alone and count > 1 and not gpus else None,
            ) as pool:  # fmt: skip
                one = functools.partial(train_job, folder=Path(folder), alone=alone)
                running = {pool.submit(one, job): job for job in left}
                again, twice = (count if alone and len(left) > 1 else 0), {}
                while running:
                    future = next(as_completed(running))
                    job, outcome = running.pop(future), future.result()
                    print(_line(job, outcome, alone), flush=True)
                    if again and outcome.seconds:
                        again, twice[job] = again - 1, outcome.seconds
                        running[pool.submit(one, job)] = job
                        continue
                    if not alone:
                        outcome = outcome._replace(seconds=None)
                    elif job in twice and outcome.seconds:
                        low, high = sorted((twice[job], outcome.seconds))
                        outcome = outcome._replace(seconds_range=(low, high))
                    if not outcome.error:
                        file.write(json.dumps([job._asdict(), outcome._asdict()]) + "\n")
                        file.flush()
                    yield job, outcome


def visible_gpus() -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES; empty if it is not set."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def start_on(turns: SimpleQueue[str], take: bool) -> None:
    """Initialize a worker; `take`: on the next GPU of the queue."""
    if take:
        os.environ["CUDA_VISIBLE_DEVICES"] = turns.get()
    start(quiet=True)


def read_done(path: Path) -> dict[Job, Outcome]:
    """The outcomes in a file. An incomplete last line, from a killed process, is removed."""
    whole, end, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        print(f"{path}: the last line is not complete; it is removed", file=sys.stderr)
        os.truncate(path, len(whole) + len(end))
    return dict(map(_read_line, whole.decode().splitlines()))


def _read_line(line: str) -> tuple[Job, Outcome]:
    job, outcome = json.loads(line)
    return Job(**job | {"overrides": tuple(job["overrides"])}), Outcome(**outcome)


def _memory_disk() -> str | None:
    """A RAM disk if there is one, since run directories are small and short-lived."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _line(job: Job, outcome: Outcome, timed: bool) -> str:
    name = f"{job.name} seed {job.seed}, {job.steps} steps"
    if outcome.error:
        return f"{name}: failed: {outcome.error}"
    seconds = f", {outcome.seconds:.2f} s of training" if timed else ""
    return f"{name}: {outcome.bpb:.4f} bits per byte{seconds}"
