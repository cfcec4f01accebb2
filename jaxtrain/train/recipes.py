"""Recipes: what an objective needs outside of the step (data, reference models, validation)."""

import functools
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, runtime_checkable

from jaxtrain import data
from jaxtrain.evaluation.evaluate import (
    held_out_batches,
    lower_scorer,
    make_validation_step,
    validation_metrics,
)
from jaxtrain.objectives import PREFERENCES, StepBatch, make_row_change
from jaxtrain.train.plan import Plan, TrainingData
from jaxtrain.train.preference import (
    HELD_OUT,
    make_validation,
    preference_stores,
    reference_logprobs,
)
from jaxtrain.train.reference_model import make_reference, make_teacher
from jaxtrain.train.step import State, StepSpec
from jaxtrain.train.teacher_cache import open_teacher_cache, with_cached_teacher
from jaxtrain.weights.params import Params


@runtime_checkable
class Validator(Protocol):
    """(params, frozen, max_tokens) -> metrics of the held-out split; max_tokens None: of all."""

    def __call__(
        self, params: Params, frozen: Params | None, max_tokens: int | None
    ) -> dict[str, float]: ...


@runtime_checkable
class Recipe(Protocol):
    """Interface for training a kind of objective. `start` and `validation` run on the mesh."""

    @property
    def references(self) -> data.References | None:
        """Reference log-probs that are added to the batches."""
        ...

    @property
    def complete(self) -> data.Complete | None:
        """Function that adds another model's outputs to the batches; None if there is none."""
        ...

    def open(self, training_data: TrainingData) -> None:
        """Take the prepared data. UserError for data of another kind."""
        ...

    def start(
        self, spec: StepSpec, first: Future[State] | None, frozen: Params | None, run_dir: Path
    ) -> None:
        """Run before the first step. first: the initial state; None in a resumed run."""
        ...

    @property
    def prepare(self) -> Callable[[StepBatch], StepBatch] | None:
        """Function that converts a batch on the device to the step's input, if that differs."""
        ...

    def validation(self, spec: StepSpec) -> Validator | None:
        """Return the validation; None if nothing is held out."""
        ...

    def lower_validation(
        self, spec: StepSpec, params: Params, frozen: Params | None
    ) -> Callable[[], Callable[[], object]] | None:
        """Return a function that lowers the program of `validation` from shapes, and returns a
        function that compiles it. None: the program is compiled at its first call."""
        ...


class CausalLM:
    """Recipe for documents and conversations, to predict next or masked tokens."""

    references = None
    complete: data.Complete | None = None
    prepare: Callable[[StepBatch], StepBatch] | None = None

    def __init__(self, plan: Plan):
        self.plan = plan

    def open(self, training_data: TrainingData) -> None:
        self.store, c = training_data.prepared.validation, self.plan.config
        self.complete = open_teacher_cache(c, training_data.prepared)
        self.tokenizer = training_data.tokenizer
        self.change = make_row_change(c.objective, training_data.tokenizer, c.data.seed)

    def start(
        self, spec: StepSpec, first: Future[State] | None, frozen: Params | None, run_dir: Path
    ) -> None:
        self.scorer = make_validation_step(
            spec.graphdef, spec.specs, spec.dtype, spec.bytes_V, spec.join
        )
        objective = self.plan.config.objective
        self.prepare = None
        where = self.tokenizer, self.plan.mesh, spec.dtype
        if objective.name == "selective" and objective.reference:
            self.prepare = make_reference(objective.reference, *where)
        if objective.name == "distill":
            self.prepare = with_cached_teacher
            if self.complete is None:
                self.prepare = make_teacher(objective.teacher, *where)

    def validation(self, spec: StepSpec) -> Validator | None:
        store, config, mesh = self.store, self.plan.config, self.plan.mesh
        if store is None:
            return None

        def run(params: Params, frozen: Params | None, max_tokens: int | None) -> dict[str, float]:
            scorer = functools.partial(self.scorer, frozen=frozen)
            held_out = held_out_batches(store, config, mesh, self.change)
            return validation_metrics(scorer, params, held_out, mesh, max_tokens)

        return run

    def lower_validation(
        self, spec: StepSpec, params: Params, frozen: Params | None
    ) -> Callable[[], Callable[[], object]] | None:
        if self.store is None:
            return None
        held_out = held_out_batches(self.store, self.plan.config, self.plan.mesh, self.change)
        return functools.partial(
            lower_scorer, self.scorer, params, frozen, held_out, self.plan.mesh
        )


class Preference:
    """Recipe for pairs of answers, or for labelled answers (KTO)."""

    references: data.References | None = None
    complete = None
    prepare = None

    def __init__(self, plan: Plan):
        self.plan = plan

    def open(self, training_data: TrainingData) -> None:
        self.stores = preference_stores(training_data.prepared, self.plan.config)

    def start(
        self, spec: StepSpec, first: Future[State] | None, frozen: Params | None, run_dir: Path
    ) -> None:
        plan, file = self.plan, run_dir / "reference.npz"
        params = first.result().params if first else None
        self.references = reference_logprobs(
            spec, params, frozen, self.stores, plan.config, plan.mesh, file, plan.log
        )

    def validation(self, spec: StepSpec) -> Validator | None:
        if HELD_OUT not in self.stores:
            return None
        return make_validation(spec, self.stores, self.references, self.plan.config, self.plan.mesh)

    def lower_validation(
        self, spec: StepSpec, params: Params, frozen: Params | None
    ) -> Callable[[], Callable[[], object]] | None:
        return None


def make_recipe(plan: Plan) -> Recipe:
    """Make the recipe of the configured objective."""
    return Preference(plan) if plan.config.objective.name in PREFERENCES else CausalLM(plan)
