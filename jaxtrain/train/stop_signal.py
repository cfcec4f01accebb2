"""Stopping on a signal, after the same step on all processes."""

import signal

from jaxtrain.cluster.coordinator import Coordinator


class StopSignal:
    """SIGTERM and SIGINT become a wish to stop after the step in hand; a second one is final.

    Of several processes, all stop after the same step, whichever was asked.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.wanted, self.coordinator = False, coordinator

    def ask(self) -> None:
        """Wish to stop after the step in hand, as a signal does."""
        self.wanted = True

    def after(self, step: int) -> bool:
        """Whether to stop after `step`; if not, the next one has begun."""
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
