"""The members of a population: guards, metrics, feeds and evaluators of all, with the interfaces
of a run of one model (`run_steps.py`)."""

import functools
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtrain_kernels.dispatch import target
from jaxtyping import PyTree
from rich.console import Console

from jaxtrain import data
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config.resolve import Resolved, largest_divisor
from jaxtrain.evaluation.evaluate import figures_of, held_out_batches, validation_sums
from jaxtrain.objectives import StepBatch
from jaxtrain.objectives.next_token import EvaluationSums, zero_sums
from jaxtrain.optim.types import Hyperparams
from jaxtrain.parallel import place_batch
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.metrics import MAX_IN_FLIGHT, MetricsRow, MetricsWriter
from jaxtrain.settings import UserError
from jaxtrain.train.evaluator import Evaluator
from jaxtrain.train.events import PhaseEnd
from jaxtrain.train.feed import Feed, Position
from jaxtrain.train.guard import Guard, Return
from jaxtrain.train.plan import Plan, TrainingData, open_metrics
from jaxtrain.train.program import MakeArrays, Program
from jaxtrain.train.recipes import CausalLM
from jaxtrain.train.step import State, StepSpec, train_step
from jaxtrain.weights.params import Params

# On a CPU, members are batched if a microbatch [rows, T, D] has at most this many values. A batch
# of 8 took 0.6 times the CPU time of 8 runs at 2^12 values, 1 to 1.9 times from 2^14 on (LOG.md).
SMALL_ON_CPU = 2**13


class Member:
    """One run of a population. failure: why it cannot continue; None while it can."""

    def __init__(self, plan: Plan, run_dir: Path, checkpoints: Checkpointer):
        self.plan, self.run_dir, self.checkpoints = plan, run_dir, checkpoints
        self.position: Position | None = None
        self.failure: str | None = None
        self.failed_at = 0  # step of the failure
        self.metrics: MetricsWriter | None = None  # None: not open

    @property
    def name(self) -> str:
        return self.plan.run.run.name


# ---- arrays ------------------------------------------------------------------------------------


@jax.jit
def member_of(stacked: PyTree, index: jax.Array) -> PyTree:
    """Return one member's tree of the stacked tree [N, ...]."""
    return jax.tree.map(lambda x: x[index], stacked)


@functools.partial(jax.jit, donate_argnums=0)
def with_member(stacked: PyTree, one: PyTree, index: jax.Array) -> PyTree:
    """Write one member's tree into the stacked tree, which is donated."""
    return jax.tree.map(lambda xs, x: xs.at[index].set(x), stacked, one)


def stack_states(members: int, make: Callable[[int], State]) -> State:
    """Stack the states of all members [N, ...], one at a time to limit the memory for copies."""
    first = make(0)
    stacked = jax.tree.map(lambda x: jnp.zeros((members, *x.shape), x.dtype), first)
    for i in range(members):
        stacked = with_member(stacked, first if i == 0 else make(i), i)
    return stacked


def host_members(values: Mapping[str, Any], members: int) -> list[dict[str, Any]]:
    """Split stacked values by member, on the host. Scalars without a leading dim go to each."""
    fetched = jax.device_get(dict(values))
    one = lambda i: jax.tree.map(lambda x: x[i] if np.ndim(x) else x, fetched)
    return [one(i) for i in range(members)]


# ---- the step ----------------------------------------------------------------------------------


def is_batched(c: Resolved) -> bool:
    """Whether members are a batch (vmap); else they run one by one inside the program (lax.map).

    A GPU runs N small kernels as one. On a CPU this pays only if starting an operation takes longer
    than the operation itself: a batch of larger operations exceeds the caches.
    """
    values = microbatch_rows(c) * c.train.sequence_length * c.model.width
    return target().platform != "cpu" or values <= SMALL_ON_CPU


def microbatch_rows(c: Resolved) -> int:
    """Return the rows of a microbatch on one device."""
    return largest_divisor(c.train.batch_size, c.train.device_batch_size)


def over_members(
    function: Callable[..., Any], axes: Sequence[int | None], batched: bool
) -> Callable[..., Any]:
    """Map a function of one member over all members: arguments of axis 0 are [N, ...]."""
    if batched:
        return jax.vmap(function, in_axes=tuple(axes))

    def one_after_another(*given: PyTree) -> PyTree:
        def one(own: list[PyTree]) -> PyTree:
            left = iter(own)
            return function(*(next(left) if axis == 0 else x for x, axis in zip(given, axes)))

        return jax.lax.map(one, [x for x, axis in zip(given, axes) if axis == 0])

    return one_after_another


def make_population_step(
    spec: StepSpec, mesh: Mesh, batched: bool, own_batches: bool = False
) -> jax.stages.Wrapped:
    """Compile `train_step` over states and hyperparameters [N, ...]; the old states are donated.

    batched: see `is_batched`. own_batches: batches are [N, microbatches, rows, T], one for each
    member; else all members share one.
    """
    axes = (0, 0 if own_batches else None, 0, None)
    many = over_members(functools.partial(train_step, spec), axes, batched)
    return jax.jit(many, donate_argnums=0, out_shardings=NamedSharding(mesh, P()))


class PopulationProgram(Program):
    """`train_step` of all members as one program over their states and hyperparameters.

    Batches are shared [B, T], or stacked [N, B, T] with one for each member.
    """

    def __init__(
        self,
        spec: StepSpec,
        plan: Plan,
        members: int,
        state: State,
        batch: data.Batch | data.PairBatch,
        hyperparams: Hyperparams,
    ):
        self.members, self.own_batches = members, batch.tokens_BT.ndim == 3
        try:
            super().__init__(spec._replace(origin=None), plan, state, batch, hyperparams, None)
        except UserError as error:
            raise UserError(f"a population of {members}: {error}; or train fewer at once") from None

    def make_step(self, spec: StepSpec) -> jax.stages.Wrapped:
        batched = is_batched(self.plan.config)
        return make_population_step(spec, self.plan.mesh, batched, self.own_batches)

    def types(self, batch: data.Batch | data.PairBatch) -> StepBatch:
        return self.shard_batch(batch)

    def shard_batch(
        self, batch: data.Batch | data.PairBatch, make_arrays: MakeArrays = place_batch
    ) -> StepBatch:
        if not self.own_batches:
            return super().shard_batch(batch, make_arrays)
        each = [
            super(PopulationProgram, self).shard_batch(one, make_arrays)
            for one in members_of(batch)
        ]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *each)


def members_of(batch: data.Batch | data.PairBatch) -> list[Any]:
    one = lambda i: jax.tree.map(lambda x: x[i], batch)
    return [one(i) for i in range(len(batch.tokens_BT))]


# ---- the data ----------------------------------------------------------------------------------


class PopulationFeed:
    """Batches of all members: shared, or stacked if their data seeds differ."""

    def __init__(
        self,
        members: Sequence[Member],
        training_data: TrainingData,
        recipe: CausalLM,
        guard: "PopulationGuard",
    ):
        self.members = members
        self.shared = len({m.plan.config.data.seed for m in members}) == 1
        filters = [guard] if self.shared else guard.guards
        self.feeds = [
            Feed(m.plan, training_data, recipe, judge, m.position)
            for m, judge in zip(members, filters, strict=False)
        ]

    def _joined(self, batches: list[Any]) -> Any:
        return batches[0] if self.shared else jax.tree.map(lambda *xs: np.stack(xs), *batches)

    def peek(self) -> data.Batch:
        return self._joined([feed.peek() for feed in self.feeds])

    def take(self) -> data.Batch:
        return self._joined([feed.take() for feed in self.feeds])

    def position(self, index: int) -> Position:
        """Return a member's position in the data."""
        return self.feeds[0 if self.shared else index].position

    def rewind(self, position: Position) -> None:
        raise NotImplementedError("members of a population do not go back")

    def statistics(self) -> dict[str, Any]:
        each = [feed.statistics() for feed in self.feeds]
        return each[0] if self.shared else {n: np.array([s[n] for s in each]) for n in each[0]}

    def ended(self) -> list[str]:
        return self.feeds[0].ended()

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()


# ---- metrics, guard, evaluation ----------------------------------------------------------------


class PopulationMetrics:
    """Metrics of all members. Values with a leading dim N have one entry for each member."""

    def __init__(self, members: Sequence[Member], start: int, facts: dict[str, Any]):
        self.members, self.log = members, members[0].plan.log
        self.total = members[0].plan.config.train.steps
        self._pending: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._stack = ExitStack()
        quiet = Console(file=io.StringIO())
        for m in members:
            if m.failure is None:
                m.metrics = open_metrics(m.plan, m.run_dir, start, facts, quiet)

    def __enter__(self) -> "PopulationMetrics":
        self._stack.__enter__()
        for m in self.members:
            if m.metrics is not None:
                self._stack.push(functools.partial(leave, m))
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.flush()
        self._stack.__exit__(*error)

    def push(self, step: int, values: Mapping[str, Any]) -> None:
        for value in values.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self._pending.append((step, values))
        while self._pending and (len(self._pending) > MAX_IN_FLIGHT or ready(self._pending[0][1])):
            self._fetch()

    def flush(self) -> None:
        while self._pending:
            self._fetch()

    def _fetch(self) -> None:
        step, values = self._pending.popleft()
        rows: list[MetricsRow] = []
        for m, own in zip(self.members, host_members(values, len(self.members)), strict=True):
            if m.metrics is not None:
                rows += m.metrics.push(step, own)
        if rows:
            speed = sum(row.get("tokens_per_s", 0.0) for row in rows)
            self._say(step, rows, "loss", f"  {speed:,.0f} tok/s of all" if speed else "")

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        self.flush()
        rows: list[MetricsRow] = []
        for m, own in zip(self.members, host_members(values, len(self.members)), strict=True):
            if m.metrics is not None:
                rows.append(m.metrics.write(step, kind, own))
        if kind == "validation":
            self._say(step, rows, "bpb", "")

    def _say(self, step: int, rows: Sequence[MetricsRow], name: str, more: str) -> None:
        found = [row[name] for row in rows if row.get(name) is not None]
        if found:
            span = f"{name} {min(found):.4f} to {max(found):.4f}"
            self.log(f"step {step:>5}/{self.total}  {len(found)} members  {span}{more}")

    @contextmanager
    def pause(self, kind: str = "events_s") -> Iterator[None]:
        self.flush()
        with ExitStack() as stack:
            for m in self.members:
                if m.metrics is not None:
                    stack.enter_context(m.metrics.pause(kind))
            yield


def leave(member: Member, *error: Any) -> None:
    """Close a member's metrics with the run's outcome, unless they are closed already."""
    if member.metrics is not None:
        member.metrics.__exit__(*error)


def ready(values: Mapping[str, Any]) -> bool:
    return all(x.is_ready() for x in values.values() if hasattr(x, "is_ready"))


class PopulationGuard:
    """The guards of all members. A member that cannot continue stops; the others continue."""

    def __init__(self, members: Sequence[Member], spec: StepSpec, end: PhaseEnd):
        self.members, self.end = members, end
        train = members[0].plan.config.train
        self.guards = [Guard(train, spec, m.checkpoints, m.position) for m in members]
        self._pending: deque[tuple[int, dict[str, Any]]] = deque()

    def draw[Batch](self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch of members that share batches; none is skipped."""
        for guard in self.guards[1:]:
            guard.drawn += 1
        return self.guards[0].draw(batches)

    def push(self, step: int, values: dict[str, Any]) -> None:
        pending = {"checks": values.pop("checks"), "loss": values["loss"]}
        if "loss_scale" in values:
            pending["loss_scale"] = values["loss_scale"]
        for leaf in jax.tree.leaves(pending):
            leaf.copy_to_host_async()
        self._pending.append((step, pending))

    def look(self, metrics: PopulationMetrics, wait: bool = False) -> Return | None:
        """Check the steps that are done by now (wait: all of them). Never rolls back."""
        if wait:
            metrics.flush()
        while self._pending and (wait or len(self._pending) > MAX_IN_FLIGHT):
            step, values = self._pending.popleft()
            each = host_members(values, len(self.members))
            for m, guard, own in zip(self.members, self.guards, each, strict=True):
                if m.metrics is not None:
                    self._judge(m, m.metrics, guard, step, own)
        if all(m.failure for m in self.members):
            self.end.step = min(self.end.step, max(m.failed_at for m in self.members))
        return None

    def _judge(
        self, m: Member, metrics: MetricsWriter, guard: Guard, step: int, own: dict[str, Any]
    ) -> None:
        guard.push(step, own)
        try:
            guard.look(metrics, wait=True)
        except UserError as error:
            m.failure, m.failed_at, m.metrics = str(error), step, None
            metrics.write(step, "event", {"diverged": m.failure})
            metrics.close(f"failed: UserError: {m.failure}")
            m.plan.log(f"{m.name}: {m.failure}; the other members continue")

    def go_back(
        self, to: Return, state: State, metrics: PopulationMetrics, coordinator: Coordinator
    ) -> tuple[State, Position]:
        raise NotImplementedError("members of a population do not go back")


class PopulationEvaluator:
    """Validates all members in one program; samples and saves them one by one."""

    def __init__(
        self,
        members: Sequence[Member],
        training_data: TrainingData,
        recipe: CausalLM,
        spec: StepSpec,
    ):
        self.members, self.recipe, self.spec = members, recipe, spec
        self.plan = members[0].plan
        self._weights = jax.jit(jax.vmap(spec.optimizer.eval_params))
        score = lambda params, batch, sums: recipe.scorer(params, batch, sums)
        self._score = jax.jit(over_members(score, (0, None, 0), is_batched(self.plan.config)))
        self._alone = [
            Evaluator(m.plan, training_data, recipe, spec, None, m.run_dir) for m in members
        ]
        self.last: list[dict[str, float]] = [{} for _ in members]

    def params(self, state: State) -> Params:
        """Return the evaluation weights [N, ...]."""
        return self._weights(state.params, state.optimizer)

    def _figures(self, params: Params, max_tokens: int | None) -> dict[str, np.ndarray]:
        store, c, mesh, count = self.recipe.store, self.plan.config, self.plan.mesh, len(self.last)
        assert store is not None
        batches = held_out_batches(store, c, mesh, self.recipe.change)
        zeros = jax.tree.map(lambda x: jnp.zeros(count, x.dtype), zero_sums())
        sums = validation_sums(self._score, params, batches, mesh, max_tokens, zeros)
        sums = jax.device_get(sums)
        each = [figures_of(EvaluationSums(*(x[i] for x in sums))) for i in range(count)]
        return {name: np.array([figures[name] for figures in each]) for name in each[0]}

    def validate(self, state: State, max_tokens: int | None = None) -> dict[str, np.ndarray]:
        """Compute metrics of the held-out split, each [N]; {} without one."""
        if self.recipe.store is None:
            return {}
        figures = self._figures(self.params(state), max_tokens)
        if self.spec.optimizer.validate_trained:
            trained = self._figures(self.spec.saved_params(state), max_tokens)
            figures |= {f"trained_{name}": values for name, values in trained.items()}
        for i, m in enumerate(self.members):
            if m.failure is None:
                self.last[i] = {name: float(values[i]) for name, values in figures.items()}
        return figures

    def sample(self, state: State, step: int) -> None:
        for _, evaluator, one in self._each(state):
            evaluator.sample(one, step)

    def save_model(self, state: State) -> None:
        for _, evaluator, one in self._each(state):
            evaluator.save_model(one)

    def _each(self, state: State) -> Iterator[tuple[Member, Evaluator, State]]:
        for i, m in enumerate(self.members):
            if m.failure is None:
                yield m, self._alone[i], member_of(state, i)
