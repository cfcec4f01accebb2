"""What optimizers and their wrappers are made of: named trees, parameter groups, wrappers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.weights.params import Params, ParamSpec

Number = int | float | jax.Array
Hyper = dict[str, Number]  # of one group: learning_rate, weight_decay, b1, ...
Hyperparams = dict[str, dict[str, Any]]  # of the run: "schedule" and, by group, "groups"
OptState = optax.OptState
Updates = optax.Updates
Transformation = optax.GradientTransformationExtraArgs
Make = Callable[[Hyper], optax.GradientTransformation]
Adjust = Callable[[Hyper, jax.Array, Hyper], Hyper]  # (peaks, step, schedule's values) -> now
EvalParams = Callable[[Any, Params], Params]  # of a group's state


class Restarts(NamedTuple):
    """A schedule of `length` steps that goes on from step `first` each time that it is over."""

    first: int
    length: int
    total: int  # steps of the run

    def __call__(self, step: jax.Array) -> jax.Array:
        """The schedule's step."""
        since = (step - self.first) % (self.length - self.first)
        return jnp.where(step < self.first, step, self.first + since)


class RunPosition(NamedTuple):
    """Where in the run a step is."""

    step: jax.Array  # 0 at first
    total_steps: Number
    multiplier: Callable[[jax.Array], jax.Array]  # of the learning rate, at any step


class Wrapper(NamedTuple):
    """A change of any optimizer: each group's transformation becomes another one.

    `wrap(tx, label)`: the new transformation. Its `update` gets `specs=`, the declarations of the
    group's parameters, and `hyper=`; `hyper[label]` are the group's rates with those of `peaks`.
    `by_rows`: False if it takes means or norms over whole arrays.
    `adjust(hyper, position)`: the rates of a step, where those of the wrapper change over the run.
    `eval_params(state, params)`: the weights to evaluate, where they are not the trained ones.
    A wrapper that has them comes last; `validate_trained` and `export_trained` say where the
    trained weights are wanted as well. `over(eval_params)` is the wrapper that averages what the
    one inside of it evaluates.
    `keeps_zeros`: it makes weights exactly zero, so it comes last, and nothing averages them.
    `metrics(states)`: of a step, from the states of all groups; of the last wrapper alone.
    """

    wrap: Callable[[Transformation, str], Transformation]
    peaks: Mapping[str, float] = {}
    by_rows: bool = True
    eval_params: EvalParams | None = None
    validate_trained: bool = False
    export_trained: bool = False
    keeps_zeros: bool = False
    restarts: Restarts | None = None  # of the schedule
    adjust: Callable[[Hyper, RunPosition], Hyper] = lambda hyper, position: hyper
    over: Callable[[EvalParams], "Wrapper"] | None = None
    metrics: Callable[[Sequence[OptState]], dict[str, jax.Array]] | None = None


class ParamGroup(NamedTuple):
    """How the parameters of one role or group are updated.

    `make(hyper)` builds the transformation from the rates in force; `peaks` are their peak values.
    `adjust` changes other rates than the learning rate over the run.
    `mup_rule` is the row of MUP_RULES; None where no rule is known.
    `matrices`: it works on declared matrices [..., in, out].
    `by_rows`: it works on each row of any other array alone, and so on each layer of a stack.
    `eval_params(state, params)` are the weights to evaluate, where they are not the trained ones.
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
    """Whether the first dim of a parameter counts layers, each a parameter of its own."""
    return spec.axes[:1] == ("layers",)


def apply_mup_multiplier(hyper: Hyper, factor: float) -> Hyper:
    """The rate times a factor of the width; rate x decay stays as it is."""
    if factor == 1:
        return hyper
    return {
        **hyper,
        "learning_rate": hyper["learning_rate"] * factor,
        "weight_decay": hyper["weight_decay"] / factor,
    }
