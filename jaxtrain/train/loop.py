"""Training: one function, its stages in execution order. A run directory is resumed, not redone.

A technique is not named here: it is a file behind a seam (`features.py`: transforms and wrappers of
the step; `recipes.py`: what an objective needs; `events.py`: what happens every N steps).
"""

import contextlib
import functools
import time
from pathlib import Path
from typing import NamedTuple

import jax

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config import Config
from jaxtrain.runs.checkpoint import Checkpointer, no_room, write_json
from jaxtrain.runs.lock import held
from jaxtrain.runs.report import write_report
from jaxtrain.storage.disk import full_disk_explained
from jaxtrain.train.evaluator import Evaluator
from jaxtrain.train.events import make_events
from jaxtrain.train.features import make_step_spec, wrap_step
from jaxtrain.train.feed import Feed
from jaxtrain.train.guard import Guard
from jaxtrain.train.plan import RunLog, make_plan, open_metrics, prepare_data
from jaxtrain.train.program import Program, check_labels, out_of_memory_explained
from jaxtrain.train.recipes import make_recipe
from jaxtrain.train.restore import init_or_restore, load_pretrained, non_param_state, saved_part
from jaxtrain.train.run_directory import check_writable, final_message, open_run
from jaxtrain.train.step import State, state_shardings
from jaxtrain.train.stop_signal import StopSignal
from jaxtrain.weights.params import Params


class TrainResult(NamedTuple):
    """What a run has made."""

    params: Params  # that train, as they are evaluated
    metrics: dict[str, float]  # of the last validation
    directory: Path


def train(config: Config, coordinator: Coordinator | None = None) -> TrainResult:
    """Train, or go on with, the run of a configuration.

    coordinator: of the job's processes (`cluster/processes.py`); default this one alone. Files and
    the screen are process 0's. UserError if another job has the run directory.
    """
    coordinator = coordinator or Coordinator()
    check_writable(config.run_dir)
    lock = held(config.run_dir, coordinator, max(100.0, config.processes.heartbeat_timeout))
    with full_disk_explained(functools.partial(no_room, config.run_dir)), lock:
        return train_locked(config, coordinator)


def train_locked(config: Config, coordinator: Coordinator) -> TrainResult:
    """`train`, in a run directory that no other job uses."""
    # ---- plan: all that can be wrong before the data is prepared ---------------------------------
    log = RunLog(coordinator)
    plan = make_plan(config, coordinator, log)
    c, t = plan.config, plan.config.train
    recipe = make_recipe(plan)
    data = prepare_data(config, plan, log)
    recipe.open(data)
    run_dir = open_run(c, data.tokenizer, data.corpus, coordinator)
    token_bytes_V = jax.numpy.asarray(data.tokenizer.token_bytes())
    spec = make_step_spec(
        c, plan.graphdef, plan.partition, plan.optimizer, plan.dtype, token_bytes_V
    )
    spec = wrap_step(spec, c, plan.mesh, plan.resumed)
    log(spec.summary)

    with jax.set_mesh(plan.mesh), Checkpointer(run_dir, c.checkpoint) as checkpoints:
        # ---- state: initial, pretrained, or restored ---------------------------------------------
        resumed = checkpoints.latest() is not None
        frozen, pretrained = load_pretrained(plan.partition, c, plan.mesh, resumed)
        places = state_shardings(spec, plan.mesh)
        state, position = init_or_restore(
            spec, places, checkpoints, c.run.seed, pretrained, coordinator, log
        )
        del pretrained  # given away, or not needed
        guard, start = Guard(t, spec, checkpoints, position), int(state.step)
        state = guard.with_window(state)
        log(f"{'resume' if start else 'train':8s} {run_dir}: steps {start} to {t.steps}")
        recipe.start(spec, None if position else state.params, frozen, run_dir)
        feed = Feed(plan, data, recipe, guard, position)
        if coordinator.index == 0:
            write_json(run_dir / "data.json", data.corpus)

        # ---- compile -----------------------------------------------------------------------------
        everywhere = jax.sharding.NamedSharding(plan.mesh, jax.P())
        hyperparams = jax.device_put(spec.optimizer.hyperparams, everywhere)
        make_program = functools.partial(
            Program, spec, plan, hyperparams=hyperparams, frozen=frozen
        )
        evaluator = Evaluator(plan, data, recipe, spec, frozen, run_dir)
        begun = time.perf_counter()
        program = make_program(state, feed.peek())
        compile_s = time.perf_counter() - begun
        log(f"compile  {compile_s:.0f} s")
        evaluator.compile_in_background(state)

        def save(step: int, state: State) -> None:
            rest = non_param_state(saved_part(state, spec))
            where = guard.position(feed.position, step, state)
            checkpoints.save(step, spec.saved_params(state), rest, where)

        # ---- loop --------------------------------------------------------------------------------
        with (
            contextlib.closing(feed),
            StopSignal(coordinator) as stop,
            out_of_memory_explained(c, program.compiled),
            open_metrics(plan, run_dir, start, spec.facts | {"compile_s": compile_s}) as metrics,
        ):
            events, step = make_events(c, save, evaluator, metrics), start
            coordinator.begin(step)
            while step < t.steps and not stop.after(step):
                batch, step = feed.take(), step + 1
                check_labels(batch.weights_BT, step, run_dir)
                if not program.fits(batch):  # the next phase
                    with metrics.pause():
                        program = make_program(state, batch)
                state, values = program(state, batch)
                guard.push(step, values)
                metrics.push(step, values | feed.statistics())
                for text in feed.ended():
                    metrics.write(step, "event", {"data": text})
                checkpoints.check()
                due = [event for event in events if event.is_due(step, t.steps)]
                wait = step == t.steps or any(event.must_be_sound for event in due)
                if back := guard.look(metrics, wait=wait):
                    state, position = guard.go_back(back, state, metrics, coordinator)
                    feed.rewind(position)
                    step = back.step
                    continue
                for event in due:
                    with metrics.pause():
                        event.run(step, state)
            # ---- end -----------------------------------------------------------------------------
            if back := guard.look(metrics, wait=True):  # by the run that goes on
                step = back.step
            for event in events:
                with metrics.pause():
                    event.at_end(step, state, finished=step == t.steps, sound=not back)
        checkpoints.wait()
        params = evaluator.params(state)
    if coordinator.index == 0:
        log(final_message(c, step, write_report(run_dir), data.chat is not None))
    return TrainResult(params, evaluator.last, run_dir)
