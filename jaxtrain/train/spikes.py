"""Is a step sound? Found on the device, as part of the step, so that nothing waits for the answer.

A spike is a loss, or a gradient norm, far above those of the steps before. Two ways to treat one:
leave its update out (OLMo 2, arXiv:2501.00656; MaxText's skip_step_on_spikes), or go back to a
checkpoint before it and leave out the batches around it (PaLM, arXiv:2204.02311, section 5.1).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxtrain.train.config import LossSpike


class Spikes(NamedTuple):
    """Loss and gradient norm of the last steps, as a ring."""

    losses_W: Array
    norms_W: Array
    count: Array  # steps seen


class Checks(NamedTuple):
    """What a step says of itself, beside its metrics."""

    finite: Array  # 1.0 if the loss, all gradients and all updated parameters are
    gradient_squares: Array  # of each parameter's gradient
    nonfinite: Array  # values of each updated parameter that are not finite
    spike: Array | None = None  # 1.0 for a spike; deviations above the mean: loss, gradient norm


def no_spikes(window: int) -> Spikes:
    """A window without a step."""
    zeros = jnp.zeros(window, jnp.float32)
    return Spikes(zeros, zeros, jnp.zeros((), jnp.int32))


def judged(spikes: Spikes, loss: Array, norm: Array, c: LossSpike) -> tuple[Array, Spikes]:
    """(`Checks.spike`, the window with this step in it, unless that is not finite).

    A spike enters the window as well: a level that stays is no spike for ever.
    """
    W = len(spikes.losses_W)
    known = jnp.minimum(spikes.count, W)
    there = jnp.arange(W) < known

    def above(values_W: Array, value: Array) -> Array:
        mean = jnp.sum(jnp.where(there, values_W, 0.0)) / jnp.maximum(known, 1)
        squares = jnp.sum(jnp.where(there, jnp.square(values_W - mean), 0.0))
        deviation = jnp.sqrt(squares / jnp.maximum(known - 1, 1))
        return (value - mean) / jnp.maximum(deviation, 1e-12)

    far = jnp.stack([above(spikes.losses_W, loss), above(spikes.norms_W, norm)])
    most = far[0] if c.action == "rollback" else jnp.max(far)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    spike = finite & (most > c.deviations) & (known >= W // 2)
    at = spikes.count % W
    new = Spikes(
        spikes.losses_W.at[at].set(loss), spikes.norms_W.at[at].set(norm), spikes.count + 1
    )
    new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, spikes)
    return jnp.concatenate([spike.astype(jnp.float32)[None], far]), new


def nonfinite_values(params: Any) -> Array:
    """How many values of each parameter are not finite; one pass over them, fused with the update
    where XLA can."""
    leaves = jax.tree.leaves(params)
    return jnp.stack([jnp.sum(~jnp.isfinite(p), dtype=jnp.float32) for p in leaves])


def with_values(checks: Any, bad: Array) -> Checks:
    """The checks of a step after which these parameters' values are not finite."""
    return checks._replace(finite=checks.finite * (jnp.sum(bad) == 0), nonfinite=bad)


def to_plain(spikes: Spikes) -> dict[str, Any]:
    """For a checkpoint's position: small JSON, exact."""
    lists = {"losses": spikes.losses_W, "norms": spikes.norms_W}
    found: dict[str, Any] = {k: [float(x) for x in np.asarray(v)] for k, v in lists.items()}
    return found | {"count": int(spikes.count)}


def from_plain(saved: dict[str, Any] | None, window: int) -> Spikes:
    """What `to_plain` made; a window without a step if that was none, or of another length."""
    if not saved or len(saved["losses"]) != window:
        return no_spikes(window)
    losses_W, norms_W = (jnp.asarray(saved[name], jnp.float32) for name in ("losses", "norms"))
    return Spikes(losses_W, norms_W, jnp.asarray(saved["count"], jnp.int32))
