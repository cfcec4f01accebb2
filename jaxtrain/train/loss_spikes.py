"""Loss spikes: a loss or gradient norm far above those of the steps before.

There are two remedies: skip the update (OLMo 2, arXiv:2501.00656; MaxText's skip_step_on_spikes),
or roll back to a checkpoint before the spike and skip the batches around it (PaLM,
arXiv:2204.02311, section 5.1).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxtrain.config.resolve import Resolved
from jaxtrain.train.config import LossSpike
from jaxtrain.train.transforms import StepOutcome, StepTransform, Verdict
from jaxtrain.weights.params import Params, Specs


class Spikes(NamedTuple):
    """Losses and gradient norms of the last W steps, as ring buffers."""

    losses_W: Array
    norms_W: Array
    count: Array  # steps seen


class LossSpikes(StepTransform):
    """Detects spikes against a window of the last steps, and reports them in `Checks.spike`. Skips
    the update if `action` is skip. The window is saved with the data position."""

    name = "loss_spikes"
    has_state = True
    is_saved = False

    def __init__(self, config: LossSpike):
        self.config = config

    def init(self, params: Params, specs: Specs) -> Spikes:
        return no_spikes(self.config.window)

    def judge(self, state: Spikes, outcome: StepOutcome) -> Verdict:
        spike, window = detect_spike(state, outcome.loss, outcome.grad_norm, self.config)
        calm = outcome.finite & (spike[0] == 0)
        return Verdict(window, calm if self.config.action == "skip" else None, spike)


def no_spikes(window: int) -> Spikes:
    """Return an empty window."""
    zeros = jnp.zeros(window, jnp.float32)
    return Spikes(zeros, zeros, jnp.zeros((), jnp.int32))


def detect_spike(spikes: Spikes, loss: Array, norm: Array, c: LossSpike) -> tuple[Array, Spikes]:
    """Return (`Checks.spike`, the window with this step added if it is finite).

    A spike enters the window as well, so that a lasting higher level stops being a spike.
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


def to_plain(spikes: Spikes) -> dict[str, Any]:
    """Convert the window to small, exact JSON for a checkpoint's data position."""
    lists = {"losses": spikes.losses_W, "norms": spikes.norms_W}
    found: dict[str, Any] = {k: [float(x) for x in np.asarray(v)] for k, v in lists.items()}
    return found | {"count": int(spikes.count)}


def from_plain(saved: dict[str, Any] | None, window: int) -> Spikes:
    """Read the result of `to_plain`; an empty window if it is missing or of another length."""
    if not saved or len(saved["losses"]) != window:
        return no_spikes(window)
    losses_W, norms_W = (jnp.asarray(saved[name], jnp.float32) for name in ("losses", "norms"))
    return Spikes(losses_W, norms_W, jnp.asarray(saved["count"], jnp.int32))


def loss_spikes(c: Resolved, dtype: jnp.dtype) -> LossSpikes | None:
    return LossSpikes(c.train.loss_spike) if c.train.loss_spike else None
