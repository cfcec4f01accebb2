"""Population training: many small models at once on one device, in one compiled step.

A small model leaves most of a device idle: its matrices are small, and launching a kernel may take
as long as the kernel. N models that differ only in seeds and optimizer hyperparameters are one
program with a leading dim N. Each is a run with its own run directory, metrics, checkpoints and
model.
"""

import contextlib
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config import Config
from jaxtrain.optim.types import Hyperparams
from jaxtrain.runs.checkpoint import Checkpointer, no_room
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.lock import lock_run
from jaxtrain.runs.report import write_report
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import full_disk_explained, write_json
from jaxtrain.train.events import PhaseEnd
from jaxtrain.train.features import make_events, step_of
from jaxtrain.train.loop import TrainResult
from jaxtrain.train.plan import Plan, RunLog, TrainingData, make_plans, prepare_data
from jaxtrain.train.population_checks import check_configs, check_plans, check_step
from jaxtrain.train.population_members import (
    Member,
    PopulationEvaluator,
    PopulationFeed,
    PopulationGuard,
    PopulationMetrics,
    PopulationProgram,
    is_batched,
    member_of,
    stack_states,
)
from jaxtrain.train.preemption import watched_for_preemption
from jaxtrain.train.program import out_of_memory_explained
from jaxtrain.train.recipes import make_recipe
from jaxtrain.train.restore import non_param_state, restored, saved_part, shapes_of
from jaxtrain.train.run_directory import check_writable, open_run
from jaxtrain.train.run_steps import Running, run_steps
from jaxtrain.train.step import State, StepSpec, init_state, state_shardings
from jaxtrain.train.stop_signal import StopSignal


def train_population(
    configs: Sequence[Config], coordinator: Coordinator | None = None
) -> list[TrainResult]:
    """Train or resume N runs at once on one device; return their results in the same order.

    Configurations may differ only in run.name, run.directory, run.seed, data.seed and the optimizer
    hyperparameters of `population_checks.TRACED`: learning rates, weight decay, betas, momentum,
    values of the schedule. Each run has its own ordinary run directory. A run that diverges stops,
    with `TrainResult.failure`, and the others continue. The same call resumes from the newest
    checkpoint that all runs have. Before training, raises UserError for the first field in which
    members may not differ, and for what a population does not support.
    """
    coordinator = coordinator or Coordinator()
    check_configs(configs, coordinator)
    with contextlib.ExitStack() as stack:
        for c in configs:
            check_writable(c.run_dir)
            stack.enter_context(full_disk_explained(functools.partial(no_room, c.run_dir)))
            patience = max(100.0, c.processes.heartbeat_timeout)
            stack.enter_context(lock_run(c.run_dir, coordinator, patience))
        log = RunLog(coordinator)
        quiet = RunLog(coordinator, quiet=True)
        plans = [make_plans(c, coordinator, quiet if i else log)[-1] for i, c in enumerate(configs)]
        check_plans(plans)
        data = prepare_data(configs[0], plans[0], log)
        results = train_members([plan._replace(log=log) for plan in plans[:1]] + plans[1:], data)
        for result in results:
            write_report(result.directory)
    for result in results:
        state = result.failure or ("stopped, the same call goes on" if result.stopped else "done")
        log(f"member   {result.directory}: step {result.step}, {state}")
    return results


def train_members(plans: Sequence[Plan], data: TrainingData) -> list[TrainResult]:
    """Train the runs of these plans, each a single phase, to their end."""
    # ---- the step --------------------------------------------------------------------------------
    first, c, coordinator = plans[0], plans[0].config, plans[0].coordinator
    recipe, spec = make_recipe(first), step_of(first, data.tokenizer)
    recipe.open(data)
    with jax.set_mesh(first.mesh), contextlib.ExitStack() as stack:
        recipe.start(spec, None, None, first.run.run_dir)
        recipe = check_step(spec, recipe, plans)
        members = []
        for plan in plans:
            run_dir = open_run(plan.run, data.tokenizer, data.corpus, coordinator)
            members.append(
                Member(plan, run_dir, stack.enter_context(Checkpointer(run_dir, c.checkpoint)))
            )
        # ---- state: initial, or restored -----------------------------------------------------
        start = common_step(members, c.checkpoint.every)
        state = begin(members, spec, start)
        end = PhaseEnd(first.phase)
        guard = PopulationGuard(members, spec, end)
        what = "resume" if start else "train"
        first.log(f"{what:8s} {len(members)} members at once: steps {start} to {end.step}")
        feed = PopulationFeed(members, data, recipe, guard)
        for m in members:
            write_json(m.run_dir / "data.json", data.corpus)
        # ---- compile -------------------------------------------------------------------------
        hyperparams = stacked_hyperparams(plans)
        make_program = functools.partial(
            PopulationProgram, spec, first, len(members), hyperparams=hyperparams
        )
        evaluator = PopulationEvaluator(members, data, recipe, spec)
        begun = time.perf_counter()
        program = make_program(state, feed.peek())
        facts = program.facts | {"compile_s": time.perf_counter() - begun}
        how = "as one batch" if is_batched(c) else "one after the other inside the step"
        first.log(f"compile  {facts['compile_s']:.0f} s; members are computed {how}")
        facts |= {"population": len(members)}

        def save(step: int, state: State) -> None:
            for i, m in enumerate(members):
                if m.failure is None:
                    one = member_of(state, i)
                    rest = non_param_state(saved_part(one, spec))
                    where = guard.guards[i].position(feed.position(i), step, one) | end.saved()
                    m.checkpoints.save(step, spec.saved_params(one), rest, where)

        # ---- steps -----------------------------------------------------------------------------
        with (
            contextlib.closing(feed),
            StopSignal(coordinator) as stop,
            watched_for_preemption(c.run.preemption, stop.ask),
            out_of_memory_explained(c, program.compiled),
            PopulationMetrics(members, start, spec.facts | facts) as metrics,
        ):
            events = make_events(first, end, save, evaluator, metrics)
            parts = Running(
                c.train.steps, end, members[0].run_dir, feed, make_program, guard, metrics, events,
                AllCheckpoints(members), coordinator, stop,
            )  # fmt: skip
            state, step, stopped = run_steps(parts, program, state, start)
        AllCheckpoints(members).wait()
        params = evaluator.params(state)
        return [
            TrainResult(member_of(params, i), evaluator.last[i], m.run_dir, step, stopped)
            if m.failure is None
            else TrainResult(
                member_of(params, i), evaluator.last[i], m.run_dir, m.failed_at, False, m.failure
            )
            for i, m in enumerate(members)
        ]


class AllCheckpoints:
    """The checkpoints of all members, with the interface of one run's checkpoints."""

    def __init__(self, members: Sequence[Member]):
        self.members = members

    def check(self) -> None:
        for m in self.members:
            m.checkpoints.check()

    def wait(self) -> None:
        for m in self.members:
            m.checkpoints.wait()


def stacked_hyperparams(plans: Sequence[Plan]) -> Hyperparams:
    """Stack the optimizer hyperparameters of all members [N, ...], on the device."""
    each = [plan.optimizer.hyperparams for plan in plans]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    everywhere = jax.sharding.NamedSharding(plans[0].mesh, jax.P())
    return jax.device_put(stacked, everywhere)


def common_step(members: Sequence[Member], every: int | None) -> int:
    """Return the newest step from which every member can continue; 0 for a new population.

    A member that diverged before keeps its index, so that the program stays the same. It counts as
    failed again if it has no checkpoint of that step. UserError for members that are not of one
    population: a checkpoint would be lost.
    """
    for m in members:
        m.failure = divergence_of(m)
    going = [m for m in members if m.failure is None] or list(members)
    steps = [{0, *m.checkpoints.steps()} for m in going]
    common = max(set.intersection(*steps))
    farthest = max(going, key=lambda m: m.checkpoints.latest() or 0)
    newest, total = farthest.checkpoints.latest() or 0, members[0].plan.config.train.steps
    following = min(total, (common // every + 1) * every) if every else total
    done = common < total and any((m.run_dir / "model").is_dir() for m in going)
    if newest > following or done:
        behind = min(going, key=lambda m: m.checkpoints.latest() or 0)
        raise UserError(
            f"{farthest.run_dir} is at step {newest}, {behind.run_dir} at step "
            f"{behind.checkpoints.latest() or 0}: members of a population resume together; train "
            "the one that is behind alone, or give it another run.name and new members"
        )
    for m in members:
        if common in (0, *m.checkpoints.steps()):
            m.failure = None
            if (m.checkpoints.latest() or 0) > common:
                m.checkpoints.delete_after(common)
    return common


def divergence_of(m: Member) -> str | None:
    """Read from a member's metrics why it failed before; None if it did not."""
    path = m.run_dir / "metrics.jsonl"
    rows = [row for row in read_rows(path) if "diverged" in row] if path.is_file() else []
    if not rows:
        return None
    m.failed_at = int(rows[-1]["step"])
    return str(rows[-1]["diverged"])


def begin(members: Sequence[Member], spec: StepSpec, start: int) -> State:
    """Make the stacked state [N, ...] at the step. Data positions are set in the members.

    Initial values are bitwise those of `train`. A failed member has initial values, too.
    """
    places = state_shardings(spec, members[0].plan.mesh)
    create = jax.jit(lambda seed: init_state(spec, seed), out_shardings=places)
    like = saved_part(shapes_of(spec, places), spec)

    def one(index: int) -> State:
        m = members[index]
        if start and m.failure is None:
            state, m.position = restored(m.checkpoints, start, like, m.plan.log)
            return state
        return create(jnp.uint32(m.plan.run.run.seed))

    state = stack_states(len(members), one)
    return jax.device_put(state, jax.sharding.NamedSharding(members[0].plan.mesh, jax.P()))
