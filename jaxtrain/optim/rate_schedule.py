"""The schedule's position and factor at a step of the run.

Where steps differ in size (`data.batch_ramp`) the schedule goes over tokens: it counts in steps of
the whole batch, and a step of half the batch is half a step.
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
    """A schedule with what changes its steps. power: of a step's share, on the rates."""

    schedule: Schedule
    restarts: Restarts | None
    shares: Shares
    power: float

    def values(self, total_steps: int) -> dict[str, Any]:
        """Its numbers, as hyperparameters. UserError for a warm-up longer than the run."""
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
        """(the schedule's step, factor on the rates) at a step of the run, from 0."""
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
    """How many steps of the whole batch the first so many steps of a run are."""
    if not shares:
        return steps
    firsts, sizes = zip(*shares)
    ends = (*firsts[1:], steps)
    return sum(
        max(0, min(end, steps) - first) * size for first, end, size in zip(firsts, ends, sizes)
    )
