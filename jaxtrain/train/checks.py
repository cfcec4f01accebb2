"""Is a step sound? Found on the device, as part of the step: nothing waits for the answer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxtrain.config.resolve import Resolved
from jaxtrain.train.transforms import StepOutcome, StepTransform, Verdict
from jaxtrain.weights.params import Params


class Checks(NamedTuple):
    """What a step says of itself, beside its metrics."""

    finite: Array  # 1.0 if the loss, all gradients and all updated parameters are
    gradient_squares: Array  # of each parameter's gradient
    nonfinite: Array  # values of each updated parameter that are not finite
    spike: Array | None = None  # 1.0 for a spike; deviations above the mean: loss, gradient norm


class SkipNonfinite(StepTransform):
    """Leaves out the update of a step whose loss or gradients are nan or inf."""

    name = "skip_nonfinite"

    def judge(self, state: None, outcome: StepOutcome) -> Verdict:
        return Verdict(None, outcome.finite)


def nonfinite_values(params: Params) -> Array:
    """How many values of each parameter are not finite; one pass over them, fused with the update
    where XLA can."""
    leaves = jax.tree.leaves(params)
    return jnp.stack([jnp.sum(~jnp.isfinite(p), dtype=jnp.float32) for p in leaves])


def with_values(checks: Checks, bad: Array) -> Checks:
    """The checks of a step after which these parameters' values are not finite."""
    return checks._replace(finite=checks.finite * (jnp.sum(bad) == 0), nonfinite=bad)


def skip_nonfinite(c: Resolved, dtype: jnp.dtype) -> SkipNonfinite | None:
    return SkipNonfinite() if c.train.on_nonfinite == "skip" else None
