"""The steps of a phase: the loop of `train` after compilation.

Its collaborators are protocols, so that one model (`loop.py`) and a population (`population.py`)
share steps, events and rollbacks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtrain import data
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.train.events import Event, PhaseEnd
from jaxtrain.train.guard import Return
from jaxtrain.train.program import check_labels
from jaxtrain.train.step import State
from jaxtrain.train.stop_signal import StopSignal

AnyBatch = data.Batch | data.PairBatch


@runtime_checkable
class StepFeed(Protocol):
    """Interface of `Feed`: batches in order."""

    def take(self) -> AnyBatch: ...
    def rewind(self, position: dict[str, Any]) -> None: ...
    def statistics(self) -> dict[str, Any]: ...
    def ended(self) -> list[str]: ...


@runtime_checkable
class StepProgram(Protocol):
    """Interface of `Program`: a compiled step."""

    @property
    def facts(self) -> dict[str, Any]: ...
    def fits(self, batch: AnyBatch) -> bool: ...
    def __call__(self, state: State, batch: AnyBatch) -> tuple[State, dict[str, Any]]: ...


@runtime_checkable
class StepMetrics(Protocol):
    """Interface of `MetricsWriter`."""

    def push(self, step: int, values: Mapping[str, Any]) -> object: ...
    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> object: ...
    def pause(self, kind: str = ...) -> AbstractContextManager[None]: ...


@runtime_checkable
class StepGuard[Metrics](Protocol):
    """Interface of `Guard`: checks of steps, and rollbacks."""

    def push(self, step: int, values: dict[str, Any]) -> None: ...
    def look(self, metrics: Metrics, wait: bool = False) -> Return | None: ...
    def go_back(
        self, to: Return, state: State, metrics: Metrics, coordinator: Coordinator
    ) -> tuple[State, dict[str, Any]]: ...


@runtime_checkable
class StepCheckpoints(Protocol):
    """Interface of `Checkpointer`."""

    def check(self) -> None: ...


class Running(NamedTuple):
    """Collaborators of the steps of a phase."""

    total: int  # steps of the run
    end: PhaseEnd
    run_dir: Path  # for messages about a batch
    feed: StepFeed
    make_program: Callable[[State, AnyBatch], StepProgram]  # for batches of another shape
    guard: StepGuard[Any]  # takes `metrics`
    metrics: StepMetrics
    events: Sequence[Event]
    checkpoints: StepCheckpoints
    coordinator: Coordinator
    stop: StopSignal


def run_steps(
    parts: Running, program: StepProgram, state: State, step: int
) -> tuple[State, int, bool]:
    """Run steps after `step`; return (state, last step, whether the run stopped before its end)."""
    feed, guard, metrics, events, end = (
        parts.feed, parts.guard, parts.metrics, parts.events, parts.end
    )  # fmt: skip
    parts.coordinator.begin(step)
    while step < end.step and not parts.stop.after(step):
        batch, step = feed.take(), step + 1
        check_labels(batch.weights_BT, step, parts.run_dir)
        if not program.fits(batch):  # another shape: the next of `data.stages`
            with metrics.pause("start_s"):
                program = parts.make_program(state, batch)
            metrics.write(step - 1, "event", program.facts)
        state, values = program(state, batch)
        guard.push(step, values)
        metrics.push(step, values | feed.statistics())
        for text in feed.ended():
            metrics.write(step, "event", {"data": text})
        parts.checkpoints.check()
        due = [event for event in events if event.is_due(step, parts.total)]
        wait = step == end.step or any(event.must_be_sound for event in due)
        if back := guard.look(metrics, wait=wait):
            state, position = guard.go_back(back, state, metrics, parts.coordinator)
            feed.rewind(position)
            step = back.step
            continue
        for event in due:
            with metrics.pause(event.pauses):
                event.run(step, state)
    if back := guard.look(metrics, wait=True):  # the resumed run rolls back
        step = back.step
    for event in events:
        with metrics.pause(event.pauses):
            event.at_end(step, state, finished=step == parts.total, sound=not back)
    stopped = step < end.step or (step < parts.total and parts.stop.after(step))
    return state, step, stopped
