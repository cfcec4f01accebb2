"""Workload of a measured or compiled step: a configuration's model, optimizer and batch shapes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import Resolved, override, resolve, vocab_size_of
from jaxtrain.data import Batch
from jaxtrain.finetune import (
    Partition,
    apply_lora_plus,
    flatten,
    make_partition,
    merge_adapters,
    unflatten,
)
from jaxtrain.finetune.partition import map_named
from jaxtrain.model import (
    LayerSpec,
    Transformer,
    flops_per_token,
    initialize,
    make_plan,
    sizes,
    split,
)
from jaxtrain.objectives import PREFERENCES, NextTokenConfig
from jaxtrain.optim import make_optimizer
from jaxtrain.optim.types import Hyperparams
from jaxtrain.parallel import BATCH, bubble_fraction, make_mesh, shardings, split_layers
from jaxtrain.parallel.mesh import num_batch_shards
from jaxtrain.train.features import make_step_spec
from jaxtrain.train.frozen_layers import freeze_layers
from jaxtrain.train.step import State, StepSpec, init_state, state_shardings
from jaxtrain.weights.params import Params, ShapeTree
from jaxtrain.weights.quantized import QuantizedWeight
from jaxtrain.weights.stored import packed_shardings

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Workload(NamedTuple):
    """A configuration ready to be compiled."""

    name: str
    config: Resolved
    mesh: Mesh
    spec: StepSpec
    vocab_size: int
    partition: Partition  # trainable and frozen parameters

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all devices."""
        return self.config.train.batch_size * self.config.train.sequence_length

    @property
    def precision(self) -> str:
        return "fp8" if self.config.model.fp8 else SHORT[self.spec.dtype.name]

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token in nanochat's convention, for the MFU."""
        c = self.config
        specs = split(Transformer(c.model, self.vocab_size))[1]
        return flops_per_token(c.model, specs, c.train.sequence_length, self.partition.trainable)

    def facts(self) -> dict[str, Any]:
        """The size of the work, for the record."""
        t = self.config.train
        return (
            {
                "batch_size": t.batch_size,
                "device_batch_size": t.device_batch_size,
                "sequence_length": t.sequence_length,
                "vocab_size": self.vocab_size,
                "parameters": sizes(self.partition.base)["total"],
                "optimizer": self.config.optim.name,
            }
            | ({"trained": sizes(self.spec.specs)["total"]} if self.partition.init else {})
            | ({"autofreeze": True} if t.autofreeze else {})
            | ({"batch_overlap": parts} if (parts := self.config.mesh.batch_overlap) > 1 else {})
        )


def load_workload(
    name: str | None,
    overrides: Sequence[str] = (),
    devices: Sequence[Any] | None = None,
    accumulated: bool = False,
) -> Workload:
    """Load a configuration (path, bare name; None: defaults) with overrides. Needs no corpus.

    A step has one microbatch, as the baselines are measured: `train.device_batch_size` sequences
    per device if the configuration sets it, unless `train.batch_size` is among the overrides.
    accumulated: keep the run's batch size instead, with all its microbatches.
    """
    path = find_config(name) if name else None
    c = load_config(path, overrides)
    mesh = make_mesh(c.mesh, devices)
    given = {line.partition("=")[0].strip() for line in overrides}
    if c.train.device_batch_size and "train.batch_size" not in given and not accumulated:
        rows = c.train.device_batch_size * num_batch_shards(mesh)
        c = load_config(path, [*overrides, f"train.batch_size={rows}"])
    vocab_size = vocab_size_of(c.data)
    named = path.stem if path else Path(c.train.init_from or "defaults").name
    return make_workload(named, resolve(c, vocab_size, devices), mesh, vocab_size)


def make_workload(name: str, r: Resolved, mesh: Mesh, vocab_size: int) -> Workload:
    graphdef, specs = split(Transformer(r.model, vocab_size))
    dtype, tokens = compute_dtype(r.train.precision), r.train.batch_size * r.train.sequence_length
    partition = make_partition(r.finetune, specs, dtype)
    optim = apply_lora_plus(r.optim, r.finetune)
    make = lambda specs: make_optimizer(optim, specs, r.train.steps, tokens)
    optimizer = freeze_layers(make, partition.trainable, r.model, vocab_size)
    optimizer = merge_adapters(optimizer, r.finetune, partition.trainable, r.run.seed)
    if r.objective.name in PREFERENCES:  # random sequences have labels, not pairs of answers
        r = r.model_copy(update={"objective": NextTokenConfig()})
    spec = make_step_spec(r, graphdef, partition, optimizer, dtype, jnp.ones((vocab_size,)))
    return Workload(name, r, mesh, spec, vocab_size, partition)


def at_depth(w: Workload, depth: int) -> Workload:
    """The workload at another depth, otherwise unchanged."""
    c = override(w.config, [f"model.depth={depth}"])
    return make_workload(w.name, c, w.mesh, w.vocab_size)


def batch_shapes(w: Workload) -> Batch:
    """Shapes and shardings of a batch `[microbatches, sequences, T]`."""
    t = w.config.train
    rows = t.device_batch_size * num_batch_shards(w.mesh)
    shape = (t.batch_size // rows, rows, t.sequence_length)
    where = NamedSharding(w.mesh, PartitionSpec(None, BATCH))
    ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
    floats = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
    packed = ints if w.config.model.document_mask else None
    fields: Any = (ints, ints, floats, packed, packed)
    return Batch(*fields)


def abstract_state(w: Workload) -> State:
    """Shapes and shardings of the state, to compile before anything is allocated."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        jax.eval_shape(lambda: init_state(w.spec, 0)),
        state_shardings(w.spec, w.mesh),
    )


def random_base(w: Workload) -> Params | None:
    """Frozen parameters with initial values, made one at a time, as a checkpoint is loaded. None
    if all parameters train."""
    if w.partition.init is None:
        return None
    where, base = flatten(shardings(w.partition.base, w.mesh)), {}
    store = w.partition.store_on(w.mesh)
    for name, spec in flatten(w.partition.base).items():
        make = lambda name=name, spec=spec: flatten(initialize(unflatten({name: spec}), 0))[name]
        base[name] = store(name, jax.jit(make, out_shardings=where[name])())
    return w.partition.init(unflatten(base), 0)[0]


def abstract_frozen(w: Workload) -> ShapeTree | None:
    """Shapes and shardings of `random_base`."""
    where = {
        (spec.shape, spec.dtype): sharding
        for spec, sharding in zip(
            jax.tree.leaves((w.partition.base, w.partition.extras)),
            jax.tree.leaves(
                (
                    shardings(w.partition.base or {}, w.mesh),
                    shardings(w.partition.extras or {}, w.mesh),
                )
            ),
        )
    }
    whole, specs = NamedSharding(w.mesh, PartitionSpec()), flatten(w.partition.base)
    at = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def like[Leaf: jax.ShapeDtypeStruct | QuantizedWeight](name: str, x: Leaf) -> Leaf:
        if isinstance(x, QuantizedWeight):
            return jax.tree.map(at, x, packed_shardings(x, specs[name], w.mesh))
        return at(x, where.get((x.shape, x.dtype.name), whole))

    frozen = jax.eval_shape(lambda: random_base(w))
    return frozen and map_named(like, frozen)


def new_hyperparams(w: Workload) -> Hyperparams:
    return jax.device_put(w.spec.optimizer.hyperparams, NamedSharding(w.mesh, PartitionSpec()))


# ---- the pipeline ------------------------------------------------------------------------------


def kinds_of(w: Workload) -> list[tuple[LayerSpec, ...]]:
    """The distinct pipeline chunks; without a pipeline, the plan of all layers."""
    chunks = split_layers(
        make_plan(w.config.model), w.mesh.shape["pipeline"] * w.config.mesh.pipeline_repeats
    )
    return list(dict.fromkeys(chunks))


def idle(w: Workload, layers: int | None = None) -> float:
    """Pipeline bubble: the share of a step's ticks in which a stage idles. With `layers` (their
    number), the share of its time."""
    microbatches = batch_shapes(w).tokens_BT.shape[0]
    return bubble_fraction(
        w.mesh.shape["pipeline"], microbatches, w.config.mesh.pipeline_repeats, layers
    )


def branch_share(w: Workload) -> float:
    """How often a device runs a branch: an outer step of local SGD, or a pipeline chunk."""
    stages = w.mesh.shape["pipeline"]
    if stages > 1 and w.config.mesh.pipeline_schedule == "1f1b":
        # A stage is busy in M of M + 2 (S - 1) ticks, in its own branch. The head counts as such a
        # branch as well, so that its traffic is underestimated by a factor of S.
        microbatches = batch_shapes(w).tokens_BT.shape[0]
        return microbatches / (microbatches + 2 * (stages - 1)) / stages
    if stages > 1:
        return (1 - idle(w)) / len(kinds_of(w))
    return 1 / w.config.train.local_sgd.every if w.config.train.local_sgd else 0.0
