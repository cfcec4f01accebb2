"""Events: actions every N steps of a run and at its end. `features.make_events` lists them."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from pydantic import JsonValue

from jaxtrain.config.phases import Decision, Phase
from jaxtrain.config.resolve import Resolved
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.runs.metrics import MetricsWriter
from jaxtrain.train.evaluator import Evaluator
from jaxtrain.train.step import State
from jaxtrain.train.stop_signal import StopSignal


@runtime_checkable
class ModelEvaluator(Protocol):
    """Interface of `Evaluator`: validation, samples and the saved model of a state."""

    def validate(self, state: State, max_tokens: int | None = None) -> Mapping[str, Any]: ...
    def sample(self, state: State, step: int) -> None: ...
    def save_model(self, state: State) -> object: ...


@runtime_checkable
class RowWriter(Protocol):
    """Interface of `MetricsWriter` for the metrics rows of events."""

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> object: ...


class PhaseEnd:
    """The last step of a phase. An event may end the phase early, at the step at which it runs.

    Such an event comes before `Checkpoint` in the list and sets `must_be_sound`. The decision is
    thus saved with the state that led to it, and a resumed run follows it.
    """

    def __init__(self, phase: Phase):
        self.step, self.decided = phase.end, phase.decided

    def end(self, step: int, model: Mapping[str, JsonValue]) -> None:
        """End the phase with this step; the next phase has these fields of the model."""
        self.step, self.decided = step, (*self.decided, Decision(step, model))

    def saved(self) -> dict[str, tuple[Decision, ...]]:
        """Return small JSON for a checkpoint: a decision is [step, {field: value}]."""
        return {"decided": self.decided}


class Event:
    """every: steps between two runs; None: only `at_end`. At the run's last step only `at_end`."""

    must_be_sound = False  # the guard checks all steps before it first
    pauses = "events_s"  # goodput category of its time, one of `runs.goodput.PAUSES`

    def __init__(self, every: int | None):
        self.every = every

    def is_due(self, step: int, total_steps: int) -> bool:
        return self.every is not None and step % self.every == 0 and step < total_steps

    def run(self, step: int, state: State) -> None:
        """Run between two steps."""

    def at_end(self, step: int, state: State, finished: bool, sound: bool) -> None:
        """Run after the last step. finished: the whole run is done, not only this session of it.
        sound: no step is to be rolled back."""


# Makes an event for a caller of `train()`. The event may use the signal to stop after the step.
MakeEvent = Callable[[Resolved, Evaluator, MetricsWriter, StopSignal], Event]


class Checkpoint(Event):
    """Saves the state."""

    must_be_sound = True
    pauses = "checkpoint_s"

    def __init__(self, c: CheckpointConfig, save: Callable[[int, State], None]):
        super().__init__(c.every)
        self.save, self.final = save, c.final

    def run(self, step: int, state: State) -> None:
        self.save(step, state)

    def at_end(self, step: int, state: State, finished: bool, sound: bool) -> None:
        if sound and (self.final or not finished):
            self.run(step, state)


class Validation(Event):
    """Writes metrics of the held-out split: of `eval.tokens`, and at the end of all its tokens."""

    pauses = "validation_s"

    def __init__(self, c: Resolved, evaluator: ModelEvaluator, metrics: RowWriter):
        super().__init__(c.eval.every)
        self.tokens, self.evaluator, self.metrics = c.eval.tokens, evaluator, metrics

    def run(self, step: int, state: State) -> None:
        self._write(step, state, self.tokens)

    def at_end(self, step: int, state: State, finished: bool, sound: bool) -> None:
        if finished:
            self._write(step, state, None)

    def _write(self, step: int, state: State, max_tokens: int | None) -> None:
        if figures := self.evaluator.validate(state, max_tokens):
            self.metrics.write(step, "validation", figures)


class SavedModel(Event):
    """Writes `model/` at the end of the run, if wanted."""

    def __init__(self, evaluator: ModelEvaluator, wanted: bool):
        super().__init__(None)
        self.evaluator, self.wanted = evaluator, wanted

    def at_end(self, step: int, state: State, finished: bool, sound: bool) -> None:
        if finished and self.wanted:
            self.evaluator.save_model(state)


class Samples(Event):
    """Writes texts that the model generates."""

    pauses = "samples_s"

    def __init__(self, every: int | None, evaluator: ModelEvaluator):
        super().__init__(every)
        self.evaluator = evaluator

    def run(self, step: int, state: State) -> None:
        self.evaluator.sample(state, step)

    def at_end(self, step: int, state: State, finished: bool, sound: bool) -> None:
        if finished:
            self.run(step, state)
