"""Number of decode steps per device call, while requests may come at any time.

A new request waits for the calls already queued on the device. Several steps per call save host
time. They save nothing if the device takes longer for fewer steps than the host for one call.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

SMOOTHING = 0.5  # weight of the last call in the moving average
IDLE_ENOUGH, TOO_BUSY = 0.7, 0.9  # share of time the host works: try fewer steps; go back
FEW = 4  # steps between one and several
TRIED = 4  # minimum calls that are measured before a change
PATIENCE = 64  # calls until fewer steps are tried again
UNSETTLED = 3  # calls after a change or a prompt until the host waits for the device as usual


class Pace:
    """Chooses the steps per call by the share of time that the host waits for the device. Call
    `reset` if anything else ran between two decode calls."""

    def __init__(self, several: int, clock: Callable[[], float] = time.perf_counter):
        self.choices, self.steps, self.clock = step_counts(several), several, clock
        self.waited = 0.0
        self.last: float | None = None
        self.busy, self.measured, self.pause = 1.0, 0, 0
        self.unsettled = UNSETTLED

    def reset(self) -> None:
        """Leave the time until the next calls unmeasured. The device may have had nothing to do:
        the host is ahead of it again only after a few calls."""
        self.last, self.unsettled = None, UNSETTLED

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait of the host for the device."""
        begin = self.clock()
        yield
        self.waited += self.clock() - begin

    def called(self, steps: int) -> None:
        """Record the start of a call of `steps` decode steps."""
        now, last, waited = self.clock(), self.last, self.waited
        self.last, self.waited = now, 0.0
        self.unsettled -= self.unsettled > 0
        if last is None or now <= last or steps != self.steps or self.unsettled:
            return
        busy = 1 - min(1.0, waited / (now - last))
        self.busy += (SMOOTHING if self.measured else 1.0) * (busy - self.busy)
        self.measured, self.pause = self.measured + 1, self.pause - 1
        if self.measured < TRIED:
            return
        at = self.choices.index(self.steps)
        if at > 0 and self.busy < IDLE_ENOUGH and self.pause <= 0:
            self.change(at - 1)
        elif at + 1 < len(self.choices) and self.busy > TOO_BUSY:
            self.change(at + 1)
            self.pause = PATIENCE

    def change(self, choice: int) -> None:
        """Choose other steps, whose first call begins beside one of the old steps."""
        self.steps, self.measured = self.choices[choice], 0
        self.reset()


def step_counts(several: int) -> list[int]:
    """Steps per call that may be chosen, the fewest first."""
    return sorted({1, min(FEW, several), several})
