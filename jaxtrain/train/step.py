"""One training step: cast once, microbatches, gradients, optimizer. Pure, jitted, donated."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxtrain.finetune import join_full
from jaxtrain.model import cast, fp8_weights, initialize, path_name, with_fp8
from jaxtrain.model.moe import load_metrics
from jaxtrain.objectives import losses as objectives
from jaxtrain.optim import Optimizer
from jaxtrain.optim.offload import host_sharding, is_offloaded
from jaxtrain.parallel import (
    constrain_tree,
    partition_spec,
    pipeline_size,
    replicated_axes,
    shard_map,
)
from jaxtrain.train.config import LossSpike
from jaxtrain.train.spikes import Checks, Spikes, judged, no_spikes, nonfinite_values
from jaxtrain.weights.float8 import (
    AmaxHistory,
    amax_from_history,
    init_amax_history,
    update_amax_history,
)
from jaxtrain.weights.params import BALANCE_GROUPS

FIRST_SCALE = 2.0**15  # of float16's loss
GROWTH_INTERVAL = 2000  # good steps before the loss scale doubles (Micikevicius et al. 2018)


class LossScale(NamedTuple):
    """Dynamic scale of float16 gradients."""

    scale: Array
    good_steps: Array


class State(NamedTuple):
    """All that a step changes: what a checkpoint holds."""

    params: Any
    optimizer: Any
    step: Array  # optimizer steps done
    key: Array  # raw PRNG key of what a step may draw
    loss_scale: LossScale | None
    maxima: AmaxHistory | None = None  # the history that delayed scaling to float8 goes by
    spikes: Spikes | None = None  # the last steps' losses; saved with the position in the data


class Task(NamedTuple):
    """All that a step needs and does not change."""

    graphdef: Any
    specs: Any  # of the parameters that train
    optimizer: Optimizer
    dtype: jnp.dtype
    bytes_V: Array  # bytes of text of each token
    clip_norm: float | None = None
    z_loss: float = 0.0
    fp8: str | None = None  # "blocks", or "all" with the head
    join: Callable[[Any, Any], Any] = join_full  # (trained, frozen) -> the model's parameters
    zero: int = 3  # stage of ZeRO: which trees are split over the mesh's fsdp axis
    step: Callable[..., Any] | None = None  # in the place of `train_step`
    objective: objectives.Objective = objectives.NEXT_TOKEN
    repeats: int = 1  # rounds of a microbatch through the mesh's pipeline
    fp8_history: int | None = None  # steps whose maxima scale to float8; None: the tensor's own
    skip_nonfinite: bool = False  # leave out an update whose loss or gradients are not finite
    loss_spike: LossSpike | None = None
    agreed: Callable[[Any], Any] = lambda tree: tree  # the mean over replicas that decide alike


class Fixed(NamedTuple):
    """What the microbatches of a step share."""

    params: Any  # as the step computes with them
    copies: Any  # of the weights in float8
    maxima: Any  # that float8 is scaled by
    factor: Array  # of the gradients
    frozen: Any
    shared: Any  # the objective's


def init_state(task: Task, seed: int, params: Any = None) -> State:
    """Initial parameters (or those given) and optimizer state."""
    params = initialize(task.specs, seed) if params is None else params
    scale = None
    if task.dtype == jnp.float16:
        scale = LossScale(jnp.float32(FIRST_SCALE), jnp.zeros((), jnp.int32))
    key = jax.random.key_data(jax.random.key(seed))
    step, optimizer = jnp.zeros((), jnp.int32), task.optimizer.init(params)
    maxima = init_amax_history(task.specs, task.fp8_history) if task.fp8_history else None
    spikes = no_spikes(task.loss_spike.window) if task.loss_spike else None
    return State(params, optimizer, step, key, scale, maxima, spikes)


def state_shardings(task: Task, mesh: Mesh) -> State:
    """Parameters by the rules; an optimizer state as the parameter that its path ends in.

    With `optim.offload` that is in the host's memory; UserError where there is none.
    """
    specs = {
        path_name(path): spec for path, spec in jax.tree_util.tree_flatten_with_path(task.specs)[0]
    }

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        # Replicas (`jaxtrain.train.local_sgd`) are stacked in front, each on its own devices.
        front = ("data",) * any(getattr(key, "name", "") == "replicas" for key in path)
        for start in range(len(keys)):
            spec, shape = specs.get("/".join(keys[start:])), leaf.shape[len(front) :]
            if spec and len(spec.shape) == len(shape):
                place = P(*front, *partition_spec(spec.axes, shape, mesh))
                state = getattr(path[0], "name", "") == "optimizer"
                if state and task.optimizer.offload and is_offloaded(leaf):
                    return host_sharding(mesh, place)
                return NamedSharding(mesh, place)
        return NamedSharding(mesh, P(*front))

    shapes = jax.eval_shape(functools.partial(init_state, task, 0))
    return jax.tree_util.tree_map_with_path(place, shapes)


def compute_copy(task: Task, params: Any) -> Any:
    """The weights in the dtype and the places that a step computes with."""
    return constrain_tree("parameters", cast(params, task.specs, task.dtype), task.specs, task.zero)


def gradients(
    task: Task,
    params: Any,
    batch: Any,
    factor: Array,
    frozen: Any = None,
    shared: Any = None,
    past: AmaxHistory | None = None,
) -> tuple[tuple[Array, dict[str, Array]], Any, AmaxHistory | None]:
    """(Sum of the losses, the objective's other sums) and factor x the gradient of the first, over
    the microbatches [A, B, T] of a batch. shared: what the objective shares among them.

    past: the history to scale to float8 by; the third result is that with this batch's maxima."""
    copies = fp8_weights(params, task.specs) if task.fp8 else None
    maxima = None if past is None else amax_from_history(past, factor)
    fixed = Fixed(params, copies, maxima, factor, frozen, shared)
    if pipeline_size() > 1:
        sums, grads, seen = of_microbatch(task, fixed, batch)
    elif batch.tokens_BT.shape[0] == 1:
        sums, grads, seen = of_microbatch(task, fixed, jax.tree.map(lambda x: x[0], batch))
    elif axes := replicated_axes(task.zero):
        sums, grads, seen = met_once(task, fixed, batch, axes)
    else:
        sums, grads, seen = accumulated(task, fixed, batch)
    return sums, grads, None if past is None else update_amax_history(past, seen, factor)


def of_microbatch(
    task: Task, fixed: Fixed, microbatch: Any
) -> tuple[tuple[Array, dict[str, Array]], Any, Any]:
    """The sums, factor x the gradients, and the maxima seen, of a microbatch [B, T]."""

    def scaled(p: Any, most: Any) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        p = p if fixed.copies is None else with_fp8(p, fixed.copies, task.specs, most)
        head = "fp8" if task.fp8 == "all" else None
        loss, sums = task.objective.loss(
            task.graphdef,
            task.join(p, fixed.frozen),
            microbatch,
            fixed.shared,
            z_loss=task.z_loss,
            implementation=head,
            repeats=task.repeats,
        )
        return loss * fixed.factor, (loss, sums)

    (grads, seen), sums = jax.grad(scaled, (0, 1), has_aux=True)(fixed.params, fixed.maxima)
    return sums, constrain_tree("gradients", grads, task.specs, task.zero), seen


def accumulated(task: Task, fixed: Fixed, batch: Any) -> Any:
    """`of_microbatch` summed over the microbatches [A, B, T], in float32."""

    def body(total: Any, microbatch: Any) -> tuple[Any, None]:
        *parts, seen = of_microbatch(task, fixed, microbatch)
        added = jax.tree.map(lambda t, x: t + x.astype(t.dtype), total[:2], tuple(parts))
        return (*added, jax.tree.map(jnp.maximum, total[2], seen)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), fixed.params)
    zeros = constrain_tree("gradients", zeros, task.specs, task.zero)
    zero = jnp.zeros((), jnp.float32)
    start = (zero, dict.fromkeys(task.objective.sums, zero)), zeros
    return jax.lax.scan(body, (*start, jax.tree.map(jnp.zeros_like, fixed.maxima)), batch)[0]


def met_once(task: Task, fixed: Fixed, batch: Any, axes: tuple[str, ...]) -> Any:
    """`accumulated` by each device on its own rows; their sums meet after the last microbatch.

    Left to itself XLA adds up a gradient over the devices wherever it is made, so once for each
    microbatch. Devices exchange it in the weights' dtype, as without accumulation, and each keeps
    the part that its states are of.
    """
    mesh = jax.sharding.get_abstract_mesh()
    places = jax.tree.map(lambda s: partition_spec(s.axes, s.shape, mesh), task.specs)

    def summed(g: Array, p: Array, place: P) -> Array:
        g = g.astype(p.dtype)
        for axis in reversed(axes):
            if axis in place:
                g = jax.lax.psum_scatter(g, axis, scatter_dimension=place.index(axis), tiled=True)
            else:
                g = jax.lax.psum(g, axis)
        return g

    def own(fixed: Fixed, batch: Any) -> Any:
        sums, grads, seen = accumulated(task, fixed, batch)
        grads = jax.tree.map(summed, grads, fixed.params, places)
        return jax.lax.psum(sums, axes), grads, jax.lax.pmax(seen, axes)

    return shard_map(own, (P(), P(None, axes)), (P(), places, P()))(fixed, batch)


def train_step(
    task: Task, state: State, batch: Any, hyperparams: Any, frozen: Any = None
) -> tuple[State, dict[str, Any]]:
    """One optimizer step on a batch `[microbatches, rows, T]`; metrics stay on the device.

    The loss is the sum over all tokens (or pairs) of all microbatches divided by their number once,
    so that accumulation changes nothing. `frozen` is what of the model does not train. What is left
    out (see `Task.skip_nonfinite`, `loss_spike`) changes no parameter and no state, bit for bit.
    """
    count, text_bytes = task.objective.count(batch, task.bytes_V)
    scale = state.loss_scale
    factor = (1.0 if scale is None else scale.scale) / count
    compute = compute_copy(task, state.params)
    shared = task.objective.share(task.graphdef, task.join(compute, frozen), batch)
    (loss, sums), grads, maxima = gradients(
        task, compute, batch, factor, frozen, shared, state.maxima
    )
    load = load_metrics(grads)
    if scale is not None:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale.scale, grads)
    leaves = zip(jax.tree.leaves(grads), jax.tree.leaves(task.specs))
    # What is no gradient (an expert's load) counts nothing.
    squares = jnp.stack(
        [
            jnp.sum(jnp.square(g.astype(jnp.float32))) * (s.group not in BALANCE_GROUPS)
            for g, s in leaves
        ]
    )
    norm = jnp.sqrt(jnp.sum(squares))
    if task.clip_norm is not None:
        shrink = jnp.minimum(1.0, task.clip_norm / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: (g * shrink).astype(g.dtype), grads)
    figures = task.objective.figures(loss, count, text_bytes, sums, shared)
    seen_loss, seen_norm = task.agreed((figures["loss"], norm))
    finite = jnp.isfinite(seen_loss) & jnp.isfinite(seen_norm)
    good, spike, spikes = finite, None, state.spikes
    if task.loss_spike and spikes is not None:
        spike, spikes = judged(spikes, seen_loss, seen_norm, task.loss_spike)
        good = finite & (spike[0] == 0) if task.loss_spike.action == "skip" else finite
    skips = scale is not None or task.skip_nonfinite or good is not finite
    params, optimizer = task.optimizer.apply(
        grads, state.optimizer, state.params, state.step, hyperparams, good if skips else None
    )
    bad = nonfinite_values(params)
    checks = Checks((finite & (jnp.sum(bad) == 0)).astype(jnp.float32), squares, bad, spike)
    rate = task.optimizer.rate(state.step, hyperparams)
    metrics = {**figures, "grad_norm": norm, "lr": rate, "checks": checks, **load}
    if skips:
        metrics["skipped"] = 1.0 - good
        maxima = jax.tree.map(lambda n, o: jnp.where(good, n, o), maxima, state.maxima)
    scale_next = None
    if scale is not None:
        metrics["loss_scale"], scale_next = scale.scale, adjust_scale(scale, finite)
    after = State(params, optimizer, state.step + 1, state.key, scale_next, maxima, spikes)
    return after, metrics


def adjust_scale(old: LossScale, finite: Array) -> LossScale:
    """Halve the scale when a float16 gradient overflowed; else grow it at times."""
    scale, good = old
    grow = finite & (good + 1 >= GROWTH_INTERVAL)
    scale = jnp.where(finite, jnp.where(grow, scale * 2, scale), jnp.maximum(scale / 2, 1.0))
    good = jnp.where(finite & ~grow, good + 1, 0)
    return LossScale(scale, good)


def make_step(task: Task, mesh: Mesh) -> Any:
    """`train_step` compiled for the mesh; the old state's memory is reused."""
    return jax.jit(
        functools.partial(task.step or train_step, task),
        donate_argnums=0,
        out_shardings=(state_shardings(task, mesh), NamedSharding(mesh, P())),
    )
