"""Step transforms: what a feature adds to a training step, in that feature's file.

`train_step` calls the hooks of each transform of its `StepSpec`, in their order. A hook that a
feature has no use for keeps the default, which changes nothing, and a run without the feature has
no transform of it at all. The state of a transform is `State.extras[name]`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, PyTree

from jaxtrain.weights.params import Params, Specs


class StepOutcome(NamedTuple):
    """What a step knows before its update: of the loss and of the gradients' norm, scalars."""

    loss: Array  # the mean, in nats; of replicas that decide alike, their mean
    grad_norm: Array
    finite: Array  # bool: both are
    layer_squares: Callable[[], Array]  # squared norms [L] of the gradients; made if it is called


class Verdict(NamedTuple):
    """What a transform says of a step before its update."""

    state: PyTree  # the transform's own state, for the next step
    accept: Array | None = None  # bool: take the update; None: no opinion
    report: Array | None = None  # for `Checks.spike`


class StepTransform:
    """A feature's part of a step; the methods are pure functions of arrays."""

    name = ""  # of its state
    has_state = False
    is_saved = True  # with the checkpoint's state; else its feature saves it otherwise
    rewinds = False  # its state goes back with a step that is left out

    def init(self, params: Params, specs: Specs) -> PyTree:
        """The state before the first step."""
        return None

    def grad_scale(self, state: PyTree) -> Array | None:
        """What the loss is multiplied by before it is differentiated; None: nothing."""
        return None

    def prepare(self, params: Params, specs: Specs) -> PyTree:
        """Made once a step from the parameters that the step computes with."""
        return None

    def statistics(self, state: PyTree, grad_scale: Array) -> PyTree:
        """What the forward pass reads; its gradient is what the step has seen."""
        return None

    def wrap_params(
        self, params: Params, specs: Specs, prepared: PyTree, statistics: PyTree
    ) -> Params:
        """The parameters as the model is given them."""
        return params

    def after_gradients(self, state: PyTree, seen: PyTree, grad_scale: Array) -> PyTree:
        """The state with what the step has seen."""
        return state

    def judge(self, state: PyTree, outcome: StepOutcome) -> Verdict:
        """Whether the update is taken, and the state for the next step."""
        return Verdict(state)

    def metrics(self, state: PyTree) -> dict[str, Array]:
        """Of the state at the beginning of the step."""
        return {}

    def over_replicas(self, state: PyTree, pmax: Callable[[PyTree], PyTree]) -> PyTree:
        """The state that replicas share, from each one's own; pmax: over them."""
        return state
