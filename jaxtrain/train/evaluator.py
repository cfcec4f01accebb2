"""Uses of the weights other than training: validation, samples, the saved model."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from jaxtrain.inference.generate import LanguageModel, lower_samples, write_samples
from jaxtrain.model import cast
from jaxtrain.runs.saved import save_result
from jaxtrain.train.plan import Plan, TrainingData
from jaxtrain.train.program import BackgroundCompiler, shape_dtype_structs
from jaxtrain.train.recipes import Recipe
from jaxtrain.train.step import State, StepSpec
from jaxtrain.weights.params import Params


class Evaluator:
    """Validates, samples and saves the evaluation weights: the trained weights, or the optimizer's
    average of them."""

    def __init__(
        self,
        plan: Plan,
        training_data: TrainingData,
        recipe: Recipe,
        spec: StepSpec,
        frozen: Any,
        run_dir: Path,
    ):
        self.plan, self.data, self.recipe = plan, training_data, recipe
        self.spec, self.frozen, self.run_dir = spec, frozen, run_dir
        self._weights = jax.jit(spec.optimizer.eval_params)
        self._validate = recipe.validation(spec)
        self._programs: BackgroundCompiler | None = None
        self.last: dict[str, float] = {}  # metrics of the last validation

    def lower_in_background(self, state: State) -> None:
        """Lower validation and sampling while the step is compiled. The state may be shapes only.

        Only with one device. With several, loading a program onto one device waits for the program
        that runs there. That one waits for the other devices, whose next kernels may in turn wait
        for the load.
        """
        one = self.plan.mesh.size == 1
        self._programs = BackgroundCompiler(self.plan.mesh, dict(self._later(state)) if one else {})

    def compile_in_background(self, state: State) -> None:
        """Compile the lowered programs while steps run; lower them if nothing has yet."""
        if self._programs is None:
            self.lower_in_background(state)
        if self._programs is not None:
            self._programs.compile()

    def _later(self, state: State) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
        c, frozen = self.plan.config, shape_dtype_structs(self.frozen)
        params = self._shapes(self._weights, state.params, state.optimizer)
        if job := self.recipe.lower_validation(self.spec, params, frozen):
            yield "validation", job
        if c.sample.prompts:
            whole = self._shapes(self._computed, params)
            yield (
                "samples",
                functools.partial(lower_samples, self._model(whole), c, self.data.chat),
            )

    def _shapes(self, function: Callable[..., Params], *arguments: PyTree) -> Params:
        """Return the shapes of a function's result on a mesh of one device."""
        where = jax.sharding.NamedSharding(self.plan.mesh, jax.P())
        found = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), found)

    def _compiled(self, name: str) -> None:
        if self._programs is not None:
            self._programs.wait(name)

    def params(self, state: State) -> Params:
        """Return the evaluation weights."""
        return self._weights(state.params, state.optimizer)

    def _computed(self, params: Params) -> Params:
        """Return the whole model, trainable and frozen, in the compute dtype."""
        return self.spec.join(cast(params, self.spec.specs, self.spec.dtype), self.frozen)

    def validate(self, state: State, max_tokens: int | None = None) -> dict[str, float]:
        """Compute metrics of the held-out split, or of its first `max_tokens`; {} without one."""
        if self._validate is None:
            return {}
        self._compiled("validation")
        self.last = self._validate(self.params(state), self.frozen, max_tokens)
        if self.spec.optimizer.validate_trained:
            trained = self._validate(self.spec.saved_params(state), self.frozen, max_tokens)
            self.last |= {f"trained_{name}": value for name, value in trained.items()}
        return self.last

    def sample(self, state: State, step: int) -> None:
        """Write a file of texts that the model generates."""
        path = self.run_dir / "samples" / f"step_{step:06d}.txt"
        self._compiled("samples")
        whole = self._computed(self.params(state))
        write_samples(path, self._model(whole), self.plan.config, self.data.chat)

    def _model(self, whole: Params) -> LanguageModel:
        """Make the model that generates samples."""
        c = self.plan.config.model
        return LanguageModel(c, self.spec.graphdef, whole, self.data.tokenizer)

    def save_model(self, state: State) -> Params:
        """Save `model/`, for generate, serve, export and sharing; return the saved weights."""
        params, plan = self.params(state), self.plan
        if self.spec.optimizer.export_trained:
            params = self.spec.saved_params(state)
        folder = self.run_dir / "model"
        save_result(folder, plan.config, plan.partition, params, self.frozen, self.data.tokenizer)
        return params
