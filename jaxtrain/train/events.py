"""What happens every N steps of a run, and at its end. `features.make_events` lists them."""

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
    """What is made of a state beside training it, as in `Evaluator`."""

    def validate(self, state: State, max_tokens: int | None = None) -> Mapping[str, Any]: ...
    def sample(self, state: State, step: int) -> None: ...
    def save_model(self, state: State) -> object: ...


@runtime_checkable
class RowWriter(Protocol):
    """Where the rows of events go, as in `MetricsWriter`."""

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> object: ...


class PhaseEnd:
    """The last step of a phase. An event may bring it forward to the step that it runs at.

    Such an event stands before `Checkpoint` and asks for sound steps: the decision is saved with
    the state that it was made from, and a run that goes on from there follows it.
    """

    def __init__(self, phase: Phase):
        self.step, self.decided = phase.end, phase.decided

    def end(self, step: int, model: Mapping[str, JsonValue]) -> None:
        """The phase ends with this step; the next one has these fields of the model."""
        self.step, self.decided = step, (*self.decided, Decision(step, model))

    def saved(self) -> dict[str, tuple[Decision, ...]]:
        """Small JSON for a checkpoint: a decision is [step, {field: value}]."""
        return {"decided": self.decided}


class Event:
    """every: steps between two; None: only at the end. Never at the last step, which has an end."""

    must_be_sound = False  # the steps before it are looked at first
    pauses = "events_s"  # what its time counts as, one of `runs.goodput.PAUSES`

    def __init__(self, every: int | None):
        self.every = every

    def is_due(self, step: int, total_steps: int) -> bool:
        return self.every is not None and step % self.every == 0 and step < total_steps

    def run(self, step: int, state: State) -> None:
        """Between two steps."""

    def at_end(self, step: int, state: State, finished: bool, sound: bool) -> None:
        """After the last step. finished: of the run, not only of this process's part of it. sound:
        no step is to be taken back."""


# An event that the caller of `train()` adds. It may ask the signal to stop the run after the step.
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
    """Figures of the held-out split: of `eval.tokens`, and at the end of all its tokens."""

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
    """Writes `model/` at the end, where it is wanted."""

    def __init__(self, evaluator: ModelEvaluator, wanted: bool):
        super().__init__(None)
        self.evaluator, self.wanted = evaluator, wanted

    def at_end(self, step: int, state: State, finished: bool, sound: bool) -> None:
        if finished and self.wanted:
            self.evaluator.save_model(state)


class Samples(Event):
    """Texts that the model writes."""

    pauses = "samples_s"

    def __init__(self, every: int | None, evaluator: ModelEvaluator):
        super().__init__(every)
        self.evaluator = evaluator

    def run(self, step: int, state: State) -> None:
        self.evaluator.sample(state, step)

    def at_end(self, step: int, state: State, finished: bool, sound: bool) -> None:
        if finished:
            self.run(step, state)
