"""Training: one function, its stages in execution order. An existing run directory is resumed.

This file names no technique. Techniques plug in through `features.py` (transforms and wrappers of
the step), `recipes.py` (an objective's data and validation) and `events.py` (every N steps).
"""

import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config import Config
from jaxtrain.runs.checkpoint import Checkpointer, no_room
from jaxtrain.runs.lock import lock_run
from jaxtrain.runs.remote_lock import held_remotely
from jaxtrain.runs.report import write_report
from jaxtrain.storage.disk import full_disk_explained, write_json
from jaxtrain.train.evaluator import Evaluator
from jaxtrain.train.events import MakeEvent, PhaseEnd
from jaxtrain.train.features import make_events, step_of
from jaxtrain.train.feed import Feed
from jaxtrain.train.guard import Guard
from jaxtrain.train.plan import (
    Plan,
    RunLog,
    TrainingData,
    make_plans,
    open_metrics,
    phases_left,
    prepare_data,
)
from jaxtrain.train.preemption import watched_for_preemption
from jaxtrain.train.program import Program, out_of_memory_explained
from jaxtrain.train.recipes import make_recipe
from jaxtrain.train.restore import (
    init_or_restore,
    load_pretrained,
    make_growth,
    non_param_state,
    saved_part,
    shapes_of,
)
from jaxtrain.train.run_directory import (
    check_writable,
    final_message,
    mirrored,
    open_run,
    store_of,
)
from jaxtrain.train.run_steps import Running, run_steps
from jaxtrain.train.step import State, state_shardings
from jaxtrain.train.stop_signal import StopSignal
from jaxtrain.weights.params import Params


class TrainResult(NamedTuple):
    """Result of a run."""

    params: Params  # trainable parameters in their evaluation form (perhaps averaged)
    metrics: dict[str, float]  # of the last validation
    directory: Path
    step: int  # last step taken
    stopped: bool  # by a signal, before the run's last step
    failure: str | None = None  # why this member of a population failed; `step` says when


def train(
    config: Config, coordinator: Coordinator | None = None, events: Sequence[MakeEvent] = ()
) -> TrainResult:
    """Train the run of a configuration, or resume it.

    coordinator: of the job's processes (`cluster/processes.py`); default a single process. Files
    and screen output are process 0's. events: additional events, after the run's own events of a
    step. UserError if another job uses the run directory.
    """
    coordinator = coordinator or Coordinator()
    check_writable(config.run_dir)
    log, patience = RunLog(coordinator), max(100.0, config.processes.heartbeat_timeout)
    with (
        full_disk_explained(functools.partial(no_room, config.run_dir)),
        lock_run(config.run_dir, coordinator, patience),
        held_remotely(store_of(config), coordinator, patience, log),
    ):
        plans = make_plans(config, coordinator, log)
        data = prepare_data(config, plans[-1], log)
        with mirrored(plans[0].run, coordinator, log):
            for plan, before in phases_left(plans, config.run_dir):
                result = train_phase(plan, before, data, events)
                log.began = time.perf_counter()
                if result.stopped:
                    break
            page = write_report(result.directory) if coordinator.index == 0 else None
        if page:
            log(final_message(plan.run, result.step, page, data.chat is not None))
    return result


def train_phase(
    plan: Plan, before: Plan | None, data: TrainingData, more: Sequence[MakeEvent] = ()
) -> TrainResult:
    """Train one phase to its end. before: the previous phase, if any. more: additional events."""
    # ---- the step --------------------------------------------------------------------------------
    c, t, coordinator, log = plan.config, plan.config.train, plan.coordinator, plan.log
    recipe = make_recipe(plan)
    recipe.open(data)
    run_dir = open_run(plan.run, data.tokenizer, data.corpus, coordinator)
    spec = step_of(plan, data.tokenizer)
    log(spec.summary)

    files = spec.update_loop.files if spec.update_loop else None
    with jax.set_mesh(plan.mesh), Checkpointer(run_dir, c.checkpoint, files) as checkpoints:
        # ---- state: initial, pretrained, or restored ---------------------------------------------
        resumed = checkpoints.latest() is not None
        frozen, pretrained = load_pretrained(plan.partition, c, plan.mesh, resumed)
        places = state_shardings(spec, plan.mesh)
        growth = before and make_growth(step_of(before, data.tokenizer), spec, plan, before)
        first, position = init_or_restore(
            spec, places, checkpoints, c.run.seed, pretrained, coordinator, log, growth
        )
        del pretrained  # donated, or not needed
        guard, start = Guard(t, spec, checkpoints, position, growth), checkpoints.latest() or 0
        end = PhaseEnd(plan.phase)
        what = "resume" if start > plan.phase.start else "train"
        log(f"{what:8s} {run_dir}: steps {start} to {plan.phase.end}")
        recipe.start(spec, None if position else first, frozen, run_dir)
        feed = Feed(plan, data, recipe, guard, position)
        if coordinator.index == 0:
            write_json(run_dir / "data.json", data.corpus)

        # ---- compile -----------------------------------------------------------------------------
        rates = spec.optimizer.hyperparams
        make_program = functools.partial(
            Program, spec, plan, hyperparams=rates, frozen=frozen, prepare=recipe.prepare
        )
        evaluator = Evaluator(plan, data, recipe, spec, frozen, run_dir)
        begun, shapes = time.perf_counter(), shapes_of(spec, places)
        while_compiling = functools.partial(evaluator.lower_in_background, shapes)
        program = make_program(shapes, feed.peek(), while_compiling=while_compiling)
        facts = program.facts | {"compile_s": time.perf_counter() - begun}
        log(f"compile  {facts['compile_s']:.0f} s")
        evaluator.compile_in_background(shapes)
        state = guard.with_window(first.result())

        def save(step: int, state: State) -> None:
            rest = non_param_state(saved_part(state, spec))
            where = guard.position(feed.position, step, state) | end.saved()
            checkpoints.save(step, spec.saved_params(state), rest, where)

        # ---- steps -------------------------------------------------------------------------------
        with (
            contextlib.closing(feed),
            StopSignal(coordinator) as stop,
            watched_for_preemption(c.run.preemption, stop.ask),
            out_of_memory_explained(c, program.compiled),
            open_metrics(plan, run_dir, start, spec.facts | facts) as metrics,
        ):
            events = make_events(plan, end, save, evaluator, metrics)
            events += [make(plan.config, evaluator, metrics, stop) for make in more]
            parts = Running(
                t.steps, end, run_dir, feed, make_program, guard, metrics, events, checkpoints,
                coordinator, stop,
            )  # fmt: skip
            state, step, stopped = run_steps(parts, program, state, start)
        checkpoints.wait()
        params = evaluator.params(state)
    return TrainResult(params, evaluator.last, run_dir, step, stopped)
