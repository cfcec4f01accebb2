"""Parameter groups: each role or group of parameters gets its own transformation and rates.

An optimizer is a table `group -> Group`. A parameter belongs to the row of its declared group, or
else of its role. Rates are arguments of the compiled step (`hyper`), never constants in it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from jaxtrain.optim.schedule import Schedule, Trapezoid, multiplier, schedule_values
from jaxtrain.settings import Settings, UserError

Hyper = dict[str, Any]  # learning_rate, weight_decay, b1, ...: floats, or traced in the step
Adjust = Callable[[Hyper, jax.Array, Hyper], Hyper]  # (peaks, step, schedule's values) -> now


class OptimizerConfig(Settings):
    """What all optimizers have in common."""

    clip_norm: float | None = Field(
        None, gt=0, description="global gradient norm is clipped to this"
    )
    schedule: Schedule = Field(
        default_factory=lambda: Trapezoid.model_validate({"warmup_steps": 40, "final": 0.05}),
        description="learning rate over the run",
    )


class Group(NamedTuple):
    """`make` builds the transformation from the rates in force; `peaks` are their peak values."""

    make: Callable[[Hyper], optax.GradientTransformation]
    peaks: dict[str, float]
    adjust: Adjust = lambda hyper, step, schedule: hyper


class Optimizer(NamedTuple):
    """init(params) -> state; update(grads, state, params, step, knobs) -> updates, state.

    `rate(step, knobs)` is the matrices' learning rate, for the record. `knobs` holds every number
    of the run's optimizer (peaks and schedule); pass it to the compiled step as an argument.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, jax.Array, Any], tuple[Any, Any]]
    rate: Callable[[jax.Array, Any], jax.Array]
    knobs: dict[str, Any]


def with_hyper(
    label: str, make: Callable[[Hyper], optax.GradientTransformation], peaks: dict[str, float]
) -> optax.GradientTransformationExtraArgs:
    """A transformation rebuilt at each update from the rates in force."""

    def update(updates, state, params=None, **extra):
        updates, new = make(extra["hyper"][label]).update(updates, state, params)
        # float32 rates would promote the states of bfloat16 parameters
        return updates, jax.tree.map(lambda n, o: n.astype(o.dtype), new, state)

    return optax.GradientTransformationExtraArgs(make(dict(peaks)).init, update)


def label_of(path: tuple[Any, ...], spec: Any, table: dict[str, Group]) -> str:
    for label in (spec.group, spec.role):
        if label in table:
            return label
    name = "/".join(str(key.key) for key in path)
    raise UserError(
        f"optim: no group covers {name} (role {spec.role}); there are {', '.join(table)}"
    )


def build(c: OptimizerConfig, table: dict[str, Group], specs: Any, total_steps: int) -> Optimizer:
    """The optimizer of a parameter tree from its table of groups."""
    if c.schedule.warmup_steps > total_steps:
        raise UserError(
            f"optim.schedule.warmup_steps is {c.schedule.warmup_steps}, but the run has "
            f"{total_steps} steps: give at most that many"
        )
    labels = jax.tree_util.tree_map_with_path(lambda p, s: label_of(p, s, table), specs)
    used = {label: table[label] for label in sorted(set(jax.tree.leaves(labels)))}
    tx = optax.partition(
        {label: with_hyper(label, group.make, group.peaks) for label, group in used.items()}, labels
    )
    knobs = {
        "schedule": schedule_values(c.schedule, total_steps),
        "groups": {label: group.peaks for label, group in used.items()},
    }

    def update(grads, state, params, step, knobs):
        factor = multiplier(c.schedule, knobs["schedule"], step)
        hyper = {}
        for label, group in used.items():
            now = group.adjust(knobs["groups"][label], step, knobs["schedule"])
            hyper[label] = {**now, "learning_rate": now["learning_rate"] * factor}
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        return tx.update(grads, state, params, hyper=hyper)

    def rate(step, knobs):
        peak = knobs["groups"]["matrix"]["learning_rate"]
        return peak * multiplier(c.schedule, knobs["schedule"], step)

    return Optimizer(tx.init, update, rate, jax.tree.map(jnp.float32, knobs))
