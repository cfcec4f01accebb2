"""Training: one function, its stages in execution order. A run directory is resumed, not redone."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxtrain import data
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config import Config
from jaxtrain.config.resolve import decay_line, resolve, vocab_size_of, warmup_line
from jaxtrain.data.store.progress import show_progress
from jaxtrain.evaluation.evaluate import compile_scorer, held_out_batches, make_scorer, validate
from jaxtrain.finetune import apply_lora_plus, make_partition, trainable_by_matrix
from jaxtrain.inference.generate import compile_samples, write_samples
from jaxtrain.model import Transformer, cast, check_fp8, flops_per_token, sizes, split
from jaxtrain.objectives import make_objective
from jaxtrain.optim import make_optimizer
from jaxtrain.parallel import make_mesh
from jaxtrain.parallel.mesh import num_batch_shards, process_batch_shard
from jaxtrain.runs import report
from jaxtrain.runs.checkpoint import Checkpointer, no_room, write_json
from jaxtrain.runs.lock import held
from jaxtrain.runs.metrics import MetricsWriter
from jaxtrain.runs.saved import save_result
from jaxtrain.storage.disk import full_disk_explained
from jaxtrain.train.guard import Guard
from jaxtrain.train.local_sgd import local_facts, local_summary, local_task
from jaxtrain.train.preference import (
    HELD_OUT,
    check_objective,
    make_validation,
    references_of,
    views_of,
)
from jaxtrain.train.run import (
    Beside,
    StopSignal,
    check_labels,
    check_run,
    check_text,
    check_tuned,
    check_writable,
    compile_step,
    last_words,
    microbatches,
    new_or_resumed,
    open_run,
    out_of_memory_explained,
    outline,
    rest_of,
    start_of,
)
from jaxtrain.train.step import Task, make_step, state_shardings


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def train(config: Config, group: Coordinator | None = None) -> dict[str, float]:
    """Train, or go on with, the run of a configuration; returns the last validation's figures.

    group: the processes of the job (`parallel.processes`); default this one alone. Files and the
    screen are process 0's. UserError if another job has the run directory.
    """
    group = group or Coordinator()
    check_writable(config.run_dir)
    lock = held(config.run_dir, group, config.processes.heartbeat_timeout)
    with full_disk_explained(functools.partial(no_room, config.run_dir)), lock:
        return train_alone(config, group)


def train_alone(config: Config, group: Coordinator) -> dict[str, float]:
    """`train`, in a run directory that no other job uses."""
    primary = group.index == 0
    console = Console(quiet=not primary)
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)

    # ---- mesh, sizes, model, optimizer: all that can be wrong before the data is prepared --------
    mesh = make_mesh(config.mesh)
    share, shares = process_batch_shard(mesh)
    vocab_size = vocab_size_of(config.data)
    c = resolve(config, vocab_size)
    t = c.train
    graphdef, specs = split(Transformer(c.model, vocab_size))
    dtype, parameters = compute_dtype(t.precision), sizes(specs)["total"]
    partition = make_partition(c.finetune, specs, dtype)  # what trains, what is frozen
    rates = apply_lora_plus(c.optim, c.finetune)
    optimizer = make_optimizer(
        rates, partition.trainable, t.steps, t.batch_size * t.sequence_length
    )
    check_text(config)
    resumed = check_run(c)
    check_tuned(c, partition)
    check_objective(c)
    data.check_lengths(c.data.stages, t.sequence_length)
    if c.model.fp8:
        check_fp8()
    say(
        f"model    {parameters:,} parameters, depth {c.model.depth}, width {c.model.width}, "
        f"{dtype.name} on {len(mesh.devices.flat)} x {mesh.devices.flat[0].device_kind}"
    )
    if partition.init:
        say(f"tune     {c.finetune.name}: {sizes(partition.trainable)['total']:,} parameters train")
    for line in (decay_line(config, c), warmup_line(config, c)):
        if line:
            say(line)

    # ---- data ----------------------------------------------------------------------------------
    with show_progress(console) as progress:
        prepared = data.prepare(config.data, progress=progress)
    tokenizer = prepared.tokenizer
    corpus = data.describe_stores(data.stores_of(prepared.train), prepared.filters)
    total = sum(source["tokens"] for source in corpus.values())
    where = data.source_names(config.data.train)
    say(f"data     {where}: {total:,} training tokens, vocabulary {tokenizer.vocab_size:,}")
    for line in data.damaged_shards(prepared):
        say(f"data     {line}")
    views = views_of(prepared, c)
    template = data.training_template(c.data)
    chat = data.make_chat(*template, tokenizer) if template else None
    run_dir = open_run(c, tokenizer, corpus, group)
    bytes_V = jnp.asarray(tokenizer.token_bytes())
    task = Task(
        graphdef, partition.trainable, optimizer, dtype, bytes_V, c.optim.clip_norm, t.z_loss,
        c.model.fp8, partition.join, c.mesh.zero, objective=make_objective(c.objective),
        repeats=c.mesh.pipeline_repeats, fp8_history=c.model.fp8_history,
        skip_nonfinite=t.on_nonfinite == "skip", loss_spike=t.loss_spike,
    )  # fmt: skip

    sent = {}
    if t.local_sgd:
        task = local_task(task, t.local_sgd, mesh, resumed)
        optimizer = task.optimizer
        sent = local_facts(t.local_sgd, partition.trainable, mesh, dtype)
        say(local_summary(t.local_sgd, sent, mesh))

    with jax.set_mesh(mesh), Checkpointer(run_dir, c.checkpoint) as checkpoints:
        # ---- state: new, or where the run stopped ----------------------------------------------
        shardings = state_shardings(task, mesh)
        frozen, begin = start_of(partition, c, mesh, checkpoints.latest() is not None)
        state, position = new_or_resumed(
            task, shardings, checkpoints, c.run.seed, begin, group, say
        )
        del begin  # given away, or not needed
        guard, start = Guard(t, partition.trainable, checkpoints, position), int(state.step)
        state = guard.with_window(state)
        say(f"{'resume' if start else 'train':8s} {run_dir}: steps {start} to {t.steps}")

        # What preferences are compared with: said once, by the model as it is now.
        first, known = None if position else state.params, run_dir / "reference.npz"
        references = references_of(task, first, frozen, views, c, mesh, known, say)

        # ---- compile ---------------------------------------------------------------------------
        batches_from = functools.partial(
            data.train_batches, prepared.train, config=c.data, batch_size=t.batch_size,
            sequence_length=t.sequence_length, process_index=share, process_count=shares,
            segments=c.model.document_mask, references=references,
            augment=data.make_augment(c.data.augment, tokenizer, c.data.seed),
        )  # fmt: skip
        batches = batches_from(state=position)
        for name, count in batches.conversations.items():
            say(f"data     {name}: {data.counts_phrase(count)}")
            corpus[name] |= count
        if primary:
            write_json(run_dir / "data.json", corpus)

        def place(batch: Any) -> Any:
            """On the mesh; a stage of shorter rows has so many more of them."""
            rows = t.device_batch_size * num_batch_shards(mesh)
            return microbatches(batch, rows * t.sequence_length // batch.tokens_BT.shape[1], mesh)

        hyperparams = jax.device_put(
            optimizer.hyperparams, jax.sharding.NamedSharding(mesh, jax.P())
        )
        held = guard.draw(batches), batches.get_state()  # compiled against, and trained on first
        prepare_step = lambda batch: (
            compile_step(make_step(task, mesh), state, place(batch), hyperparams, c, frozen),
            batch.tokens_BT.shape,
        )
        score = make_scorer(graphdef, partition.trainable, dtype, bytes_V, partition.join)
        scorer = functools.partial(score, frozen=frozen)
        judge = make_validation(task, views, references, c, mesh)
        # What is evaluated: the trained weights, or an average that the optimizer keeps of them.
        weights = jax.jit(optimizer.eval_params)
        last: dict[str, float] = {}

        def later() -> Iterator[tuple[str, Callable[[], None]]]:
            """What compiles the programs that come to turn later, while steps run, by name.

            On one device: a program that is loaded on one of several waits for what runs there,
            and that for the others, whose next kernels may wait for the loading.
            """
            if mesh.size > 1:
                return
            shown = weights(state.params, state.optimizer)
            if prepared.validation is not None and HELD_OUT not in views:
                held_out = held_out_batches(prepared.validation, c, mesh)
                given = outline(shown), outline(frozen), held_out, mesh
                yield "validation", functools.partial(compile_scorer, score, *given)
            if c.sample.prompts:
                whole = outline(partition.join(cast(shown, partition.trainable, dtype), frozen))
                given = whole, tokenizer, c, chat
                yield "samples", functools.partial(compile_samples, graphdef, *given)

        begun = time.perf_counter()
        step_fn, shape = prepare_step(held[0])
        compile_s = time.perf_counter() - begun
        say(f"compile  {compile_s:.0f} s")
        compiled = Beside(mesh, dict(later()))

        def check(full: bool) -> None:
            """Validate, print and log; the whole split at the end."""
            if prepared.validation is None:
                return
            limit = None if full else c.eval.tokens
            with metrics.pause():
                compiled.wait("validation")
                shown = weights(state.params, state.optimizer)
                if HELD_OUT in views:
                    last.update(judge(shown, frozen, limit))
                else:
                    held_out = held_out_batches(prepared.validation, c, mesh)
                    last.update(validate(scorer, shown, held_out, mesh, limit))
                metrics.write(step, "validation", last)

        def sample() -> None:
            path = run_dir / "samples" / f"step_{step:06d}.txt"
            with metrics.pause():
                compiled.wait("samples")
                shown = cast(weights(state.params, state.optimizer), partition.trainable, dtype)
                write_samples(path, graphdef, partition.join(shown, frozen), tokenizer, c, chat)

        def save() -> None:
            with metrics.pause():
                params = weights(state.params, state.optimizer) if t.local_sgd else state.params
                where = guard.position(position or {}, step, state)
                checkpoints.save(step, params, rest_of(state), where)

        # ---- loop ------------------------------------------------------------------------------
        stop = StopSignal(group)
        with (
            contextlib.ExitStack() as stack,
            stop,
            out_of_memory_explained(c, step_fn),
            MetricsWriter(
                run_dir, c.metrics, total_steps=t.steps, start_step=start, parameters=parameters,
                tokens_per_step=t.batch_size * t.sequence_length, primary=primary,
                more=sent | {"compile_s": compile_s, "trained": trainable_by_matrix(partition)},
                flops_per_token=flops_per_token(
                    c.model, specs, t.sequence_length, partition.trainable
                ),
            ) as metrics,
        ):  # fmt: skip
            stack.callback(lambda: batches.close())
            step = start
            group.begin(step)
            while step < t.steps and not stop.after(step):
                batch, position = held or (guard.draw(batches), batches.get_state())
                held, step = None, step + 1
                check_labels(batch.weights_BT, step, run_dir)
                if batch.tokens_BT.shape != shape:  # the data is in another stage
                    with metrics.pause():
                        step_fn, shape = prepare_step(batch)
                state, values = step_fn(state, place(batch), hyperparams, frozen)
                guard.push(step, values)
                values |= batches.statistics() | {"wait_s": batches.wait_s}
                metrics.push(step, values)
                for text in batches.ended():
                    metrics.write(step, "event", {"data": text})
                saving = due(c.checkpoint.every, step)
                checkpoints.check()
                if back := guard.look(metrics, wait=saving or step == t.steps):
                    batches.close()
                    state, position = guard.go_back(back, state, metrics, group)
                    batches, step = batches_from(state=position), back.step
                    continue
                if step < t.steps and saving:
                    save()
                if step < t.steps and due(c.eval.every, step):
                    check(full=False)
                if step < t.steps and due(c.sample.every, step):
                    sample()
            # ---- end ---------------------------------------------------------------------------
            if back := guard.look(metrics, wait=True):  # by the run that goes on
                step = back.step
            else:
                save()
            if step == t.steps:
                check(full=True)
                shown = weights(state.params, state.optimizer)
                save_result(run_dir / "model", c, partition, shown, frozen, tokenizer)
                sample()
        checkpoints.wait()
    if primary:
        page = report.write_report(run_dir)
        say(last_words(c, step, page, chat is not None))
    return last
