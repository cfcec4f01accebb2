"""Rows of a run's metrics.jsonl: read them, truncate them on resume, detect missing ones."""

import json
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_whole

MetricsRow = dict[str, Any]


def read_rows(path: Path) -> list[MetricsRow]:
    """The rows of a metrics.jsonl. An incomplete last line (the writer was killed) is skipped.

    Raises UserError for a line before the last that is not a JSON object.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not is_row(row):
                raise ValueError
            rows.append(row)
        except (ValueError, AttributeError, RecursionError):
            if number < len(lines):
                raise UserError(
                    f"{path}, line {number} is not a metrics row (a JSON object with step, kind "
                    "and time): repair or delete that line"
                ) from None
    return rows


def is_row(row: object) -> bool:
    """Whether an object is a metrics row. Training and validation rows may only hold numbers,
    lists and null."""
    number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
    if not isinstance(row, dict) or not all(number(row.get(key)) for key in ("step", "time")):
        return False
    if type(row.get("kind")) is not str:
        return False
    if row["kind"] not in ("train", "validation"):
        return True
    values = (value for name, value in row.items() if name != "kind")
    return all(number(value) or value is None or isinstance(value, list) for value in values)


def missing_rows(rows: Sequence[MetricsRow], step: int, every: int) -> str | None:
    """A message if the first or last rows up to `step` are missing, else None.

    every: steps between rows, if the rows do not tell.
    """
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    said = [row["every"] for row in rows if isinstance(row.get("every"), int)]
    every = max([*said[-1:], *(b - a for a, b in pairwise(steps[-2:]))], default=every)
    if step and not steps:
        return f"the rows of steps 1 to {step} are gone from metrics.jsonl"
    if step and step - steps[-1] >= every:
        return f"the rows of steps {steps[-1] + 1} to {step} are gone from metrics.jsonl"
    if step and steps[0] > 1:
        return f"the rows before step {steps[0]} are gone from metrics.jsonl"
    return None


def rewound(path: Path, step: int) -> tuple[list[MetricsRow], list[MetricsRow]]:
    """Delete the rows after `step` (all for 0). Returns the remaining rows, and all rows before."""
    before: list[MetricsRow] = []
    with suppress(UserError) if step == 0 else nullcontext():  # no row is needed
        before = read_rows(path) if path.exists() else []
    rows = [row for row in before if step and row["step"] <= step]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows, before
