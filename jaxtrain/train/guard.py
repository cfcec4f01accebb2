"""Guard of a run against non-finite values and loss spikes: bad steps are reported, never saved.

Each step computes its checks on the device (`train/checks.py`, `train/loss_spikes.py`). The host
reads them a fixed number of steps later, when the metrics of that step have been fetched anyway.
Thus nothing waits for the device, and all processes read them at the same step. The reaction
depends on the steps only, so that an interrupted run behaves the same way once resumed.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.model import path_name
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.metrics import MAX_IN_FLIGHT, MetricsWriter
from jaxtrain.settings import UserError
from jaxtrain.train.checks import Checks
from jaxtrain.train.config import LossSpike, ResolvedTrain
from jaxtrain.train.growth import Growth
from jaxtrain.train.loss_spikes import LossSpikes, from_plain, to_plain
from jaxtrain.train.program import shape_dtype_structs
from jaxtrain.train.restore import restored, saved_part
from jaxtrain.train.step import State, StepSpec


class DivergedError(UserError):
    """The loss, a gradient or an update is non-finite, or spikes, and the run cannot continue."""


ADVICE = "Lower the learning rate or set optim.clip_norm=1.0"


class Taken(NamedTuple):
    """A step that was taken, but whose checks are not read yet."""

    step: int
    drawn: int  # number of its batch, from 1
    loss: Any
    checks: Checks
    scale: Any  # loss scale of that step in float16; else None


class Return(NamedTuple):
    """A rollback to a checkpoint, and its reason."""

    step: int  # of the checkpoint
    why: str


class Guard:
    """Detects non-finite values and loss spikes, and decides which batches to skip.

    saved: the result of `position` in the checkpoint that the run resumes from. growth: of the
    phase; the guard never rolls back to a checkpoint before it.
    """

    def __init__(
        self,
        train: ResolvedTrain,
        spec: StepSpec,
        checkpoints: Checkpointer,
        saved: dict[str, Any] | None,
        growth: Growth | None = None,
    ):
        self.train, self.spec, self.checkpoints, self.growth = train, spec, checkpoints, growth
        paths = jax.tree_util.tree_flatten_with_path(spec.specs)[0]
        self.names = [path_name(path) for path, _ in paths]
        self.pending: deque[Taken] = deque()
        self.back: int | None = None  # checkpoint of the last rollback
        self.returns = 0  # consecutive rollbacks to it
        self.left_out: list[tuple[int, int]] = []  # ranges of skipped batches: first, last
        self.marks: dict[int, int] = {}  # checkpoint step -> batches drawn until then
        self._take_up(saved)

    def _take_up(self, saved: dict[str, Any] | None) -> None:
        mine = (saved or {}).get("guard", {})
        self.drawn: int = mine.get("drawn", 0)  # batches drawn, including skipped ones
        self.skips: int = mine.get("skips", 0)  # consecutive skipped updates
        self.spikes: dict[str, Any] | None = mine.get("spikes")
        self.left_out = sorted({*self.left_out, *map(tuple, mine.get("left_out", []))})
        self.used = self.drawn  # number of the last step's batch
        if mine:
            self.marks[mine["step"]] = self.drawn

    # ---- the data ----------------------------------------------------------------------------

    def draw[Batch](self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch that is not skipped."""
        while True:
            batch = next(batches)
            self.drawn += 1
            if not any(first <= self.drawn <= last for first, last in self.left_out):
                return batch

    def position(self, data: dict[str, Any], step: int, state: State) -> dict[str, Any]:
        """Return the data position with the guard's state, as small JSON for a checkpoint."""
        self.marks[step] = self.used
        mine = {"step": step, "drawn": self.used, "left_out": self.left_out, "skips": self.skips}
        window = state.extras.get(LossSpikes.name)
        spikes = None if window is None else to_plain(window)
        return {**data, "guard": mine | {"spikes": spikes}}

    def with_window(self, state: State) -> State:
        """Put the saved window of losses and gradient norms into the state."""
        if self.train.loss_spike is None:
            return state
        where = jax.tree.map(lambda x: x.sharding, state.step)
        spikes = from_plain(self.spikes, self.train.loss_spike.window)
        window = jax.device_put(jax.tree.map(np.asarray, spikes), where)
        return state._replace(extras={**state.extras, LossSpikes.name: window})

    # ---- judging -------------------------------------------------------------------------------

    def push(self, step: int, values: dict[str, Any]) -> None:
        """Queue a step for checking. Removes the checks from its metrics: they are not logged."""
        checks: Checks = values.pop("checks")
        for value in (checks.finite, checks.spike):
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self.used = self.drawn
        taken = Taken(step, self.drawn, values["loss"], checks, values.get("loss_scale"))
        self.pending.append(taken)

    def look(self, metrics: MetricsWriter, wait: bool = False) -> Return | None:
        """Check the steps that are done by now (wait: all of them); return a rollback if needed.

        Skipped updates become events in the metrics. Raises UserError if the run cannot continue.
        """
        if wait:
            metrics.flush()  # first, so that each step is timed when it is done
        while self.pending and (wait or len(self.pending) > MAX_IN_FLIGHT):
            taken = self.pending.popleft()
            finite = float(taken.checks.finite) == 1
            spike = None if taken.checks.spike is None else np.asarray(taken.checks.spike)
            if finite and (spike is None or not spike[0]):
                self.skips = 0
                continue
            if finite and spike is not None and self.train.loss_spike:
                found = self._spike(taken, spike, self.train.loss_spike)
            elif overflow := overflowed(self.names, taken, self.train.on_nonfinite):
                metrics.write(taken.step, "event", {"overflow": overflow})
                continue
            else:
                found = self._nonfinite(taken)
            if isinstance(found, Return):
                self.pending.clear()
                return found
            metrics.write(taken.step, "event", {"skip": found})
        return None

    def _nonfinite(self, taken: Taken) -> str | Return:
        what, where = culprit(self.names, taken)
        good, policy = self._newest(), self.train.on_nonfinite
        if policy == "rollback" and good is not None:
            return self._return(good, f"{what}; {where}", self.marks[good] + 1, taken.drawn)
        if policy == "skip" and not np.asarray(taken.checks.nonfinite).any():
            return self._skipped(f"{what}; {where}")
        advice = ADVICE
        if policy == "stop":
            advice += ", or train.on_nonfinite=rollback to roll back and skip the batches since"
        raise DivergedError(f"{what}; {last_good(good)}; {where}. {advice}")

    def _spike(self, taken: Taken, spike: np.ndarray, loss_spike: LossSpike) -> str | Return:
        what = (
            f"step {taken.step}: the loss is {float(taken.loss):.4g}, {spike[1]:.1f} standard "
            f"deviations above the mean of the last {loss_spike.window} steps, and the gradient "
            f"norm {spike[2]:.1f}"
        )
        if loss_spike.action == "skip":
            return self._skipped(what)
        self.checkpoints.wait()
        begun = self.growth.step if self.growth else 0
        steps = [s for s in self.checkpoints.steps() if begun <= s < taken.step]
        if not steps:
            return f"{what}; there is no earlier checkpoint to roll back to, so training continues"
        old = [s for s in steps if s <= taken.step - loss_spike.rollback_steps]
        first = max(1, taken.drawn - loss_spike.rollback_steps + 1)
        last = max(taken.drawn, first + loss_spike.skip_batches - 1)
        return self._return(max(old) if old else min(steps), what, first, last)

    def _skipped(self, what: str) -> str:
        self.skips += 1
        most = self.train.max_consecutive_skips
        if self.skips > most:
            raise DivergedError(
                f"{what}; the updates of {most} steps in a row before it were skipped "
                f"(train.max_consecutive_skips); {last_good(self._newest())}. {ADVICE}"
            )
        return f"{what}; its update is skipped"

    def _return(self, step: int, what: str, first: int, last: int) -> Return:
        """Roll back to a checkpoint, and skip the batches of these numbers from now on."""
        self.returns = self.returns + 1 if step == self.back else 1
        self.back, most = step, self.train.max_consecutive_skips
        if self.returns > most:
            raise DivergedError(
                f"{what}; the run rolled back to checkpoint {step} {most} times already "
                f"(train.max_consecutive_skips). {ADVICE}"
            )
        self.left_out = sorted({*self.left_out, (first, last)})
        without = (
            f"without the batches {first} to {last}" if last > first else f"without batch {first}"
        )
        return Return(step, f"{what}; rolled back to checkpoint {step}, continuing {without}")

    def _newest(self) -> int | None:
        """Return the newest checkpoint. All steps before a checkpoint had passed the checks."""
        self.checkpoints.wait()
        return self.checkpoints.latest()

    # ---- going back ----------------------------------------------------------------------------

    def go_back(
        self, to: Return, state: State, metrics: MetricsWriter, coordinator: Coordinator
    ) -> tuple[State, dict[str, Any]]:
        """Restore the state and data position of a checkpoint. Deletes later checkpoints and rows.

        `state` is deleted first: there is memory for one state only.
        """
        coordinator.begin(to.step)
        coordinator.compare({"the checkpoint to go back to": str(to.step)}, "processes disagree")
        self.checkpoints.delete_after(to.step)
        like = shape_dtype_structs(saved_part(state, self.spec))
        jax.tree.map(lambda x: x.delete(), state)
        state, position = restored(self.checkpoints, to.step, like, lambda line: None, self.growth)
        self._take_up(position)
        lost = metrics.rewind(to.step)
        metrics.write(to.step + 1, "event", {"rollback": to.why} | lost)
        return self.with_window(state), position


# ---- messages ----------------------------------------------------------------------------------


def last_good(step: int | None) -> str:
    return "no checkpoint was saved yet" if step is None else f"the last good checkpoint is {step}"


def culprit(names: list[str], taken: Taken) -> tuple[str, str]:
    """Describe a step's non-finite values (in the loss, else gradients, else update), and where."""
    loss, squares = float(taken.loss), np.asarray(taken.checks.gradient_squares)
    norms, bad = np.sqrt(squares), np.asarray(taken.checks.nonfinite)
    worst = int(np.argmax(np.where(np.isfinite(norms), norms, np.inf)))
    where = f"the largest gradient is that of {names[worst]} (norm {norms[worst]:.3g})"
    if not np.isfinite(loss):
        return f"step {taken.step}: the loss is {loss}", where
    if not np.isfinite(squares).all():
        count = int((~np.isfinite(squares)).sum())
        what = f"{count} of {len(names)} gradients are not finite (the loss is {loss:.4g})"
        return f"step {taken.step}: {what}", where
    worst = int(np.argmax(bad))
    what = f"the update made {int((bad > 0).sum())} of {len(names)} parameters nan or inf"
    return f"step {taken.step}: {what} (the loss is {loss:.4g})", f"most values of {names[worst]}"


def overflowed(names: list[str], taken: Taken, policy: str) -> str | None:
    """Return a message about a float16 overflow that loss scaling handles; None for other steps.

    Raises UserError if no smaller scale would help.
    """
    over = [
        n for n, x in zip(names, np.asarray(taken.checks.gradient_squares)) if not np.isfinite(x)
    ]
    if taken.scale is None or not over or np.asarray(taken.checks.nonfinite).any():
        return None
    scale, loss = float(taken.scale), float(taken.loss)
    if not np.isfinite(loss) and policy != "stop":
        return None
    more = f" and of {len(over) - 1} others" if len(over) > 1 else ""
    what = f"step {taken.step}: the gradient of {over[0]}{more} overflowed float16"
    if scale <= 1 or not np.isfinite(loss):
        why = "at loss scale 1" if np.isfinite(loss) else f"and the loss is {loss}"
        raise UserError(
            f"{what} {why}: the model has values above 65504, the largest in float16; set "
            "train.precision=bfloat16, or float32 where the device has no bfloat16"
        )
    return f"{what} at loss scale {scale:g}; skipped, and the scale halved"
