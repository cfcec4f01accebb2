"""Stopping on a signal, after the same step on all processes."""

import signal

from jaxtrain.cluster.coordinator import Coordinator


class StopSignal:
    """SIGTERM and SIGINT request a stop after the current step; a second one has its usual effect.

    All processes stop after the same step, whichever of them got the signal.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.wanted, self.coordinator = False, coordinator

    def ask(self) -> None:
        """Request a stop after the current step, as a signal does."""
        self.wanted = True

    def after(self, step: int) -> bool:
        """Whether to stop after `step`; if not, the next step counts as begun."""
        return self.coordinator.should_stop(step, self.wanted)

    def __enter__(self) -> "StopSignal":
        self.before = {s: signal.signal(s, self._take) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: object) -> None:
        self.ask()
        signal.signal(number, self.before[signal.Signals(number)])
