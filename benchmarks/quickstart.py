"""Benchmark of the quickstart run: held-out bits per byte, seconds and memory, by seed."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import describe
from benchmarks.verdict_runs import Job, train_job
from jaxtrain.config import find_config, load_config
from jaxtrain.settings import UserError

SEEDS = (0, 1, 2)
CONFIG = "quickstart"


def bench_quickstart(overrides: Sequence[str], variant: str | None = None) -> dict[str, Any]:
    """A row per seed, and the means. `seconds` are of training, without compiling and validating.

    Raises UserError for a run that fails.
    """
    settings = [one for one in overrides if not one.startswith("train.steps=")]
    steps = load_config(find_config(CONFIG), overrides).train.steps
    if steps is None:
        raise UserError("quickstart: train.steps is needed, the steps of each run")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            job = Job(CONFIG, CONFIG, tuple(settings), seed, steps)
            outcome = train_job(job, Path(folder))
            if outcome.error or outcome.bpb is None or outcome.seconds is None:
                raise UserError(f"quickstart: seed {seed} failed: {outcome.error}")
            rows.append({
                "name": CONFIG, "seed": seed, "bpb": outcome.bpb,
                "seconds": round(outcome.seconds, 1), "tokens": outcome.tokens,
                "tokens_per_s": round((outcome.tokens or 0) / outcome.seconds),
                "step_bytes": outcome.step_bytes,
            })  # fmt: skip
    return describe("quickstart", CONFIG, variant or "", {"steps": steps}, 1) | {"rows": rows}
