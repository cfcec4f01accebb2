"""The plan of a run, made before any data is read. Invalid configurations raise here."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from jaxtrain import data
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config import Config
from jaxtrain.config.phases import Decision, Phase, phases_of
from jaxtrain.config.resolve import (
    Resolved,
    decay_line,
    resolve,
    step_sizes,
    vocab_size_of,
    warmup_line,
)
from jaxtrain.data.store.progress import show_progress
from jaxtrain.finetune import (
    Partition,
    apply_lora_plus,
    make_partition,
    merge_adapters,
    trainable_by_matrix,
)
from jaxtrain.model import Transformer, check_fp8, flops_per_token, sizes, split
from jaxtrain.model.sections import FP8_LOSSES
from jaxtrain.optim import Optimizer, make_optimizer
from jaxtrain.parallel import make_mesh
from jaxtrain.runs.checkpoint import decisions, saved_steps
from jaxtrain.runs.metrics import MetricsWriter
from jaxtrain.train.frozen_layers import freeze_layers
from jaxtrain.train.growth import ADAPTERS, check_optimizer_grows
from jaxtrain.train.run_directory import (
    check_run,
    check_text,
    check_tuned,
    take_from_mirror,
)
from jaxtrain.weights.params import Specs


class RunLog:
    """Prints log lines, in the job's first process only."""

    def __init__(self, coordinator: Coordinator, quiet: bool = False):
        self.console = Console(quiet=quiet or coordinator.index > 0)
        self.began = time.perf_counter()  # start of this session of the run, or of its phase

    def __call__(self, line: str | None) -> None:
        if line:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class Plan(NamedTuple):
    """Plan of one phase of a run on a mesh."""

    config: Resolved  # with the phase's model
    phase: Phase
    run: Resolved  # the run's configuration, as saved in the run directory
    mesh: Mesh
    graphdef: nnx.GraphDef
    specs: Specs  # of the whole model
    partition: Partition  # trainable and frozen parameters
    optimizer: Optimizer
    dtype: jnp.dtype  # of the compute
    resumed: bool
    coordinator: Coordinator
    log: RunLog

    def cut(self, decision: Decision) -> tuple["Plan", "Plan"]:
        """Split the plan at an event's decision: the plan until then, and of the phase's rest."""
        first, rest = self.phase.cut(decision)
        vocab_size = vocab_size_of(self.run.data)
        more = self.resumed, self.coordinator, self.log
        return self._replace(phase=first), plan_phase(rest, self.run, self.mesh, vocab_size, *more)


class TrainingData(NamedTuple):
    """Result of `data.prepare`, and the chat template."""

    prepared: data.Prepared
    corpus: dict[str, dict[str, float]]  # statistics of each source for the report
    chat: data.Chat | None

    @property
    def tokenizer(self) -> data.Tokenizer:
        return self.prepared.tokenizer


def make_plans(config: Config, coordinator: Coordinator, log: RunLog) -> list[Plan]:
    """Make the plan of each phase. UserError, before data is prepared, if one cannot train."""
    mesh = make_mesh(config.mesh)
    vocab_size = vocab_size_of(config.data)
    c = resolve(config, vocab_size)
    check_text(config)
    take_from_mirror(c, coordinator, log)
    resumed = check_run(c)
    data.check_lengths(c.data.stages, c.train.sequence_length)
    if c.model.fp8:
        check_fp8()
    if c.model.kernels.loss in FP8_LOSSES:
        check_fp8("model.kernels.loss")
    plans = [
        plan_phase(phase, c, mesh, vocab_size, resumed, coordinator, log)
        for phase in phases_of(c, vocab_size, mesh)
    ]
    for before, plan in pairwise(plans):
        if plan.phase.grow == ADAPTERS:
            continue
        trained = before.partition.trainable, plan.partition.trainable
        check_optimizer_grows(before.optimizer, plan.optimizer, *trained)
    log(decay_line(config, c))
    log(warmup_line(config, c))
    return plans


def plan_phase(
    phase: Phase,
    run: Resolved,
    mesh: Mesh,
    vocab_size: int,
    resumed: bool,
    coordinator: Coordinator,
    log: RunLog,
) -> Plan:
    """Make the plan of one phase. UserError if its model cannot be fine-tuned as configured."""
    c, t = phase.config, phase.config.train
    graphdef, specs = split(Transformer(c.model, vocab_size))
    dtype = compute_dtype(t.precision)
    partition = make_partition(c.finetune, specs, dtype)
    optim = apply_lora_plus(c.optim, c.finetune)
    shares = step_sizes(c, t.batch_size).shares(t.batch_size)
    tokens = t.batch_size * t.sequence_length
    make = lambda specs: make_optimizer(optim, specs, t.steps, tokens, shares)
    optimizer = freeze_layers(make, partition.trainable, c.model, vocab_size)
    optimizer = merge_adapters(optimizer, c.finetune, partition.trainable, c.run.seed)
    check_tuned(c, partition)
    steps = f", steps {phase.start} to {phase.end}" if t.phases or phase.decided else ""
    log(
        f"model    {sizes(specs)['total']:,} parameters, depth {c.model.depth}, width "
        f"{c.model.width}, {dtype.name} on {len(mesh.devices.flat)} x "
        f"{mesh.devices.flat[0].device_kind}{steps}"
    )
    if c.model.qk_dim != c.model.head_dim:
        log(
            f"model    heads of {c.model.qk_dim} channels for queries and keys, {c.model.head_dim} "
            "for values: the narrower ones are padded with zeros for attention"
        )
    if partition.init:
        log(f"tune     {c.finetune.name}: {sizes(partition.trainable)['total']:,} parameters train")
    return Plan(
        c, phase, run, mesh, graphdef, specs, partition, optimizer, dtype, resumed, coordinator, log
    )


def prepare_data(config: Config, plan: Plan, log: RunLog) -> TrainingData:
    """Tokenize text into token stores, or reuse existing ones."""
    with show_progress(log.console) as progress:
        prepared = data.prepare(config.data, progress=progress)
    corpus = data.describe_stores(data.stores_of(prepared.train), prepared.filters)
    total = sum(source["tokens"] for source in corpus.values())
    log(
        f"data     {data.source_names(config.data.train)}: {total:,} training tokens, vocabulary "
        f"{prepared.tokenizer.vocab_size:,}"
    )
    for line in data.damaged_shards(prepared):
        log(f"data     {line}")
    template = data.training_template(plan.config.data)
    chat = data.make_chat(*template, prepared.tokenizer) if template else None
    return TrainingData(prepared, corpus, chat)


def phases_left(plans: list[Plan], run_dir: Path) -> Iterator[tuple[Plan, Plan | None]]:
    """Yield (phase, previous phase or None) for each phase that the newest checkpoint leaves to do.

    If an event ends a phase early, the rest of that phase becomes a phase of its own.
    """
    before, left = None, list(plans)
    while left:
        plan, *left = [*at_decision(left[0], run_dir), *left[1:]]
        if not left or plan.phase.end > max(saved_steps(run_dir), default=0):
            yield plan, before
            plan, *left = [*at_decision(plan, run_dir), *left]
        before = plan


def at_decision(plan: Plan, run_dir: Path) -> tuple[Plan, ...]:
    """Split the plan at the step at which an event ended its phase, by the newest checkpoint."""
    decided = decisions(run_dir, max(saved_steps(run_dir), default=0))
    inside = [one for one in decided if plan.phase.start < one.step < plan.phase.end]
    return plan.cut(inside[0]) if inside else (plan,)


def open_metrics(
    plan: Plan, run_dir: Path, start: int, facts: dict[str, Any], console: Console | None = None
) -> MetricsWriter:
    """Open the metrics of the run directory, from step `start` on. facts: for the first row."""
    c, t, partition = plan.config, plan.config.train, plan.partition
    flops = flops_per_token(c.model, plan.specs, t.sequence_length, partition.trainable)
    return MetricsWriter(
        run_dir, c.metrics, total_steps=t.steps, start_step=start,
        parameters=sizes(plan.specs)["total"], tokens_per_step=t.batch_size * t.sequence_length,
        tokens_of=step_sizes(c, t.batch_size).tokens,
        primary=plan.coordinator.index == 0, console=console,
        more=facts | {"trained": trainable_by_matrix(partition)},
        flops_per_token=flops, began=plan.log.began,
    )  # fmt: skip
