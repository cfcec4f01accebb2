"""What a step is measured on: a configuration's model and optimizer, and random tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import find_config, load_config
from jaxtrain.data import Batch
from jaxtrain.model import Transformer, flops_per_token, sizes, split
from jaxtrain.optim import make_optimizer
from jaxtrain.parallel import BATCH, make_mesh
from jaxtrain.parallel.mesh import batch_ways
from jaxtrain.parallel.runtime import compute_dtype
from jaxtrain.scaling import Resolved, override, resolve, vocab_size_of
from jaxtrain.step import State, Task, init_state, state_shardings

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DOCUMENTS = 4  # of a row, where the configuration masks documents


class Workload(NamedTuple):
    """A configuration ready to be compiled."""

    name: str
    config: Resolved
    mesh: Mesh
    task: Task
    vocab_size: int

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all devices."""
        return self.config.train.batch_size * self.config.train.sequence_length

    @property
    def precision(self) -> str:
        return "fp8" if self.task.fp8 else SHORT[self.task.dtype.name]

    @property
    def flops_per_token(self) -> float:
        """In nanochat's convention, for the MFU."""
        c = self.config
        return flops_per_token(c.model, self.task.specs, c.train.sequence_length)

    def facts(self) -> dict[str, Any]:
        """The size of the work, for the record."""
        t = self.config.train
        return {
            "batch_size": t.batch_size,
            "device_batch_size": t.device_batch_size,
            "sequence_length": t.sequence_length,
            "vocab_size": self.vocab_size,
            "parameters": sizes(self.task.specs)["total"],
            "optimizer": self.config.optim.name,
        }


def load_workload(
    name: str, overrides: Sequence[str] = (), devices: Sequence[Any] | None = None
) -> Workload:
    """A configuration (path or bare name) with overrides. No tokenizer or corpus is needed.

    The batch is one microbatch a step, as the peers are measured: `train.device_batch_size` rows a
    device where the configuration sets it, unless `train.batch_size` is among the overrides.
    """
    path = find_config(name)
    c = load_config(path, overrides)
    mesh = make_mesh(c.mesh, devices)
    given = {line.partition("=")[0].strip() for line in overrides}
    if c.train.device_batch_size and "train.batch_size" not in given:
        rows = c.train.device_batch_size * batch_ways(mesh)
        c = load_config(path, [*overrides, f"train.batch_size={rows}"])
    vocab_size = vocab_size_of(c.data)
    return make_workload(path.stem, resolve(c, vocab_size, devices), mesh, vocab_size)


def make_workload(name: str, r: Resolved, mesh: Mesh, vocab_size: int) -> Workload:
    graphdef, specs = split(Transformer(r.model, vocab_size))
    task = Task(
        graphdef,
        specs,
        make_optimizer(r.optim, specs, r.train.steps, r.train.batch_size * r.train.sequence_length),
        compute_dtype(r.train.precision),
        jnp.ones((vocab_size,)),
        r.optim.clip_norm,
        r.train.z_loss,
        r.model.fp8,
        zero=r.mesh.zero,
    )
    return Workload(name, r, mesh, task, vocab_size)


def at_depth(w: Workload, depth: int) -> Workload:
    """The same model with fewer layers, all else as it was."""
    c = override(w.config, [f"model.depth={depth}"])
    return make_workload(w.name, c, w.mesh, w.vocab_size)


def batch_shapes(w: Workload) -> Batch:
    """Shapes and placement of a batch `[microbatches, rows, T]`."""
    t = w.config.train
    rows = t.device_batch_size * batch_ways(w.mesh)
    shape = (t.batch_size // rows, rows, t.sequence_length)
    where = NamedSharding(w.mesh, PartitionSpec(None, BATCH))
    ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
    floats = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
    packed = ints if w.config.model.document_mask else None
    fields: Any = (ints, ints, floats, packed, packed)
    return Batch(*fields)


def random_batch(w: Workload, seed: int) -> Batch:
    """Uniform token ids made on the device, every label counting."""
    like = batch_shapes(w)
    shape = like.tokens_BT.shape

    def make() -> Batch:
        longer = jax.random.randint(
            jax.random.key(seed), (*shape[:2], shape[2] + 1), 0, w.vocab_size
        )
        length = -(-shape[2] // DOCUMENTS)
        place = jnp.broadcast_to(jnp.arange(shape[2]), shape)
        segments = None if like.segments_BT is None else place // length + 1
        positions = None if like.positions_BT is None else place % length
        weights = jnp.ones(shape, jnp.float32)
        fields: Any = (longer[..., :-1], longer[..., 1:], weights, segments, positions)
        return Batch(*fields)

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, like))()


def abstract_state(w: Workload) -> State:
    """Shapes and placement of the state, for compiling before anything is allocated."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        jax.eval_shape(lambda: init_state(w.task, 0)),
        state_shardings(w.task, w.mesh),
    )


def new_state(w: Workload) -> State:
    create = jax.jit(lambda: init_state(w.task, 0), out_shardings=state_shardings(w.task, w.mesh))
    return create()


def new_knobs(w: Workload) -> Any:
    return jax.device_put(w.task.optimizer.knobs, NamedSharding(w.mesh, PartitionSpec()))
