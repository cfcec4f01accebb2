"""Step transforms: the hooks by which a feature's file extends a training step.

`train_step` calls the hooks of each transform of its `StepSpec`, in order. A feature overrides the
hooks that it needs; the defaults change nothing. A run without the feature has no such transform.
The state of a transform is `State.extras[name]`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, PyTree

from jaxtrain.weights.params import Params, Specs


class StepOutcome(NamedTuple):
    """A step's loss and gradient norm before its update, scalars."""

    loss: Array  # mean in nats; with replicas, the mean over them, so that all decide alike
    grad_norm: Array
    finite: Array  # bool: both are finite
    layer_squares: Callable[[], Array]  # squared gradient norms [L], computed only if called


class Verdict(NamedTuple):
    """A transform's verdict on a step before its update."""

    state: PyTree  # the transform's own state, for the next step
    accept: Array | None = None  # bool: take the update; None: no opinion
    report: Array | None = None  # for `Checks.spike`


class StepTransform:
    """Hooks of a feature in a step; the methods are pure functions of arrays."""

    name = ""  # key of its state
    has_state = False
    is_saved = True  # the state is in the checkpoint's state; else the feature saves it elsewhere
    rewinds = False  # a skipped step leaves its state unchanged

    def init(self, params: Params, specs: Specs) -> PyTree:
        """Return the state before the first step."""
        return None

    def grad_scale(self, state: PyTree) -> Array | None:
        """Return a factor on the loss before differentiation; None: no factor."""
        return None

    def prepare(self, params: Params, specs: Specs) -> PyTree:
        """Compute values once per step from the parameters in the compute dtype."""
        return None

    def statistics(self, state: PyTree, grad_scale: Array) -> PyTree:
        """Return inputs of the forward pass, whose gradients are the statistics of the step."""
        return None

    def wrap_params(
        self, params: Params, specs: Specs, prepared: PyTree, statistics: PyTree
    ) -> Params:
        """Wrap the parameters for the model."""
        return params

    def after_gradients(self, state: PyTree, seen: PyTree, grad_scale: Array) -> PyTree:
        """Update the state with the statistics that the step has seen."""
        return state

    def judge(self, state: PyTree, outcome: StepOutcome) -> Verdict:
        """Decide whether the update is taken, and return the state for the next step."""
        return Verdict(state)

    def metrics(self, state: PyTree) -> dict[str, Array]:
        """Return metrics of the state at the start of the step."""
        return {}

    def over_replicas(self, state: PyTree, pmax: Callable[[PyTree], PyTree]) -> PyTree:
        """Combine the replicas' states into one that they share; pmax: over the replicas."""
        return state
