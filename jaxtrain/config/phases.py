"""The phases of a run: each trains a different model, starting from the previous phase's state.

`data.stages` changes sequence lengths, batch sizes and mixtures; it is independent of phases.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from jax.sharding import Mesh
from pydantic import JsonValue

from jaxtrain.config.load import validate
from jaxtrain.config.resolve import Resolved, check_structure
from jaxtrain.finetune import ReLoRAConfig
from jaxtrain.finetune.config import FullConfig
from jaxtrain.finetune.partition import flatten
from jaxtrain.model import Transformer, split
from jaxtrain.settings import UserError


class Decision(NamedTuple):
    """An event's decision to end a phase early; the rest of it trains another model."""

    step: int  # last step of the old model
    model: Mapping[str, JsonValue]  # fields of the model that change from then on


class Phase(NamedTuple):
    """A part of a run that trains one model."""

    config: Resolved  # the run's configuration with the phase's model
    start: int  # the step after which it begins
    end: int  # its last step
    grow: str | None = None  # entry of GROWTHS that makes its layers, or "adapters" (the state gets
    # ReLoRA's adapters); None in the first phase
    decided: tuple[Decision, ...] = ()  # the decisions that led to it, in order

    def cut(self, decision: Decision) -> tuple["Phase", "Phase"]:
        """Split the phase at a decision into the part before and the part after."""
        config = with_model(self.config, decision.model, f"step {decision.step}")
        rest = Phase(config, decision.step, self.end, "stack", (*self.decided, decision))
        return self._replace(end=decision.step), rest


def phases_of(c: Resolved, vocab_size: int, mesh: Mesh) -> list[Phase]:
    """The phases of a run (at least one).

    Raises UserError for a phase that cannot be trained, or cannot grow into the next one.
    """
    found = declared_phases(c)
    for phase in found[:-1]:
        check_structure(phase.config, phase.config.model, mesh)
    for number, (one, other) in enumerate(pairwise(found)):
        check_grows(one.config, other.config, vocab_size, f"train.phases[{number}].model")
    return found


def declared_phases(c: Resolved) -> list[Phase]:
    """The phases as configured. Raises UserError for one that ends too early or too late."""
    found, start, grow = [], 0, None
    if warm := full_rank_steps(c):
        found.append(Phase(full_rank(c), 0, min(warm, c.train.steps)))
        start, grow = warm, "adapters"
        if warm >= c.train.steps:
            return found
    for number, phase in enumerate(c.train.phases):
        field = f"train.phases[{number}]"
        if not start < phase.until < c.train.steps:
            raise UserError(
                f"{field}.until={phase.until}: a phase ends after the one before (step {start}) "
                f"and before the run (train.steps={c.train.steps})"
            )
        found.append(Phase(with_model(c, phase.model, field), start, phase.until, grow))
        start, grow = phase.until, phase.grow
    return [*found, Phase(c, start, c.train.steps, grow)]


def full_rank_steps(c: Resolved) -> int:
    """Steps of ReLoRA's full-rank warm start; 0 without ReLoRA."""
    return c.finetune.warm_start if isinstance(c.finetune, ReLoRAConfig) else 0


def full_rank(c: Resolved) -> Resolved:
    """The configuration of ReLoRA's warm start, which trains all parameters."""
    return c.model_copy(update={"finetune": FullConfig()})


def config_at(c: Resolved, step: int, decided: Sequence[Decision] = ()) -> Resolved:
    """The configuration with the model trained at `step`. decided: decisions taken in the run."""
    phases = declared_phases(c)
    phase = next((p for p in phases if step <= p.end), phases[-1])
    for decision in decided:
        if phase.start < decision.step < min(step, phase.end):
            phase = phase.cut(decision)[1]
    return phase.config


def with_model(c: Resolved, model: Mapping[str, JsonValue], field: str) -> Resolved:
    """The configuration with changed model fields. Its UserErrors begin with `field`."""
    tree = c.model_dump(mode="json")
    if unknown := sorted(model.keys() - tree["model"].keys()):
        raise UserError(f"{field}.model: there is no model.{unknown[0]}")
    try:
        return validate(Resolved, {**tree, "model": {**tree["model"], **model}})
    except UserError as error:
        raise UserError(f"{field}: {error.args[0]}") from None


def check_grows(one: Resolved, other: Resolved, vocab_size: int, field: str) -> None:
    """Raise UserError unless the next model has the same parameters, with at least as many
    layers."""
    before, after = (flatten(split(Transformer(c.model, vocab_size))[1]) for c in (one, other))
    for name in sorted(before.keys() ^ after.keys()):
        only = "this phase" if name in before else "the next phase"
        raise UserError(f"{field}: only {only} has {name}; phases share their parameters")
    for name, spec in before.items():
        sizes = zip(spec.axes, spec.shape, after[name].shape)
        if any(a != b and (axis != "layers" or a > b) for axis, a, b in sizes):
            raise UserError(
                f"{field}: {name} is {spec.shape} there and {after[name].shape} in the next phase; "
                "only the number of layers may grow"
            )
