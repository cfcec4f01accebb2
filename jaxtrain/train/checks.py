"""Checks of a step's values, computed on the device within the step: the host does not wait."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxtrain.config.resolve import Resolved
from jaxtrain.train.transforms import StepOutcome, StepTransform, Verdict
from jaxtrain.weights.params import Params


class Checks(NamedTuple):
    """Results of the checks, which a step returns with its metrics."""

    finite: Array  # 1.0 if the loss, all gradients and all updated parameters are finite
    gradient_squares: Array  # squared norm of each parameter's gradient
    nonfinite: Array  # number of non-finite values in each updated parameter
    # [3]: 1.0 for a spike; standard deviations above the mean of the loss, of the gradient norm
    spike: Array | None = None


class SkipNonfinite(StepTransform):
    """Skips the update of a step whose loss or gradients are nan or inf."""

    name = "skip_nonfinite"

    def judge(self, state: None, outcome: StepOutcome) -> Verdict:
        return Verdict(None, outcome.finite)


def nonfinite_values(params: Params) -> Array:
    """Count the non-finite values of each parameter, in one pass that XLA fuses with the update if
    it can."""
    leaves = jax.tree.leaves(params)
    # XLA would count a 16-bit parameter before its rounding, and write it in float32 for that.
    leaves = [p if p.dtype == jnp.float32 else jax.lax.optimization_barrier(p) for p in leaves]
    return jnp.stack([jnp.sum(~jnp.isfinite(p), dtype=jnp.float32) for p in leaves])


def with_values(checks: Checks, bad: Array) -> Checks:
    """Return the checks with these counts of non-finite values in the updated parameters."""
    return checks._replace(finite=checks.finite * (jnp.sum(bad) == 0), nonfinite=bad)


def skip_nonfinite(c: Resolved, dtype: jnp.dtype) -> SkipNonfinite | None:
    return SkipNonfinite() if c.train.on_nonfinite == "skip" else None
