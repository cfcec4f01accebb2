"""Validation: loss, perplexity and bits per byte of a whole split; or in-context tasks.

jaxtrain evaluate RUN [--step N] [--tasks core] [key=value ...]

Several processes (`jaxtrain launch --command evaluate`) share the rows of each batch.
"""

import argparse
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from jaxtrain import data
from jaxtrain.cluster.processes import find_rank, joined
from jaxtrain.cluster.ray_cluster import ray_cluster
from jaxtrain.cluster.ray_models import NodeModels
from jaxtrain.cluster.ray_worker import missing_on_node
from jaxtrain.cluster.runtime import compute_dtype, start
from jaxtrain.config.resolve import Resolved, eval_batch_size, override
from jaxtrain.data.batches.augment import Augment
from jaxtrain.data.evaluation.tasks import Rules
from jaxtrain.evaluation.arguments import evaluate_parser
from jaxtrain.evaluation.log_likelihood import FIELDS
from jaxtrain.evaluation.needle import answer_needles
from jaxtrain.evaluation.remote import RemoteModel, place_of_run
from jaxtrain.evaluation.tasks import run_tasks, task_table
from jaxtrain.finetune import join_full
from jaxtrain.model import cast
from jaxtrain.model.config import check_decoder
from jaxtrain.objectives import PREFERENCES, make_row_change
from jaxtrain.objectives import next_token as objectives
from jaxtrain.parallel import make_mesh, place_batch
from jaxtrain.parallel.mesh import num_batch_shards, process_batch_shard
from jaxtrain.runs.job import facts
from jaxtrain.runs.report import write_report
from jaxtrain.runs.saved import (
    Saved,
    folder_of,
    load_resolved,
    load_saved,
    params_shardings,
    place_params,
)
from jaxtrain.settings import UserError, command
from jaxtrain.storage.fetch import send_results
from jaxtrain.weights.params import Params, Specs

# Maximum batches in the devices' queue. On CPUs, hundreds of queued programs with collectives
# deadlock: each holds a thread until its partner in another process has one.
AHEAD = 4
BLOCK = 16  # batches that are summed separately, so that nodes can share a split
ASKED = ("step", "tasks", "needle", "limit", "all_shots", "crop")  # equal in all processes
# Fields of a saved model's configuration for validation that a command line may change.
VALIDATED = (
    "data.train", "data.validation", "data.tokenizer", "data.cache_dir", "data.local_cache",
    "data.prepare_workers", "data.skip_damaged", "eval.batch_size", "mesh",
    "train.precision", "processes",
)  # fmt: skip


def make_validation_step(
    graphdef: nnx.GraphDef,
    specs: Specs,
    dtype: jnp.dtype,
    bytes_V: jax.Array | np.ndarray,
    join: Callable[[Params, Params | None], Params] = join_full,
) -> jax.stages.Wrapped:
    """Jitted (params, batch, sums, frozen=None) -> `sums` with those of the batch added."""

    def add_batch(params, batch, sums, frozen=None):
        params = join(cast(params, specs, dtype), frozen)
        return objectives.add_sums(
            sums, objectives.evaluation_sums(graphdef, params, batch, jnp.asarray(bytes_V))
        )

    return jax.jit(add_batch)


def lower_scorer(
    scorer: jax.stages.Wrapped,
    params: Params,
    frozen: Params | None,
    batches: Iterator[data.Batch],
    mesh: Mesh,
) -> Callable[[], object]:
    """Lower the program that `validation_metrics` runs on such batches, ahead of its use. Returns a
    function that compiles it."""
    batch, sums = place_batch(next(batches), mesh), objectives.zero_sums()
    return scorer.lower(params, batch, sums, frozen=frozen).compile


def validation_metrics(
    scorer: Callable[..., objectives.EvaluationSums],
    params: Params,
    batches: Iterable[data.Batch],
    mesh: Mesh,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Mean loss in nats per token, perplexity, and bits per byte of text.

    The sums stay on the device until the last batch; BOS tokens count in the loss only.
    """
    zeros = objectives.zero_sums()
    return figures_of(validation_sums(scorer, params, batches, mesh, max_tokens, zeros))


def validation_sums(
    scorer: Callable[..., objectives.EvaluationSums],
    params: Params,
    batches: Iterable[data.Batch],
    mesh: Mesh,
    max_tokens: int | None,
    sums: objectives.EvaluationSums,
) -> objectives.EvaluationSums:
    """Add the sums of the batches to `sums`, on the device."""
    seen, queued = 0, deque[objectives.EvaluationSums]()
    for batch in batches:
        sums = scorer(params, place_batch(batch, mesh), sums)
        queued.append(sums)
        if len(queued) > AHEAD:
            jax.block_until_ready(queued.popleft())
        seen += batch.tokens_BT.size * process_batch_shard(mesh)[1]
        if max_tokens is not None and seen >= max_tokens:
            break
    return sums


def figures_of(sums: Iterable[SupportsFloat]) -> dict[str, float]:
    """Loss, perplexity and bits per byte from the `EvaluationSums` of a split."""
    loss, weight, nats, text_bytes = (float(x) for x in sums)
    if not weight:
        raise UserError("validation: no token has a label")
    return {
        "loss": loss / weight,
        "perplexity": math.exp(min(loss / weight, 700.0)),
        "bpb": nats / (math.log(2) * max(text_bytes, 1.0)),
    }


def held_out_batches(
    store: data.TokenStore, c: Resolved, mesh: Mesh, change: Augment | None = None
) -> Iterator[data.Batch]:
    """This process's batches of one pass over the validation split, in rows as in training.

    `eval.batch_size` sets the rows per batch of all processes. change: result of `make_row_change`.
    """
    share, shares = process_batch_shard(mesh)
    return data.validation_batches(
        store,
        batch_size=eval_batch_size(c, c.train.device_batch_size, num_batch_shards(mesh)),
        sequence_length=c.train.sequence_length,
        process_index=share,
        process_count=shares,
        segments=c.model.document_mask,
        augment=change,
    )


class BlockSums:
    """Sums of a split's batches, BLOCK at a time. Blocks should mostly be requested in order."""

    def __init__(
        self,
        batches: Callable[[], Iterator[data.Batch]],
        add: Callable[[Iterable[data.Batch]], objectives.EvaluationSums],
    ):
        self.batches, self.add = batches, add
        self.rest, self.next = batches(), 0

    def __call__(self, number: int) -> list[float] | None:
        """Sums of a block, by its index; None after the last one."""
        if number < self.next:
            self.rest, self.next = self.batches(), 0
        skipped = islice(self.rest, (number - self.next) * BLOCK)
        deque(skipped, maxlen=0)
        self.next = number + 1
        first = next(self.rest, None)
        if first is None:
            return None
        sums = self.add(chain([first], islice(self.rest, BLOCK - 1)))
        return [float(x) for x in sums]


def evaluate(saved: Saved, config: Resolved, remote: RemoteModel | None = None) -> dict[str, float]:
    """Validate a saved model on the validation split of `config.data`.

    remote: the same model for the nodes of a Ray cluster, which share the blocks of batches. Their
    sums are added in order, so the results are those of one host.
    """
    if remote is None:
        return ValidationProgram(saved, config).figures(saved)
    check_text_loss(saved, config)
    prepared = prepare_validation(saved, config).directory
    return sum_blocks(NodeModels(partial(load_block_sums, remote, prepared)).map(count()))


def sum_blocks(blocks: Iterable[list[float] | None]) -> dict[str, float]:
    """The metrics of a split from the sums of its blocks, in order; None after the last one."""
    total = np.zeros(len(objectives.EvaluationSums._fields))
    for sums in blocks:
        if sums is None:
            break
        total += sums
    return figures_of(total)


def load_block_sums(remote: RemoteModel, prepared: Path | None) -> BlockSums:
    """Load the model on a node. prepared: the folder of the validation split, if it has one."""
    if prepared is not None and not prepared.is_dir():
        shared = "data.cache_dir must be on a disk that all nodes share, or at a URL"
        raise missing_on_node("folder", prepared, shared)
    return make_block_sums(*remote.load())


def check_text_loss(saved: Saved, config: Resolved) -> None:
    """Raise UserError for a model and data that have no language-modeling loss."""
    if saved.config.objective.name in PREFERENCES and config.data == saved.config.data:
        raise UserError(
            f"{saved.config.run.name} was trained on preferences, so validation has no text; its "
            "metrics.jsonl has the preference metrics. Use --tasks, or name a text with "
            "data.train... overrides"
        )


def prepare_validation(saved: Saved, config: Resolved) -> data.TokenStore:
    """The validation split of `config.data`. Raises UserError if the model cannot read it."""
    prepared = data.prepare(data_for(saved, config))
    for line in data.damaged_shards(prepared):
        print(line, file=sys.stderr)
    if prepared.tokenizer.fingerprint != saved.tokenizer.fingerprint:
        raise UserError("data.tokenizer differs from the tokenizer that the model was trained with")
    if prepared.validation is None:
        raise UserError("data.validation is none: name a split or a source to evaluate on")
    return prepared.validation


class ValidationProgram:
    """The validation split of `config.data`, and the program that scores a saved model on it.

    Other parameters of the same shapes are scored by the same program. Raises UserError as
    `evaluate` does.
    """

    def __init__(self, saved: Saved, config: Resolved):
        check_text_loss(saved, config)
        self.store, self.mesh = prepare_validation(saved, config), make_mesh(config.mesh)
        self.trained = saved.config.model_copy(update={"eval": config.eval})
        with jax.set_mesh(self.mesh):
            self.scorer = make_validation_step(
                saved.graphdef,
                saved.specs,
                compute_dtype(config.train.precision),
                jnp.asarray(saved.tokenizer.token_bytes()),
            )
            objective = self.trained.objective
            self.change = make_row_change(objective, saved.tokenizer, self.trained.data.seed)

    def batches(self) -> Iterator[data.Batch]:
        return held_out_batches(self.store, self.trained, self.mesh, self.change)

    def compile(self, saved: Saved) -> None:
        """Compile the program ahead of its use, without parameters on the devices."""
        where = params_shardings(saved, self.mesh)
        described = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        params = jax.tree.map(described, saved.params, where)
        with jax.set_mesh(self.mesh):
            lower_scorer(self.scorer, params, None, self.batches(), self.mesh)()

    def block_sums(self, saved: Saved) -> BlockSums:
        """Put a model on its devices, to validate blocks of batches."""
        with jax.set_mesh(self.mesh):
            params = place_params(saved, self.mesh)
        scorer = partial(self.scorer, frozen=None)  # as it is lowered, or jit compiles once more

        def add(batches: Iterable[data.Batch]) -> objectives.EvaluationSums:
            with jax.set_mesh(self.mesh):
                sums = objectives.zero_sums()
                return validation_sums(scorer, params, batches, self.mesh, None, sums)

        return BlockSums(self.batches, add)

    def figures(self, saved: Saved) -> dict[str, float]:
        """Loss, perplexity and bits per byte of a model."""
        return sum_blocks(map(self.block_sums(saved), count()))


def make_block_sums(saved: Saved, config: Resolved) -> BlockSums:
    """Put a model on its devices, to validate blocks of batches."""
    return ValidationProgram(saved, config).block_sums(saved)


def data_for(saved: Saved, config: Resolved) -> data.DataConfig:
    """Data to evaluate on. New text must not train another tokenizer than the saved one."""
    tokenizer = config.data.tokenizer
    if config.data == saved.config.data or tokenizer != saved.config.data.tokenizer:
        return config.data
    if tokenizer.name != "bytes":
        tokenizer = tokenizer.model_copy(update={"path": str(saved.tokenizer_dir)})
    return config.data.model_copy(update={"tokenizer": tokenizer})


def answer_tasks(
    saved: Saved, config: Resolved, arguments: argparse.Namespace, remote: RemoteModel | None
) -> None:
    """Run --tasks: print a table, and write the results to --out."""
    check_decoder(saved.config.model)
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    name = "tasks.json" if arguments.step is None else f"tasks_step_{arguments.step:06d}.json"
    out = arguments.out or arguments.run / name
    bundle = data.open_bundle(arguments.bundle, names)
    rules = Rules(arguments.limit, arguments.all_shots, arguments.crop)
    result = run_tasks(saved, config, bundle, names, out, rules, remote)
    if jax.process_index() > 0:
        return
    if (arguments.run / "metrics.jsonl").is_file():
        send_results(arguments.run, write_report(arguments.run))
    send_results(arguments.run, out)
    Console(width=120).print(task_table(result), f"\n{out}", highlight=False)


@command
def main(argv: list[str] | None = None) -> int:
    a = evaluate_parser().parse_intermixed_args(argv)
    rank = find_rank(a.coordinator, a.processes, a.process)
    config = load_resolved(folder_of(a.run) / "config.yaml")
    fields = (*FIELDS, "processes") if a.tasks or a.needle else VALIDATED
    config = override(config, a.overrides, fields)
    start(quiet=rank is not None and rank.index > 0)
    asked = {f"--{name}": str(getattr(a, name)) for name in ASKED}
    same = facts(config) | asked if rank else {}
    if a.ray and (rank or a.needle):
        raise UserError(
            "--ray spreads tasks or validation over nodes: leave out --needle, --coordinator, "
            "--processes and --process"
        )
    with ray_cluster(a.ray) as cluster, joined(rank, config.processes, same, a.run) as coordinator:
        saved = load_saved(a.run, a.step)
        model = RemoteModel(place_of_run(a.run), a.step, tuple(a.overrides), fields)
        remote = model if cluster else None
        if a.tasks:
            answer_tasks(saved, config, a, remote)
            return 0
        if a.needle:
            answer_needles(saved, config, a)
            return 0
        figures = evaluate(saved, config, remote)
        if coordinator.index == 0:
            for name, value in figures.items():
                print(f"{name:12s} {value:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
