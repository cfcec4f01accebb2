"""The compiled step of a phase. No other part of the loop depends on shapes."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.hopper.compile_beside import compiling_kernels
from jaxtrain_kernels.hopper.lower_beside import lowering_in_workers, stop_workers
from jaxtyping import PyTree

from jaxtrain import data
from jaxtrain.cluster.started_by import command_of
from jaxtrain.cluster.xla_flags import check_options, known_options
from jaxtrain.config.resolve import Resolved, largest_divisor
from jaxtrain.model.sections import FP8_LOSSES
from jaxtrain.objectives import StepBatch
from jaxtrain.optim.types import Hyperparams
from jaxtrain.parallel import place_batch
from jaxtrain.parallel.mesh import (
    batch_types,
    exchanges_within_layers,
    num_batch_shards,
    process_batch_shard,
)
from jaxtrain.settings import UserError
from jaxtrain.train.executable_cache import cached_executable
from jaxtrain.train.memory_advice import memory_advice
from jaxtrain.train.plan import Plan
from jaxtrain.train.step import State, StepSpec, make_step
from jaxtrain.weights.params import Params

MakeArrays = Callable[..., StepBatch]  # (batch, mesh, batch_dim) -> arrays or their types


def have_symmetric_memory(mesh: Mesh) -> bool:
    """Whether a step exchanges rows within layers (`tensor`, `expert`) between GPUs of this process
    that may have NCCL's symmetric memory: Hopper and newer."""
    device = target()
    if device.platform != "cuda" or (device.compute_capability or (0, 0)) < (9, 0):
        return False
    return jax.process_count() == 1 and exchanges_within_layers(mesh)


def gathers_tokens(mesh: Mesh) -> bool:
    """Whether experts' tokens are all that a step gathers (`parallel.gathered_experts`)."""
    shape = {axis: size for axis, size in mesh.shape.items() if size > 1}
    return shape.pop("expert", 1) == 2 and not shape.keys() - {"data"}


def needs_only_cublas(c: Resolved, mesh: Mesh, frozen: Params | None) -> bool:
    """Whether no product of a step is faster by a Triton kernel of XLA's, whose autotuning takes
    long: in float8, and of a squared-ReLU model on one device. Others may be: those that compute an
    activation or dequantize a frozen base on the way, and those of an FSDP step (LOG.md)."""
    if c.model.fp8 or c.model.kernels.loss in FP8_LOSSES:
        return True
    return c.model.ffn == "relu2" and mesh.size <= 1 and frozen is None


def compile_step(
    step: jax.stages.Wrapped,
    state: PyTree,
    batch: PyTree,
    hyperparams: PyTree,
    c: Resolved,
    frozen: Params | None = None,
    while_compiling: Callable[[], None] = lambda: None,
    origin: str | None = None,
) -> jax.stages.Compiled:
    """Compile the step ahead of the loop. UserError if the device lacks a feature or the memory.

    while_compiling: starts Python work that overlaps with XLA's compilation, which does not hold
    the GIL. Not called if the compiled step is read from disk. origin: `StepSpec.origin`; with it
    the compiled step is kept on disk.
    """
    check_options(c.train.compiler_options)
    mesh = jax.sharding.get_mesh()
    names = ("cublas",) * needs_only_cublas(c, mesh, frozen) + ("once",) * c.model.scan_layers
    names += ("symmetric",) * have_symmetric_memory(mesh) + ("gathered",) * gathers_tokens(mesh)
    options = known_options(names) | c.train.compiler_options

    def compile_lowered() -> jax.stages.Compiled:
        with without_garbage_collection(), lowering_in_workers():
            lowered = step.lower(*arguments)
        while_compiling()
        with compiling_kernels(lowered):
            return lowered.compile(compiler_options=options or None)

    arguments = state, batch, hyperparams, frozen
    try:
        compiled = cached_executable(compile_lowered, origin, arguments, options)
    except NotImplementedError as error:  # a backend asked for by name
        of_loss = str(error).startswith("linear_cross_entropy")
        asked = (
            f"kernels.loss={c.model.kernels.loss}" if of_loss else f"attention={c.model.attention}"
        )
        raise UserError(f"model.{asked}: {error}") from error
    finally:
        stop_workers()  # the step was read from disk
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit and memory_needed(compiled) > limit:
        raise UserError(memory_advice(c, memory_needed(compiled), limit))
    return compiled


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Do not collect garbage: a trace's objects live on, and looking at them is a tenth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def memory_needed(compiled: jax.stages.Compiled) -> int:
    """Return a compiled step's bytes on a device: arguments, results without aliases, scratch."""
    m = compiled.memory_analysis()
    assert m is not None
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes + results + m.temp_size_in_bytes


class OutOfMemoryError(UserError):
    """A step does not fit the device."""


@contextlib.contextmanager
def out_of_memory_explained(c: Resolved, compiled: jax.stages.Compiled) -> Iterator[None]:
    """Turn the runtime's out-of-memory error into an OutOfMemoryError with advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(memory_advice(c, memory_needed(compiled), None)) from error


def microbatches(
    batch: PyTree, rows: int, mesh: Mesh, make_arrays: MakeArrays = place_batch
) -> StepBatch:
    """Place this process's rows [B, T] as global microbatches [A, rows, T] over the mesh."""
    local = rows // process_batch_shard(mesh)[1]
    return make_arrays(
        jax.tree.map(lambda x: x.reshape(-1, local, *x.shape[1:]), batch), mesh, batch_dim=1
    )


def check_labels(weights_BT: np.ndarray, step: int, run_dir: Path) -> None:
    """Raise UserError if no token of a batch is a target."""
    if not weights_BT.any():
        command = command_of("show-data", run_dir / "config.yaml", "--step", step - 1)
        raise UserError(
            f"step {step}: no token of the batch has a label, so there is no loss: check which "
            f"tokens are marked as learned with `{command}`, the chat template, and the lengths of "
            "the conversations"
        )


def shape_dtype_structs(tree: PyTree) -> PyTree:
    """Return the shapes, dtypes and shardings of arrays, which stay valid after a donation."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


class BackgroundCompiler:
    """Compiles programs one by one in a background thread; each can be waited for.

    A job lowers its program and returns a function that compiles it. Lowering holds the GIL and
    would delay steps, so it starts at once and overlaps with the compilation of the step. `compile`
    starts the compilations, which continue while steps run.
    """

    def __init__(self, mesh: Mesh, jobs: Mapping[str, Callable[[], Callable[[], object]]]):
        self.mesh, self.pool = mesh, ThreadPoolExecutor(1)
        self.lowered = {name: self.pool.submit(self._on_mesh, job) for name, job in jobs.items()}
        self.done: dict[str, Future[object]] = {}

    def _on_mesh[T](self, job: Callable[[], T]) -> T:
        with jax.set_mesh(self.mesh):
            return job()

    def compile(self) -> None:
        """Start to compile the lowered programs."""
        finish = lambda lowered: self._on_mesh(lowered.result())
        self.done = {name: self.pool.submit(finish, one) for name, one in self.lowered.items()}
        self.pool.shutdown(wait=False)

    def wait(self, name: str) -> None:
        """Wait for a program, if there is one of that name. A failed compilation (such as for lack
        of memory while a step runs) is retried at its first use, and raises then.
        """
        wait([self.done[name]] if name in self.done else [])


class Program:
    """The compiled step of a phase: for one model structure, row length and number of rows.

    Batches of another shape (such as more, but shorter rows) need a program of their own.
    """

    def __init__(
        self,
        spec: StepSpec,
        plan: Plan,
        state: State,
        batch: data.Batch | data.PairBatch,
        hyperparams: Hyperparams,
        frozen: Params | None,
        prepare: Callable[[StepBatch], StepBatch] | None = None,
        while_compiling: Callable[[], None] = lambda: None,
    ):
        self.prepare = prepare  # `Recipe.prepare`
        self.plan, self.frozen = plan, frozen
        self.shape, self.update_loop = batch.tokens_BT.shape, spec.update_loop
        everywhere = jax.sharding.NamedSharding(plan.mesh, jax.P())
        self.compiled = compile_step(
            self.make_step(spec),
            state,
            self.types(batch),
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), hyperparams
            ),
            plan.config,
            frozen,
            while_compiling,
            spec.origin,
        )
        self.hyperparams = jax.device_put(hyperparams, everywhere)

    def make_step(self, spec: StepSpec) -> jax.stages.Wrapped:
        """Make the function that is compiled."""
        return make_step(spec, self.plan.mesh)

    @property
    def facts(self) -> dict[str, Any]:
        """Return facts for the run's first metrics row: bytes of a device that a step needs."""
        return {"step_bytes": memory_needed(self.compiled)}

    def fits(self, batch: data.Batch | data.PairBatch) -> bool:
        """Whether the program is compiled for this batch's shape."""
        return batch.tokens_BT.shape == self.shape

    def types(self, batch: data.Batch | data.PairBatch) -> StepBatch:
        """Return the types of `shard_batch`'s result. They need no device without `prepare`."""
        return self.shard_batch(batch, place_batch if self.prepare else batch_types)

    def shard_batch(
        self, batch: data.Batch | data.PairBatch, make_arrays: MakeArrays = place_batch
    ) -> StepBatch:
        """Place this process's rows [B, T] as microbatches [A, rows, T] on the mesh."""
        t, mesh = self.plan.config.train, self.plan.mesh
        rows, length = batch.tokens_BT.shape  # of this process
        units = rows * length // t.sequence_length * process_batch_shard(mesh)[1]
        shards, cut = num_batch_shards(mesh), t.sequence_length // length
        most = largest_divisor(units // shards, t.device_batch_size)
        placed = microbatches(batch, most * shards * cut, mesh, make_arrays)
        return self.prepare(placed) if self.prepare else placed

    def __call__(
        self, state: State, batch: data.Batch | data.PairBatch
    ) -> tuple[State, dict[str, Any]]:
        """Return the next state, and the step's metrics on the device. `state` is donated."""
        done = self.compiled(state, self.shard_batch(batch), self.hyperparams, self.frozen)
        loop = self.update_loop
        return loop.update(state, done, self.hyperparams) if loop else done
