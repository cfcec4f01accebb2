"""Parameters, tokens and losses of a finished run, read from its directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxtrain.config.resolve import Resolved, vocab_size_of
from jaxtrain.runs.history import MetricsRow, read_rows
from jaxtrain.runs.saved import load_resolved
from jaxtrain.scaling.plan import PlannedRun, model_counts
from jaxtrain.scaling.study import Counting
from jaxtrain.settings import UserError


class Point(NamedTuple):
    """A finished run."""

    name: str
    kinds: tuple[str, ...]
    depth: int
    width: int
    seed: int
    parameters: float
    tokens: int
    flops: float
    loss: float  # of the whole validation split at the end, in the study's measure
    batch_tokens: int  # tokens per step
    multiplier: float
    budget: float | None
    seconds: float
    steps: tuple[int, ...] = ()  # steps of the validations
    losses: tuple[float, ...] = ()


def has_ended(run_dir: Path) -> bool:
    """Whether a run has finished and was validated at its last step."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return False
    rows = read_rows(path)
    marks = [row for row in rows if row.get("event") in ("start", "end")]
    if not marks or marks[-1].get("status") != "finished":
        return False
    total = next(row["total_steps"] for row in reversed(marks) if "total_steps" in row)
    ends = validations(rows)
    return bool(ends) and ends[-1]["step"] == total


def validations(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    return [row for row in rows if row["kind"] == "validation" and row.get("loss") is not None]


def point_of(
    run_dir: Path, measure: str, counting: Counting, planned: PlannedRun | None = None
) -> Point:
    """The point of a finished run. planned: the study's plan of the run, if any.

    Raises UserError for a directory that is no finished run, or has phases or stages.
    """
    if not has_ended(run_dir):
        raise UserError(f"{run_dir} is not a finished run with a validation loss at its end")
    c = load_resolved(run_dir / "config.yaml")
    if c.train.phases or c.data.stages:
        raise UserError(f"{run_dir} has phases or stages: its steps are not of one size")
    rows = read_rows(run_dir / "metrics.jsonl")
    curve = [row for row in validations(rows) if row.get(measure) is not None]
    if not curve:
        raise UserError(f"{run_dir}: its validations have no {measure}")
    return Point(
        run_dir.name, planned.kinds if planned else ("isoflop", "tokens"), c.model.depth,
        c.model.width, c.run.seed, *sizes_of(c, counting), curve[-1][measure],
        c.train.batch_size * c.train.sequence_length, planned.multiplier if planned else 1.0,
        planned.budget if planned else None, rows[-1]["time"],
        tuple(row["step"] for row in curve), tuple(row[measure] for row in curve),
    )  # fmt: skip


def sizes_of(c: Resolved, counting: Counting) -> tuple[float, int, float]:
    """Parameters, training tokens, training FLOPs."""
    counts = model_counts(c, vocab_size_of(c.data))
    tokens = c.train.steps * c.train.batch_size * c.train.sequence_length
    return counts.of(counting), tokens, tokens * counts.flops_per_token


def with_budgets(points: Sequence[Point]) -> list[Point]:
    """Assign budgets to runs without a study: runs whose FLOPs are within 2% share a budget."""
    found: list[Point] = []
    for one in sorted(points, key=lambda point: point.flops):
        near = found and one.flops <= 1.02 * (found[-1].budget or 0)
        found.append(one._replace(budget=found[-1].budget if near else one.flops))
    return found
