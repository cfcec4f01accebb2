"""Features of a run: tables of step transforms, step wrappers and events.

A feature is an entry here and a file of its own. The loop and the step name no feature.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from jaxtrain.config.resolve import Resolved
from jaxtrain.data import Tokenizer
from jaxtrain.finetune import Partition
from jaxtrain.objectives import LossOptions, make_objective
from jaxtrain.optim import Optimizer
from jaxtrain.train.autofreeze import FreezeConverged, autofreeze
from jaxtrain.train.checks import skip_nonfinite
from jaxtrain.train.events import (
    Checkpoint,
    Event,
    ModelEvaluator,
    PhaseEnd,
    RowWriter,
    Samples,
    SavedModel,
    Validation,
)
from jaxtrain.train.executable_cache import origin_of
from jaxtrain.train.file_offload import file_offload
from jaxtrain.train.float8_scaling import float8
from jaxtrain.train.local_sgd import replicas
from jaxtrain.train.loss_scale import dynamic_loss_scale
from jaxtrain.train.loss_spikes import loss_spikes
from jaxtrain.train.plan import Plan
from jaxtrain.train.step import State, StepSpec
from jaxtrain.train.transforms import StepTransform

# (configuration, compute dtype) -> the feature's step transform; None if the feature is off.
TRANSFORMS: Sequence[Callable[[Resolved, jnp.dtype], StepTransform | None]] = (
    float8,
    dynamic_loss_scale,
    loss_spikes,
    skip_nonfinite,
    autofreeze,
)
# (step, configuration, mesh, resumed) -> the step wrapped by the feature; unchanged if it is off.
STEP_WRAPPERS: Sequence[Callable[[StepSpec, Resolved, Mesh, bool], StepSpec]] = (
    replicas,
    file_offload,
)


def make_transforms(c: Resolved, dtype: jnp.dtype) -> tuple[StepTransform, ...]:
    """Make the transforms that a configuration enables, in the table's order."""
    found = (make(c, dtype) for make in TRANSFORMS)
    return tuple(transform for transform in found if transform is not None)


def make_step_spec(
    c: Resolved,
    graphdef: nnx.GraphDef,
    partition: Partition,
    optimizer: Optimizer,
    dtype: jnp.dtype,
    bytes_V: Array | np.ndarray,
    pieces: tuple[bytes, ...] = (),
) -> StepSpec:
    """Make the step of a configuration, before `wrap_step`.

    bytes_V: number of text bytes of each token. pieces: the bytes themselves. dtype: for compute.
    """
    head = "fp8" if c.model.fp8 == "all" else None
    schedule = c.mesh.pipeline_repeats, c.mesh.pipeline_schedule
    options = LossOptions(c.train.z_loss, head, *schedule, c.train.steps, pieces)
    objective = make_objective(c.objective, options)
    return StepSpec(
        graphdef,
        partition.trainable,
        optimizer,
        dtype,
        bytes_V,
        c.optim.clip_norm,
        partition.join,
        c.mesh.zero,
        objective,
        make_transforms(c, dtype),
        draws=c.model.draws or objective.draws,
        batch_overlap=c.mesh.batch_overlap,
    )


def step_of(plan: Plan, tokenizer: Tokenizer) -> StepSpec:
    """Make the step of a phase, with all its features."""
    c, bytes_V = plan.config, tokenizer.token_bytes()
    parts = plan.graphdef, plan.partition, plan.optimizer, plan.dtype
    spec = make_step_spec(c, *parts, bytes_V, tokenizer.pieces)
    spec = wrap_step(spec, c, plan.mesh, plan.resumed)
    return spec._replace(origin=origin_of(c, tokenizer.pieces))


def wrap_step(spec: StepSpec, c: Resolved, mesh: Mesh, resumed: bool = False) -> StepSpec:
    """Apply the wrappers that the configuration enables. UserError if one cannot apply."""
    for wrap in STEP_WRAPPERS:
        spec = wrap(spec, c, mesh, resumed)
    return spec


def make_events(
    plan: Plan,
    end: PhaseEnd,
    save: Callable[[int, State], None],
    evaluator: ModelEvaluator,
    metrics: RowWriter,
) -> list[Event]:
    """Make the events of a phase, in the order in which they run at a step. end: of the phase."""
    c = plan.config
    return [
        *([FreezeConverged(c, c.train.autofreeze, end, metrics)] if c.train.autofreeze else []),
        Checkpoint(c.checkpoint, save),
        Validation(c, evaluator, metrics),
        SavedModel(evaluator, c.checkpoint.final),
        Samples(c.sample.every, evaluator),
    ]
