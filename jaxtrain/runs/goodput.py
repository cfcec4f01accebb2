"""Goodput: the share of a run's wall-clock that went into training steps whose result was kept.

The word is that of Google's ML Goodput measurement. A run is all sessions of its directory: those
that ended, were resumed, or were killed. What the rows of metrics.jsonl say of it, in seconds:

steps_s: of the steps since the row before, without pauses; data_wait is the share of it that waited
for batches. start_s, validation_s, samples_s, checkpoint_s, events_s: pauses since the row before;
start_s also holds the first step of a session, which is not timed alone. lost_s, lost_steps: of the
rows that a resume or a rollback has dropped, what is computed again; kept_s: of the same rows, what
a checkpoint had kept. untimed_s: wall-clock that `time` does not hold, because it goes on from the
last row that stayed. idle_s: from the last row of the session before to the start of this one.
unix_time: of the row.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.runs.history import MetricsRow

PAUSES = {  # field of a row -> what it is called
    "start_s": "start and compilation",
    "validation_s": "validation",
    "samples_s": "samples",
    "checkpoint_s": "checkpoints, while the run waits",
    "events_s": "other events",
}
PRODUCTIVE, DATA, LOST, REST = "productive steps", "waiting for data", "lost steps", "not logged"


class Goodput(NamedTuple):
    """Where the wall-clock of all sessions of a run went."""

    seconds: float  # without the time between sessions
    parts: dict[str, float]  # seconds, which sum up to `seconds`
    lost_steps: int  # computed again
    idle: float  # seconds between sessions
    sessions: int

    @property
    def share(self) -> float:
        """Of the wall-clock, what was productive."""
        return self.parts[PRODUCTIVE] / self.seconds if self.seconds else 0.0


def goodput(rows: Sequence[MetricsRow]) -> Goodput | None:
    """From the rows of a run; None for a run of a version that did not log it."""
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
    """What the first row of a session says: of the rows there were, `step` is where it goes on.

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
    """What the row of a rollback to `step` says. newest: step that was taken; seconds: `time`."""
    found = dropped([*rows, {"step": newest, "kind": "train", "time": seconds}], step)
    found["unix_time"] = time.time()
    return {name: round(value, 3) for name, value in found.items()}


def dropped(rows: Sequence[MetricsRow], step: int) -> MetricsRow:
    """What the rows after `step` (all for 0) have cost, which are about to be dropped.

    Steps up to `step` that no row has kept count as kept, by their share of the steps.
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
