"""Types of optimizers and their wrappers: named trees, parameter groups, wrappers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.weights.params import Params, ParamSpec

Number = int | float | jax.Array
Hyper = dict[str, Number]  # one group's hyperparameters: learning_rate, weight_decay, b1, ...
Hyperparams = dict[str, dict[str, Any]]  # of the run: "schedule" and, by group, "groups"
OptState = optax.OptState
Updates = optax.Updates
Transformation = optax.GradientTransformationExtraArgs
Make = Callable[[Hyper], optax.GradientTransformation]
Adjust = Callable[[Hyper, jax.Array, Hyper], Hyper]  # (peaks, step, schedule's values) -> now
EvalParams = Callable[[Any, Params], Params]  # of a group's state


class Restarts(NamedTuple):
    """A schedule of `length` steps that restarts at its step `first` each time that it ends."""

    first: int
    length: int
    total: int  # steps of the run

    def __call__(self, step: jax.Array) -> jax.Array:
        """The schedule's step at a step of the run."""
        since = (step - self.first) % (self.length - self.first)
        return jnp.where(step < self.first, step, self.first + since)


class RunPosition(NamedTuple):
    """Position of a step in the run."""

    step: jax.Array  # 0 at first
    total_steps: Number
    multiplier: Callable[[jax.Array], jax.Array]  # of the learning rate, at any step


class Wrapper(NamedTuple):
    """A modification of any optimizer that wraps each group's transformation.

    `wrap(tx, label)`: the new transformation. Its `update` gets `specs=`, the declarations of the
    group's parameters, and `hyper=`; `hyper[label]` has the group's rates and those of `peaks`.
    `by_rows`: False if it uses means or norms over whole arrays.
    `adjust(hyper, position)`: the rates of a step, if the wrapper's rates change over the run.
    `eval_params(state, params)`: the weights to evaluate, if not the trained ones. Such a wrapper
    must be the last, except before one with `over`. `validate_trained`: validate the trained
    weights too. `export_trained`: export the trained weights instead. `over(eval_params)`: the
    wrapper that averages the evaluation weights of the wrapper inside it.
    `keeps_zeros`: it makes weights exactly zero, so it must be the last, and nothing averages them.
    `metrics(states)`: metrics of a step, from the states of all groups; only the last wrapper's
    are logged.
    """

    wrap: Callable[[Transformation, str], Transformation]
    peaks: Mapping[str, float] = {}
    by_rows: bool = True
    eval_params: EvalParams | None = None
    validate_trained: bool = False
    export_trained: bool = False
    keeps_zeros: bool = False
    restarts: Restarts | None = None  # restarts of the learning-rate schedule
    adjust: Callable[[Hyper, RunPosition], Hyper] = lambda hyper, position: hyper
    over: Callable[[EvalParams], "Wrapper"] | None = None
    metrics: Callable[[Sequence[OptState]], dict[str, jax.Array]] | None = None


class ParamGroup(NamedTuple):
    """Update rule of the parameters of one role or group.

    `make(hyper)` builds the transformation from the current rates; `peaks` are their peak values.
    `adjust` changes rates other than the learning rate over the run.
    `mup_rule`: row of MUP_RULES; None if no rule is known.
    `matrices`: it updates declared matrices [..., in, out].
    `by_rows`: it updates each row of any other array independently, so also each layer of a stack.
    `eval_params(state, params)`: the weights to evaluate, if not the trained ones.
    """

    make: Make
    peaks: dict[str, float]
    adjust: Adjust = lambda hyper, step, schedule: hyper
    mup_rule: str | None = "adam"
    matrices: bool = False
    by_rows: bool = True
    eval_params: EvalParams | None = None
    wrappers: tuple[Wrapper, ...] = ()  # the innermost first


def is_layer_stack(spec: ParamSpec) -> bool:
    """Whether the first dim of a parameter is a stack of layers."""
    return spec.axes[:1] == ("layers",)


def apply_mup_multiplier(hyper: Hyper, factor: float) -> Hyper:
    """Multiply the learning rate by a muP factor; rate x decay stays the same."""
    if factor == 1:
        return hyper
    return {
        **hyper,
        "learning_rate": hyper["learning_rate"] * factor,
        "weight_decay": hyper["weight_decay"] / factor,
    }
