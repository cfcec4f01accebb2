"""Around the loop: the run directory, stopping on a signal, and what to say when a step fails."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain import data
from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.cluster.started_by import TYPED, command_line, command_of
from jaxtrain.cluster.xla_flags import check_options, known_options
from jaxtrain.config import Config, save_yaml
from jaxtrain.config.resolve import Resolved
from jaxtrain.data import Tokenizer, load_tokenizer, sources_of
from jaxtrain.finetune import (
    ADDED_MODULES,
    LoRAConfig,
    Partition,
    PromptLearningConfig,
    adapter_folder,
)
from jaxtrain.interop import (
    check_adapter,
    has_params,
    load_init_params,
    origin,
    read_adapter,
    read_prompt_adapter,
)
from jaxtrain.parallel import place_batch, shardings
from jaxtrain.parallel.mesh import process_batch_shard
from jaxtrain.runs.checkpoint import Checkpointer, write_json
from jaxtrain.runs.environment import environment
from jaxtrain.runs.job import leaves
from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import read_saved
from jaxtrain.train.local_sgd import LocalState, as_saved, regroup, replicas_in
from jaxtrain.train.memory_advice import memory_advice
from jaxtrain.train.step import State, Task, init_state

# What says how a run is executed, not what it computes, is free to change when it is resumed.
FREE = (
    "run.", "mesh.", "processes.", "eval.", "sample.", "checkpoint.", "metrics.", "data.cache_dir",
    "data.prefetch", "data.workers", "data.prepare_workers", "data.skip_damaged",
    "train.device_batch_size", "train.fit", "train.compiler_options", "train.on_nonfinite",
    "train.max_consecutive_skips", "train.loss_spike", "model.attention=",
    "model.scan_layers", "model.remat", "model.moe.remat", "optim.offload",
)  # fmt: skip


# ---- the run directory -----------------------------------------------------------------------


def check_run(c: Resolved) -> bool:
    """Whether the run directory holds a run; an error if that is one of another configuration, or
    if there is nothing to start a tuned part from."""
    if c.finetune.name != "full" and not c.train.init_from:
        raise UserError(
            f"train.init_from: finetune.name={c.finetune.name} needs it, the model to tune"
        )
    file = c.run_dir / "config.yaml"
    saved = [p for p in (c.run_dir / "checkpoints").glob("*") if p.name.isdigit()]
    if not file.is_file() or not (saved or (c.run_dir / "model").is_dir()):
        return False
    changed = differences(read_saved(file), c.model_dump(mode="json"))
    if changed:
        more = f"; and {len(changed) - 6} more" if len(changed) > 6 else ""
        raise UserError(
            f"{c.run_dir} is a run of another configuration: {'; '.join(changed[:6])}{more}. "
            f"Set run.name to start another run, or undo the change to resume this one"
        )
    return True


def check_text(c: Config) -> None:
    """Raises UserError for a start from another model on text that nobody has named."""
    if not c.train.init_from:
        return
    for source in sources_of(c.data.train).values():
        if "path" not in source.model_fields_set:
            raise UserError(
                f"data.train.path: a start from {c.train.init_from} needs it, the text to train "
                f"on; data.train.path={source.path} is the one that comes with jaxtrain"
            )


def check_tuned(c: Resolved, partition: Partition) -> None:
    """Raises UserError for what could not be written in the end."""
    if isinstance(c.finetune, LoRAConfig):
        check_adapter(c.model, partition.trainable, c.finetune.dora)


def check_writable(run_dir: Path) -> None:
    """Raises UserError if a run directory cannot be made and written in; leaves nothing there."""
    there = next(p for p in (run_dir, *run_dir.absolute().parents) if p.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UserError(
            f"run.directory: {run_dir} cannot be written ({there}: {error.strerror}); name a "
            "folder that can"
        ) from error


def open_run(c: Resolved, tokenizer: Tokenizer, corpus: Any, group: Coordinator) -> Path:
    """Create the run directory, or check that the one there goes with this tokenizer.

    corpus: what `data.describe_stores` says of the training data; all processes must have the same.
    """
    run_dir = c.run_dir
    if check_run(c) and load_tokenizer(run_dir / "tokenizer").fingerprint != tokenizer.fingerprint:
        raise UserError(f"{run_dir} was trained with another tokenizer; set run.name")
    # Before process 0 writes what the others have just read.
    group.compare(
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


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """`field: before -> now` for each leaf that differs and is not free to."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*new, *(key for key in old if key not in new)]
        parts = (differences(old.get(k), new.get(k), f"{path}.{k}" if path else k) for k in keys)
        return [line for part in parts for line in part]
    if old == new or any(f"{path}=".startswith(free) for free in FREE):
        return []
    return [f"{path}: {old} -> {new}"]


def start_of(partition: Partition, c: Resolved, mesh: Mesh, resumed: bool) -> tuple[Any, Any]:
    """(what is frozen, the parameters that a new run begins with), from train.init_from.

    None for nothing frozen, and for initial values or a checkpoint's.
    """
    if c.train.init_from is None or (resumed and partition.init is None):
        return None, None
    place = shardings(partition.base, mesh)
    base = load_init_params(c.train.init_from, partition.base, place, partition.store)
    if partition.init is None:
        return None, base
    frozen, begin = partition.init(base, c.run.seed)
    adapter = None
    if isinstance(c.finetune, LoRAConfig | PromptLearningConfig):
        adapter = c.finetune.init_adapter
    if adapter and not resumed:
        read = read_adapter if c.finetune.name == "lora" else read_prompt_adapter
        begin = read(adapter_folder(adapter), c.model, begin)
    elif c.finetune.name in ADDED_MODULES and has_params(c.train.init_from, partition.trainable):
        begin = load_init_params(
            c.train.init_from, partition.trainable, shardings(partition.trainable, mesh)
        )
    return frozen, jax.device_put(begin, shardings(partition.trainable, mesh))


def new_or_resumed(
    task: Task,
    shardings: State,
    checkpoints: Checkpointer,
    seed: int,
    start: Any = None,
    group: Coordinator | None = None,
    say: Callable[[str], Any] = lambda line: None,
) -> tuple[State, Any]:
    """The initial state, or that of the newest checkpoint with its place in the data.

    start: the parameters that a new run begins with; default initial values. say: is told when the
    replicas of train.local_sgd are not as many as those of the checkpoint.
    """
    newest = checkpoints.latest()
    (group or Coordinator()).compare(
        {f"the newest checkpoint in {checkpoints.directory}": str(newest)},
        "run.directory must be one that all processes share",
    )
    create = jax.jit(lambda: init_state(task, seed), out_shardings=shardings)
    if newest is None and start is not None:
        begin = jax.jit(
            lambda p: init_state(task, seed, p), donate_argnums=0, out_shardings=shardings
        )
        return begin(start), None
    if newest is None:
        return create(), None
    like = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        jax.eval_shape(create),
        shardings,
    )
    return restored(checkpoints, newest, like, say)


def restored(
    checkpoints: Checkpointer, step: int, like: State, say: Callable[[str], Any]
) -> tuple[State, Any]:
    """A checkpoint's state, in the shapes and places of `like`, and its place in the data."""
    read, had, asked = like, 0, 0
    if isinstance(like.optimizer, LocalState):
        had = replicas_in(checkpoints.shapes(step)["optimizer"]["replicas"])
        asked = replicas_in(like.optimizer.replicas)
    if had != asked:
        read = like._replace(optimizer=as_saved(like.optimizer, had))
    params, rest, position = checkpoints.restore(step, read.params, rest_of(read))
    state = State(params, **{"loss_scale": None, **rest})
    if had != asked:
        say(
            f"local    from {had} replica{'s' * (had > 1)} to {asked}: each starts from the mean "
            "of those before, in parameters and in the optimizer's state"
        )
        state = state._replace(optimizer=regroup(state.optimizer, like.optimizer))
    return state, position


def rest_of(state: State) -> dict[str, Any]:
    """The state without its parameters, as orbax stores it (no None leaves)."""
    rest = {"optimizer": state.optimizer, "step": state.step, "key": state.key}
    some = {"loss_scale": state.loss_scale, "maxima": state.maxima}
    return rest | {name: x for name, x in some.items() if x is not None}


def last_words(c: Resolved, step: int, page: Path, talks: bool) -> str:
    """What a run says in the end: how to go on with it, or what it has made.

    page: its report. talks: it was trained on conversations.
    """
    if step < c.train.steps:
        again = " the same command on each host"
        if jax.process_count() == 1 or TYPED in os.environ:
            again = f"\n  {command_line()}"
        return f"stopped  at step {step} of {c.train.steps}, saved; go on with:{again}"
    path = c.run_dir / "samples" / f"step_{step:06d}.txt"
    sample = path.read_text() + "\n" if path.is_file() else ""
    how = ["--chat"] if talks else ["--prompt", "..."]
    return (
        f"{sample}report   {page}\nmodel    {c.run_dir / 'model'}\n"
        f"more     {command_of('generate', c.run_dir, *how)}"
    )


# ---- stopping --------------------------------------------------------------------------------


class StopSignal:
    """SIGTERM and SIGINT become a wish to stop after the step in hand; a second one is final.

    Of several processes, all stop after the same step, whichever was asked.
    """

    def __init__(self, group: Coordinator) -> None:
        self.wanted, self.group = False, group

    def after(self, step: int) -> bool:
        """Whether to stop after `step`; if not, the next one has begun."""
        return self.group.should_stop(step, self.wanted)

    def __enter__(self) -> "StopSignal":
        self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        self.wanted = True
        signal.signal(number, self.before[signal.Signals(number)])


# ---- failing ---------------------------------------------------------------------------------


def check_labels(weights_BT: np.ndarray, step: int, run_dir: Path) -> None:
    """Raises UserError if no token of a batch is a target."""
    if not weights_BT.any():
        command = command_of("show-data", run_dir / "config.yaml", "--step", step - 1)
        raise UserError(
            f"step {step}: no token of the batch has a label, so there is nothing to learn: look "
            f"at what is marked as learned with `{command}`, at the chat template and at how long "
            "the conversations are"
        )


def compile_step(
    step: Any, state: Any, batch: Any, hyperparams: Any, c: Resolved, frozen: Any = None
) -> Any:
    """Compile ahead of the loop, and refuse what the device cannot do or hold."""
    check_options(c.train.compiler_options)
    names = ("cublas",) * bool(c.model.fp8) + ("once",) * c.model.scan_layers
    options = known_options(names) | c.train.compiler_options
    try:
        compiled = step.lower(state, batch, hyperparams, frozen).compile(
            compiler_options=options or None
        )
    except NotImplementedError as error:  # a backend asked for by name
        raise UserError(f"model.attention={c.model.attention}: {error}") from error
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit and memory_needed(compiled) > limit:
        raise UserError(memory_advice(c, memory_needed(compiled), limit))
    return compiled


def outline(tree: Any) -> Any:
    """Shapes and places of arrays that a later step may give away."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


class Beside:
    """Jobs that a thread of its own does one after the other; each can be waited for."""

    def __init__(self, mesh: Mesh, jobs: dict[str, Callable[[], None]]):
        def do(job: Callable[[], None]) -> None:
            with jax.set_mesh(mesh):
                job()

        pool = ThreadPoolExecutor(1)
        self.done = {name: pool.submit(do, job) for name, job in jobs.items()}
        pool.shutdown(wait=False)

    def wait(self, name: str) -> None:
        """Until that one is done, if there is one. What failed there (for want of memory beside a
        step, say) is tried again in its turn, and raises then.
        """
        wait([self.done[name]] if name in self.done else [])


def memory_needed(compiled: Any) -> int:
    """Bytes a device needs for a compiled step: arguments, results that do not alias, scratch."""
    m = compiled.memory_analysis()
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes + results + m.temp_size_in_bytes


@contextlib.contextmanager
def out_of_memory_explained(c: Resolved, compiled: Any) -> Iterator[None]:
    """The runtime's out-of-memory as advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(memory_advice(c, memory_needed(compiled), None)) from error


# ---- batches ---------------------------------------------------------------------------------


def microbatches(batch: Any, rows: int, mesh: Mesh) -> Any:
    """This process's rows [B, T] as global microbatches [A, rows, T] over the mesh."""
    local = rows // process_batch_shard(mesh)[1]
    return place_batch(
        jax.tree.map(lambda x: x.reshape(-1, local, *x.shape[1:]), batch), mesh, batch_dim=1
    )
