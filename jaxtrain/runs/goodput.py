"""Goodput: the share of a run's wall-clock time spent on training steps whose result was kept.

The term is from Google's ML Goodput measurement. A run consists of all sessions of its directory,
whether they ended, were resumed, or were killed. Fields of metrics.jsonl, in seconds:

steps_s: steps since the previous row, without pauses. data_wait: the share of steps_s spent waiting
for batches. start_s, validation_s, samples_s, checkpoint_s, events_s: pauses since the previous
row; start_s includes a session's first step, which is not timed separately. lost_s, lost_steps:
steps in rows dropped by a resume or rollback that are computed again. kept_s: steps in the same
rows that a checkpoint had saved. untimed_s: wall-clock time that is missing in `time`, which
continues from the last row kept. idle_s: from the previous session's last row to this session's
start. unix_time: when the row was written.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.runs.history import MetricsRow

PAUSES = {  # field of a row -> label
    "start_s": "start and compilation",
    "validation_s": "validation",
    "samples_s": "samples",
    "checkpoint_s": "checkpoints, while the run waits",
    "events_s": "other events",
}
PRODUCTIVE, DATA, LOST, REST = "productive steps", "waiting for data", "lost steps", "not logged"


class Goodput(NamedTuple):
    """Breakdown of the wall-clock time of a run's sessions."""

    seconds: float  # without the time between sessions
    parts: dict[str, float]  # label -> seconds; their sum is `seconds`
    lost_steps: int  # steps that were computed again
    idle: float  # seconds between sessions
    sessions: int

    @property
    def share(self) -> float:
        """The productive share of the wall-clock time."""
        return self.parts[PRODUCTIVE] / self.seconds if self.seconds else 0.0


def goodput(rows: Sequence[MetricsRow]) -> Goodput | None:
    """Compute the goodput of a run from its rows; None if an old version did not log it."""
    if not any("untimed_s" in row for row in rows):
        return None
    total = lambda name: sum((row.get(name) or 0.0 for row in rows), 0.0)
    waited = sum(((row.get("data_wait") or 0.0) * row.get("steps_s", 0.0) for row in rows), 0.0)
    parts = {PRODUCTIVE: total("steps_s") - waited + total("kept_s"), DATA: waited}
    parts |= {label: total(name) for name, label in PAUSES.items()} | {LOST: total("lost_s")}
    seconds = float(max(row["time"] for row in rows)) + total("untimed_s")
    parts[REST] = max(0.0, seconds - sum(parts.values()))
    sessions = sum(row.get("event") == "start" for row in rows)
    return Goodput(seconds, parts, int(total("lost_steps")), total("idle_s"), sessions)


def start_fields(rows: Sequence[MetricsRow], step: int, startup: float) -> MetricsRow:
    """Goodput fields of a session's first row. rows: all earlier rows; step: resumed from.

    startup: seconds from the session's start to this row.
    """
    found = dropped(rows, step)
    found |= {"untimed_s": startup + found["lost_s"] + found["kept_s"], "start_s": startup}
    found["unix_time"] = time.time()
    if before := [row for row in rows if "unix_time" in row]:
        end = before[-1]["unix_time"] + rows[-1]["time"] - before[-1]["time"]
        found["idle_s"] += max(0.0, found["unix_time"] - startup - end)
    return {name: round(value, 3) for name, value in found.items()}


def rollback_fields(
    rows: Sequence[MetricsRow], step: int, newest: int, seconds: float
) -> MetricsRow:
    """Goodput fields of the row of a rollback to `step`. newest: the last step taken; seconds: the
    current `time`."""
    found = dropped([*rows, {"step": newest, "kind": "train", "time": seconds}], step)
    found["unix_time"] = time.time()
    return {name: round(value, 3) for name, value in found.items()}


def dropped(rows: Sequence[MetricsRow], step: int) -> MetricsRow:
    """Cost of the rows after `step` (all for 0), which are about to be dropped.

    Their time is split by steps: steps up to `step`, after the last remaining row, count as kept.
    """
    kept = [row for row in rows if 0 < step >= row["step"]]
    gone = [row for row in rows if not 0 < step >= row["step"]]
    begun, last = (kept[-1]["time"], kept[-1]["step"]) if kept else (0.0, 0)
    span = max([row["time"] for row in gone], default=begun) - begun
    newest = max([row["step"] for row in gone if row["kind"] == "train"], default=step)
    again = max(0, newest - step)
    share = again / (newest - last) if again else 1.0
    total = lambda name: sum((row.get(name) or 0.0 for row in gone), 0.0)
    return {
        "lost_steps": again + int(total("lost_steps")),
        "lost_s": span * share + total("untimed_s"),
        "kept_s": span * (1 - share),
        "untimed_s": total("untimed_s"),
        "idle_s": total("idle_s"),
    }
