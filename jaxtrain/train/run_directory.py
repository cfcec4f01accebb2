"""The run directory of a training run: its configuration, and the files that the run writes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax

from jaxtrain import data
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.cluster.started_by import TYPED, command_line, command_of
from jaxtrain.config import Config, save_yaml
from jaxtrain.config.resolve import Resolved
from jaxtrain.data import Tokenizer, load_tokenizer, sources_of
from jaxtrain.finetune import PRETRAINING, LoRAConfig, Partition
from jaxtrain.interop.load import origin
from jaxtrain.interop.peft import check_adapter
from jaxtrain.interop.pretrained import check_tokenizer
from jaxtrain.runs.checkpoint import saved_steps
from jaxtrain.runs.environment import environment
from jaxtrain.runs.job import leaves
from jaxtrain.runs.mirror import Mirror, Store, take_newest
from jaxtrain.runs.publish import CHECKPOINTS, Publisher, take_samples
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import why_not_writable, write_json
from jaxtrain.storage.strict_yaml import read_saved

# Fields that a resumed run may change: they set how the run is executed, not what it computes.
MUTABLE_ON_RESUME = (
    "run.", "mesh.", "processes.", "eval.", "sample.", "checkpoint.", "metrics.", "data.cache_dir",
    "data.prefetch", "data.workers", "data.prepare_workers", "data.skip_damaged",
    "train.device_batch_size", "train.fit", "train.compiler_options", "train.on_nonfinite",
    "data.tokenizer.path=", "train.max_consecutive_skips", "train.loss_spike", "model.attention=",
    "model.scan_layers", "model.remat", "model.moe.remat", "optim.offload",
)  # fmt: skip


def check_run(c: Resolved) -> bool:
    """Whether the run directory holds a run. UserError if that run has another configuration, or if
    fine-tuning or `fixed_masks` has no `train.init_from`."""
    if c.finetune.name not in PRETRAINING and not c.train.init_from:
        raise UserError(f"train.init_from: finetune.name={c.finetune.name} needs the model to tune")
    if any(w.name == "fixed_masks" for w in c.optim.wrappers) and not c.train.init_from:
        raise UserError(
            "optim.wrappers: fixed_masks needs a pruned model, whose zeros it keeps; set "
            "train.init_from to it, or use gradual_pruning"
        )
    file = c.run_dir / "config.yaml"
    if not file.is_file() or not (saved_steps(c.run_dir) or (c.run_dir / "model").is_dir()):
        return False
    changed = differences(read_saved(file), c.model_dump(mode="json"))
    if changed:
        more = f"; and {len(changed) - 6} more" if len(changed) > 6 else ""
        raise UserError(
            f"{c.run_dir} is a run of another configuration: {'; '.join(changed[:6])}{more}. "
            f"Set run.name to start another run, or undo the change to resume this one"
        )
    return True


def store_of(c: Config | Resolved) -> Store | None:
    """Return the store of the copies of a run's checkpoints, if there are any."""
    mirror, run_url = c.checkpoint.mirror, c.run.url
    if mirror and mirror.url and run_url:
        raise UserError(
            f"checkpoint.mirror.url: leave it out, run.directory={c.run.directory} holds the "
            "checkpoints already"
        )
    if mirror and not mirror.url and not run_url:
        raise UserError(
            "checkpoint.mirror.url: name a URL or a path; it may be null only where run.directory "
            "is a URL"
        )
    if run_url:
        return Store(f"{run_url}/{CHECKPOINTS}")
    return Store(f"{mirror.url.rstrip('/')}/{c.run.name}") if mirror and mirror.url else None


def take_from_mirror(c: Resolved, coordinator: Coordinator, log: Callable[[str], None]) -> None:
    """Fetch the mirror's newest checkpoint before a start, if it is newer than the local one."""
    store = store_of(c)
    if store is None:
        return

    def check(file: Path) -> None:
        if changed := differences(read_saved(file), c.model_dump(mode="json")):
            more = f"; and {len(changed) - 6} more" if len(changed) > 6 else ""
            raise UserError(
                f"{store.url} has a run {c.run.name} of another configuration: "
                f"{'; '.join(changed[:6])}{more}. Set run.name to start "
                "another run, or undo the change to resume that one"
            )

    check_run(c)  # the local run
    if coordinator.index == 0:
        take_newest(c.run_dir, store, check, log)
        if c.run.url:
            take_samples(c.run_dir, c.run.url)
    coordinator.compare({}, "")  # a barrier: other processes read the run directory afterwards


@contextmanager
def mirrored(c: Resolved, coordinator: Coordinator, log: Callable[[str], None]) -> Iterator[None]:
    """While open, process 0 copies checkpoints to `checkpoint.mirror`, or the whole run to a
    `run.directory` that is a URL. UserError if the last checkpoint is not at the URL at the end."""
    store = store_of(c)
    if store is None or coordinator.index:
        yield
        return
    url = c.run.url
    with Publisher(c.run_dir, url, log) if url else nullcontext():
        with Mirror(c.run_dir, c.checkpoint, store, log) as mirror:
            yield
        if url and mirror.failed is not None:
            raise UserError(
                f"{store.url} does not have checkpoint {mirror.failed}; it is in {c.run_dir}, and "
                "the same command uploads it"
            )


def check_text(c: Config) -> None:
    """Raise UserError for a start from another model without `data.train.path`."""
    if not c.train.init_from:
        return
    for source in sources_of(c.data.train).values():
        if "path" not in source.model_fields_set:
            raise UserError(
                f"data.train.path: training from {c.train.init_from} needs a text; "
                f"data.train.path={source.path} is the one that comes with jaxtrain"
            )


def check_tuned(c: Resolved, partition: Partition) -> None:
    """Raise UserError for an adapter that could not be exported at the end."""
    if isinstance(c.finetune, LoRAConfig):
        check_adapter(c.model, partition.trainable, c.finetune.dora)


def check_writable(run_dir: Path) -> None:
    """Raise UserError if a run directory cannot be created and written; leaves nothing there."""
    if why := why_not_writable(run_dir):
        raise UserError(
            f"run.directory: {run_dir} cannot be written ({why}); name a folder that can"
        )


def open_run(
    c: Resolved, tokenizer: Tokenizer, corpus: dict[str, dict], coordinator: Coordinator
) -> Path:
    """Create the run directory, or check that an existing one has this tokenizer.

    corpus: training data statistics of `data.describe_stores`, the same in all processes.
    """
    run_dir = c.run_dir
    if check_run(c) and load_tokenizer(run_dir / "tokenizer").fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{run_dir} was trained with another tokenizer; set run.name to start another run"
        )
    if c.train.init_from is not None:
        check_tokenizer(c.train.init_from, tokenizer)
    # Compare before process 0 writes the files that the others have just read.
    coordinator.compare(
        leaves({"the tokenizer": tokenizer.fingerprint, "the data": corpus}),
        "all processes need the same files",
    )
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        tokenizer.save(run_dir / "tokenizer")
        save_yaml(run_dir / "config.yaml", c)
        revisions = data.revisions(c.data)
        if said := origin(c.train.init_from):
            revisions[said["base_model"]] = said["base_model_revision"]
        write_json(run_dir / "env.json", environment() | {"revisions": revisions})
    return run_dir


def differences(old: object, new: object, path: str = "") -> list[str]:
    """List `field: before -> now` for each leaf that differs and is not in MUTABLE_ON_RESUME."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*new, *(key for key in old if key not in new)]
        partition = (
            differences(old.get(k), new.get(k), f"{path}.{k}" if path else k) for k in keys
        )
        return [line for part in partition for line in part]
    if old == new or any(f"{path}=".startswith(free) for free in MUTABLE_ON_RESUME):
        return []
    return [f"{path}: {old} -> {new}"]


def final_message(c: Resolved, step: int, page: Path, talks: bool) -> str:
    """Return the run's final message: how to resume it, or the files that it has made.

    page: its report. talks: it was trained on conversations.
    """
    if step < c.train.steps:
        again = " the same command on each host"
        if jax.process_count() == 1 or TYPED in os.environ:
            again = f"\n  {command_line()}"
        return f"stopped  at step {step} of {c.train.steps}, saved; go on with:{again}"
    path = c.run_dir / "samples" / f"step_{step:06d}.txt"
    sample = path.read_text() + "\n" if path.is_file() else ""
    how, where = ["--chat"] if talks else [], c.run.url or c.run_dir
    return (
        f"{sample}report   {where}/{page.name}\nmodel    {where}/model\n"
        f"more     {command_of('generate', where, *how)}"
    )
