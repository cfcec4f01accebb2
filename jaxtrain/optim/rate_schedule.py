"""The schedule's position and factor at a step of the run.

If steps differ in size (`data.batch_ramp`), the schedule follows tokens: it counts steps of the
full batch, and a step of half the batch is half a step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.optim.schedule import Schedule, multiplier, schedule_values
from jaxtrain.optim.types import Hyperparams, Restarts
from jaxtrain.settings import UserError

Shares = Sequence[tuple[int, float]]  # (first step, size of a step over train.batch_size)


class RateSchedule(NamedTuple):
    """A schedule with restarts and step sizes. Rates are multiplied by share**power of a step."""

    schedule: Schedule
    restarts: Restarts | None
    shares: Shares
    power: float

    def values(self, total_steps: int) -> dict[str, Any]:
        """The schedule's hyperparameters. UserError for a warm-up longer than the run."""
        total = whole_steps(self.shares, total_steps)
        if self.schedule.warmup_steps > total:
            raise UserError(
                f"optim.schedule.warmup_steps is {self.schedule.warmup_steps}, but the run has "
                f"{total:g} steps: give at most that many"
            )
        length = self.restarts.length if self.restarts else total
        found = {"schedule": schedule_values(self.schedule, length)}
        if self.shares:
            firsts, sizes = zip(*self.shares)
            before = [whole_steps(self.shares, first) for first in firsts]
            table = {"first": firsts, "share": sizes, "before": before}
            found["batch"] = {name: np.float32(numbers) for name, numbers in table.items()}
        return found

    def at(self, step: jax.Array, hyperparams: Hyperparams) -> tuple[jax.Array, jax.Array]:
        """(step of the schedule, factor on the rates) at a step of the run, counted from 0."""
        step = self.restarts(step) if self.restarts else step
        if not self.shares:
            return step, multiplier(self.schedule, hyperparams["schedule"], step)
        v = hyperparams["batch"]
        index = jnp.sum(step >= v["first"]) - 1
        share = v["share"][index]
        step = v["before"][index] + (step - v["first"][index]) * share
        factor = multiplier(self.schedule, hyperparams["schedule"], step)
        return step, factor * share**self.power


def whole_steps(shares: Shares, steps: int) -> int | float:
    """The first `steps` steps of a run, in steps of the full batch."""
    if not shares:
        return steps
    firsts, sizes = zip(*shares)
    ends = (*firsts[1:], steps)
    return sum(
        max(0, min(end, steps) - first) * size for first, end, size in zip(firsts, ends, sizes)
    )
