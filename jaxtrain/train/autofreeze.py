"""AutoFreeze: converged layers are frozen from the bottom up, by their gradient norms.

AutoFreeze (Liu et al. 2021, arXiv:2102.01386) compares each layer's gradient norm in an interval
with that of the interval before. A layer has converged if the relative change is below a percentile
of the changes of all trainable layers, and each layer under it has converged. The phase then ends,
and the next phase has that many `model.frozen_layers` (`frozen_layers.py`).

The paper takes the norm of the interval's summed gradients, which needs a copy of the parameters.
Here the norm is the root mean square of the steps' gradient norms: one value per layer.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxtrain.config.resolve import Resolved
from jaxtrain.model import ResolvedModel
from jaxtrain.train.config import AutoFreeze
from jaxtrain.train.events import Event, PhaseEnd, RowWriter
from jaxtrain.train.step import State
from jaxtrain.train.transforms import StepOutcome, StepTransform, Verdict
from jaxtrain.weights.params import Params, Specs


class LayerNorms(NamedTuple):
    """Norms of each layer's gradient, before clipping."""

    sums_L: Array  # sum of squared norms over the steps of this interval
    finite: Array  # steps in the sums: the finite ones
    taken: Array  # steps of this interval
    last_L: Array  # root mean square norm of the last whole interval
    before_L: Array  # root mean square norm of the interval before that


class AutoFreezeNorms(StepTransform):
    """Keeps the gradient norms of two intervals. A non-finite step only counts as a step taken."""

    name, has_state = "autofreeze", True

    def __init__(self, c: AutoFreeze, depth: int):
        self.every, self.depth = c.every, depth

    def init(self, params: Params, specs: Specs) -> LayerNorms:
        # A separate array for each field: the step donates them.
        count = lambda: jnp.zeros((), jnp.int32)
        norms = lambda: jnp.zeros(self.depth)
        return LayerNorms(norms(), count(), count(), norms(), norms())

    def judge(self, state: LayerNorms, outcome: StepOutcome) -> Verdict:
        sums_L = state.sums_L + jnp.where(outcome.finite, outcome.layer_squares(), 0.0)
        finite, taken = state.finite + outcome.finite, state.taken + 1
        whole = taken == self.every
        norms_L = jnp.sqrt(sums_L / jnp.maximum(finite, 1))
        return Verdict(
            LayerNorms(
                jnp.where(whole, 0.0, sums_L),
                jnp.where(whole, 0, finite),
                jnp.where(whole, 0, taken),
                jnp.where(whole, norms_L, state.last_L),
                jnp.where(whole, state.last_L, state.before_L),
            )
        )


def autofreeze(c: Resolved, dtype: jnp.dtype) -> AutoFreezeNorms | None:
    return AutoFreezeNorms(c.train.autofreeze, c.model.depth) if c.train.autofreeze else None


def converged(change_L: Float[np.ndarray, " L"], percentile: float) -> tuple[int, float]:
    """Return (number of converged layers from the bottom up, limit that their changes are below).

    change_L: relative changes of the trainable layers, from the bottom up.
    """
    limit = float(np.percentile(change_L, percentile))
    above = np.flatnonzero(~(change_L < limit))
    return int(above[0]) if above.size else len(change_L), limit


class FreezeConverged(Event):
    """Ends the phase when more layers have converged. The host syncs once per interval for it."""

    must_be_sound = True

    def __init__(self, c: Resolved, freeze: AutoFreeze, end: PhaseEnd, metrics: RowWriter):
        super().__init__(freeze.every)
        self.freeze, self.end, self.metrics = freeze, end, metrics
        self.model: ResolvedModel = c.model

    def run(self, step: int, state: State) -> None:
        frozen, depth = self.model.frozen_layers, self.model.depth
        most = min(self.freeze.max_layers or depth, depth - 1)
        norms: LayerNorms = state.extras[AutoFreezeNorms.name]
        last_L, before_L = np.asarray(norms.last_L), np.asarray(norms.before_L)
        if step < 2 * self.freeze.every or frozen >= most:
            return
        change_L = np.abs(last_L - before_L)[frozen:] / np.maximum(before_L[frozen:], 1e-30)
        count, limit = converged(change_L, self.freeze.percentile)
        now = min(frozen + count, most)
        if now == frozen:
            return
        changes = ", ".join(f"{x:.1%}" for x in change_L)
        which = f"layer {now - 1}" if now == frozen + 1 else f"layers {frozen} to {now - 1}"
        what = (
            f"{which} of 0 to {depth - 1} freeze: the gradient norms of layers {frozen} to "
            f"{depth - 1} changed by {changes} since the interval before; percentile "
            f"{self.freeze.percentile:g} is {limit:.1%}"
        )
        self.metrics.write(step, "event", {"freeze": what, "frozen_layers": now})
        self.end.end(step, {"frozen_layers": now})
