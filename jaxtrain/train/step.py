"""One training step: cast once, microbatches, gradients, optimizer. Pure, jitted, donated.

Each feature is in its own file, behind the hooks of `StepTransform`. Replicas replace `train_step`
as a whole (`local_sgd.py`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from jaxtrain.finetune import join_full
from jaxtrain.model import cast, initialize, path_name
from jaxtrain.objectives import NEXT_TOKEN, Objective, StepBatch
from jaxtrain.optim import Optimizer
from jaxtrain.optim.offload import host_sharding, is_offloaded
from jaxtrain.optim.state_files import StateFiles
from jaxtrain.optim.types import Hyperparams
from jaxtrain.parallel import (
    constrain_tree,
    partition_spec,
    pipeline_size,
    replicated_axes,
    shard_map,
    split_rows,
)
from jaxtrain.train.checks import Checks, nonfinite_values
from jaxtrain.train.gradient_statistics import layer_squares, load_metrics, squared_norms
from jaxtrain.train.transforms import StepOutcome, StepTransform
from jaxtrain.weights.params import Params, Specs

Sums = tuple[Array, dict[str, Array]]  # the loss sum, and the objective's other sums


class State(NamedTuple):
    """Training state: all that a step changes and a checkpoint holds."""

    params: Params
    optimizer: PyTree
    step: Array  # optimizer steps done
    key: Array  # raw PRNG key for random values of a step
    extras: dict[str, Any]  # states of the transforms that have one, by name


class StepSpec(NamedTuple):
    """All that a step needs and does not change."""

    graphdef: nnx.GraphDef
    specs: Specs  # of the trainable parameters
    optimizer: Optimizer
    dtype: jnp.dtype  # of the compute
    bytes_V: Array | np.ndarray  # bytes of text of each token
    clip_norm: float | None = None
    join: Callable[[Params, Params | None], Params] = (
        join_full  # (trained, frozen) -> the model's parameters
    )
    zero: int = 3  # ZeRO stage: which trees are sharded over the mesh's fsdp axis
    objective: Objective = NEXT_TOKEN
    transforms: tuple[StepTransform, ...] = ()
    draws: bool = False  # the objective or the model needs a PRNG key
    batch_overlap: int = 1  # independent parts of a microbatch, which overlap communication
    step: Callable[..., Any] | None = None  # replaces `train_step`
    update_loop: "UpdateLoop | None" = None  # replaces the optimizer's `apply`
    agreed: Callable[[Any], Any] = lambda tree: tree  # mean over replicas, so that all decide alike
    facts: dict[str, float] = {}  # noqa: RUF012 - of the features, for the run's first row
    summary: str | None = None  # log line of the features
    saved_params: Callable[[State], Params] = lambda state: state.params  # for a checkpoint
    origin: str | None = None  # `executable_cache.origin_of`; None: the compiled step is not kept


class BeforeUpdate(NamedTuple):
    """Results of a step before its update."""

    grads: Params
    accept: Array | None  # whether to take the update; None: always
    finite: Array  # whether the loss and the gradients are finite
    gradient_squares: Array  # squared norm of each parameter's gradient
    metrics: dict[str, Any]
    states: dict[str, Any]  # states of the transforms after `judge`, by name
    report: Array | None  # of a transform, for the guard


class UpdateLoop(Protocol):
    """An update driven by the host, for states that a compiled program cannot access."""

    files: StateFiles  # copied into checkpoints

    @property
    def device_bytes(self) -> int:
        """Peak bytes of the states on a device."""
        ...

    @property
    def host_bytes(self) -> int:
        """Peak bytes of the states in the host's memory."""
        ...

    def begin(self, params: Params) -> None:
        """Write the initial states."""
        ...

    def update(
        self, state: State, before: BeforeUpdate, hyperparams: Hyperparams
    ) -> tuple[State, dict[str, Any]]:
        """Return the next state and the step's metrics. `state` is donated."""
        ...


class MicrobatchInputs(NamedTuple):
    """Inputs that all microbatches of a step share."""

    params: Params  # in the compute dtype and sharding
    prepared: dict[str, Any]  # `StepTransform.prepare`, by name
    statistics: dict[str, Any]  # `StepTransform.statistics`, by name; differentiated
    grad_scale: Array
    frozen: Params | None
    shared: PyTree  # `Objective.share`
    step: Array


def init_state(spec: StepSpec, seed: int | Array, params: Params | None = None) -> State:
    """Make the initial state: parameters (default initial values), optimizer, transforms."""
    params = initialize(spec.specs, seed) if params is None else params
    key = jax.random.key_data(jax.random.key(seed))
    step, optimizer = jnp.zeros((), jnp.int32), spec.optimizer.init(params)
    extras = {t.name: t.init(params, spec.specs) for t in spec.transforms if t.has_state}
    return State(params, optimizer, step, key, extras)


def state_shardings(spec: StepSpec, mesh: Mesh) -> State:
    """Return the state's shardings. An optimizer state is sharded as the parameter in its path.

    With `optim.offload` it is in the host's pinned memory; UserError if the device has none.
    """
    specs = {
        path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(spec.specs)[0]
    }

    def sharding_of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        # Replicas (`jaxtrain.train.local_sgd`) have a leading dim, each on its own devices.
        front = ("data",) * any(getattr(key, "name", "") == "replicas" for key in path)
        for start in range(len(keys)):
            own, shape = specs.get("/".join(keys[start:])), leaf.shape[len(front) :]
            if own and len(own.shape) == len(shape):
                axes = P(*front, *partition_spec(own.axes, shape, mesh))
                state = getattr(path[0], "name", "") == "optimizer"
                if state and spec.optimizer.offload and is_offloaded(leaf):
                    return host_sharding(mesh, axes)
                return NamedSharding(mesh, axes)
        return NamedSharding(mesh, P(*front))

    shapes = jax.eval_shape(functools.partial(init_state, spec, 0))
    return jax.tree_util.tree_map_with_path(sharding_of, shapes)


def cast_params(spec: StepSpec, params: Params) -> Params:
    """Cast the weights to the compute dtype and the sharding that a step computes with."""
    return constrain_tree("parameters", cast(params, spec.specs, spec.dtype), spec.specs, spec.zero)


def gradients(
    spec: StepSpec,
    params: Params,
    batch: StepBatch,
    grad_scale: Array,
    frozen: Params | None = None,
    shared: PyTree = None,
    extras: dict[str, Any] | None = None,
    key: Array | None = None,
    step: Array | int = 0,
) -> tuple[Sums, Params, dict[str, Any]]:
    """Return ((loss sum, the objective's other sums), grad_scale * grad(loss sum), extras) of a
    batch of microbatches [A, B, T].

    shared: result of `Objective.share`. extras: the transforms' states, returned after
    `after_gradients`. key: for random values of the model or the objective.
    """
    extras = extras or {}
    state_of = lambda t: extras.get(t.name)
    inputs = MicrobatchInputs(
        params,
        {t.name: t.prepare(params, spec.specs) for t in spec.transforms},
        {t.name: t.statistics(state_of(t), grad_scale) for t in spec.transforms},
        grad_scale,
        frozen,
        shared,
        jnp.asarray(step),
    )
    accumulation = batch.tokens_BT.shape[0]
    if pipeline_size() > 1:
        found = microbatch_gradients(spec, inputs, batch, key)
    elif accumulation == 1:
        found = microbatch_gradients(spec, inputs, jax.tree.map(lambda x: x[0], batch), key)
    else:
        keys = None if key is None else jax.random.split(key, accumulation)
        if axes := replicated_axes(spec.zero):
            found = accumulate_then_reduce(spec, inputs, batch, keys, axes)
        else:
            found = accumulate_gradients(spec, inputs, batch, keys)
    sums, grads, seen = found
    after = lambda t: t.after_gradients(extras[t.name], seen[t.name], grad_scale)
    return sums, grads, {t.name: after(t) for t in spec.transforms if t.name in extras}


def microbatch_gradients(
    spec: StepSpec, inputs: MicrobatchInputs, microbatch: StepBatch, key: Array | None
) -> tuple[Sums, Params, dict[str, Any]]:
    """Return the sums, the scaled gradients and the statistics seen of a microbatch [B, T]."""

    def scaled(p: Params, statistics: dict[str, Any]) -> tuple[Array, Sums]:
        for t in spec.transforms:
            p = t.wrap_params(p, spec.specs, inputs.prepared[t.name], statistics[t.name])
        weights = spec.join(p, inputs.frozen)
        found = [
            spec.objective.loss(
                spec.graphdef, weights, part, inputs.shared, step=inputs.step, key=part_key
            )
            for part, part_key in side_by_side(microbatch, key, spec.batch_overlap)
        ]
        loss, sums = jax.tree.map(lambda *parts: functools.reduce(jnp.add, parts), *found)
        return loss * inputs.grad_scale, (loss, sums)

    grads_of = jax.grad(scaled, (0, 1), has_aux=True)
    (grads, seen), sums = grads_of(inputs.params, inputs.statistics)
    return sums, constrain_tree("gradients", grads, spec.specs, spec.zero), seen


def side_by_side(
    microbatch: StepBatch, key: Array | None, parts: int
) -> list[tuple[StepBatch, Array | None]]:
    """Split a microbatch [B, T] into parts with equal shares of each device's rows, and a key each.

    The parts are independent, so that the compiler overlaps the collectives of one with the compute
    of another (Wang et al. 2024, Domino, arXiv:2409.15241).
    """
    if parts == 1:
        return [(microbatch, key)]
    keys = [None] * parts if key is None else list(jax.random.split(key, parts))
    return list(zip(split_rows(microbatch, parts), keys))


def accumulate_gradients(
    spec: StepSpec, inputs: MicrobatchInputs, batch: StepBatch, keys: Array | None
) -> tuple[Sums, Params, dict[str, Any]]:
    """Sum `microbatch_gradients` over the microbatches [A, B, T], in float32."""

    def body(total: Any, one: Any) -> tuple[Any, None]:
        *parts, seen = microbatch_gradients(spec, inputs, *one)
        added = jax.tree.map(lambda t, x: t + x.astype(t.dtype), total[:2], tuple(parts))
        return (*added, jax.tree.map(jnp.maximum, total[2], seen)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), inputs.params)
    zeros = constrain_tree("gradients", zeros, spec.specs, spec.zero)
    zero = jnp.zeros((), jnp.float32)
    start = (zero, dict.fromkeys(spec.objective.sums, zero)), zeros
    seen = jax.tree.map(jnp.zeros_like, inputs.statistics)
    return jax.lax.scan(body, (*start, seen), (batch, keys))[0]


def accumulate_then_reduce(
    spec: StepSpec,
    inputs: MicrobatchInputs,
    batch: StepBatch,
    keys: Array | None,
    axes: tuple[str, ...],
) -> tuple[Sums, Params, dict[str, Any]]:
    """Run `accumulate_gradients` on each device's own rows, and reduce once after the last
    microbatch, as DDP's `no_sync`.

    By default XLA reduces each microbatch's gradient. The reduction is in the weights' dtype, as
    without accumulation. Each device keeps the shard that its optimizer states need.
    """
    mesh = jax.sharding.get_abstract_mesh()
    places = jax.tree.map(lambda s: partition_spec(s.axes, s.shape, mesh), spec.specs)

    def reduced(g: Array, p: Array, spec: P) -> Array:
        g = g.astype(p.dtype)
        for axis in reversed(axes):
            if axis in spec:
                g = jax.lax.psum_scatter(g, axis, scatter_dimension=spec.index(axis), tiled=True)
            else:
                g = jax.lax.psum(g, axis)
        return g

    def own(inputs: MicrobatchInputs, batch: StepBatch, keys: Array | None) -> Any:
        sums, grads, seen = accumulate_gradients(spec, inputs, batch, keys)
        grads = jax.tree.map(reduced, grads, inputs.params, places)
        return jax.lax.psum(sums, axes), grads, jax.lax.pmax(seen, axes)

    split = shard_map(own, (P(), P(None, axes), P()), (P(), places, P()))
    return split(inputs, batch, keys)


def train_step(
    spec: StepSpec,
    state: State,
    batch: StepBatch,
    hyperparams: Hyperparams,
    frozen: Params | None = None,
) -> tuple[State, dict[str, Any]]:
    """Take one optimizer step on a batch `[microbatches, rows, T]`; metrics stay on the device.

    The loss is the sum over all tokens (or pairs) of all microbatches, divided once by their
    number, so that accumulation does not change it. frozen: parameters that do not train. A step
    that a transform does not accept leaves parameters and optimizer state bitwise unchanged.
    """
    found = before_update(spec, state, batch, hyperparams, frozen)
    params, optimizer = spec.optimizer.apply(
        found.grads, state.optimizer, state.params, state.step, hyperparams, found.accept
    )
    return after_update(spec, state, found, params, optimizer, hyperparams)


def before_update(
    spec: StepSpec,
    state: State,
    batch: StepBatch,
    hyperparams: Hyperparams,
    frozen: Params | None = None,
) -> BeforeUpdate:
    """Run the first part of `train_step`: clipped gradients, and the transforms' verdicts."""
    extras = state.extras
    key = None
    if spec.draws:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    count, text_bytes = spec.objective.count(batch, jnp.asarray(spec.bytes_V))
    scales = [t.grad_scale(extras[t.name]) for t in spec.transforms if t.name in extras]
    loss_scale = next((s for s in scales if s is not None), None)
    grad_scale = (1.0 if loss_scale is None else loss_scale) / count
    compute = cast_params(spec, state.params)
    shared = spec.objective.share(spec.graphdef, spec.join(compute, frozen), batch)
    (loss, sums), grads, after = gradients(
        spec,
        compute,
        spec.objective.microbatches(batch),
        grad_scale,
        frozen,
        shared,
        extras,
        key,
        state.step,
    )
    load = load_metrics(grads, spec.specs)
    if loss_scale is not None:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / loss_scale, grads)
    squares = squared_norms(grads, spec.specs)
    norm = jnp.sqrt(jnp.sum(squares))
    of_layers = functools.partial(layer_squares, grads, spec.specs)
    if spec.clip_norm is not None:
        shrink = jnp.minimum(1.0, spec.clip_norm / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: (g * shrink).astype(g.dtype), grads)
    metrics = spec.objective.metrics(loss, count, text_bytes, sums, shared)

    seen_loss, seen_norm = spec.agreed((metrics["loss"], norm))
    finite = jnp.isfinite(seen_loss) & jnp.isfinite(seen_norm)
    outcome = StepOutcome(seen_loss, seen_norm, finite, of_layers)
    states = {t.name: after.get(t.name) for t in spec.transforms}
    verdicts = {t.name: t.judge(states[t.name], outcome) for t in spec.transforms}
    accept = all_of([v.accept for v in verdicts.values()])
    report = next((v.report for v in verdicts.values() if v.report is not None), None)
    metrics = {**metrics, "grad_norm": norm, **load}
    kept_states = {name: verdicts[name].state for name in extras}
    return BeforeUpdate(grads, accept, finite, squares, metrics, kept_states, report)


def after_update(
    spec: StepSpec,
    state: State,
    found: BeforeUpdate,
    params: Params,
    optimizer: PyTree,
    hyperparams: Hyperparams,
) -> tuple[State, dict[str, Any]]:
    """Run the last part of `train_step`: make the next state and the metrics."""
    extras = state.extras
    bad = nonfinite_values(params)
    finite = (found.finite & (jnp.sum(bad) == 0)).astype(jnp.float32)
    checks = Checks(finite, found.gradient_squares, bad, found.report)
    rate = spec.optimizer.rate(state.step, hyperparams)
    metrics = {**found.metrics, "lr": rate, "checks": checks}
    metrics |= spec.optimizer.metrics(optimizer)
    for t in spec.transforms:
        metrics |= t.metrics(extras[t.name]) if t.name in extras else {}
    new = dict(found.states)
    if found.accept is not None:
        metrics["skipped"] = 1.0 - found.accept
        kept = functools.partial(jnp.where, found.accept)
        for name in [t.name for t in spec.transforms if t.rewinds and t.name in extras]:
            new[name] = jax.tree.map(kept, new[name], extras[name])
    return State(params, optimizer, state.step + 1, state.key, new), metrics


def all_of(opinions: Sequence[Array | None]) -> Array | None:
    """Whether all transforms accept the update; None if none has an opinion."""
    given = [opinion for opinion in opinions if opinion is not None]
    return functools.reduce(jnp.logical_and, given) if given else None


def make_step(spec: StepSpec, mesh: Mesh) -> jax.stages.Wrapped:
    """Jit `train_step` for the mesh; the old state is donated.

    With an update loop, jit `before_update`, which does not change the state.
    """
    if spec.update_loop:
        return jax.jit(functools.partial(before_update, spec))
    return jax.jit(
        functools.partial(spec.step or train_step, spec),
        donate_argnums=0,
        out_shardings=(state_shardings(spec, mesh), NamedSharding(mesh, P())),
    )
