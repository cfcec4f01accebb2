"""Device memory of a step's second model: a teacher, a teacher's cache, or a reference model."""

import json
from math import prod
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxtrain.config.resolve import Resolved
from jaxtrain.finetune.partition import compute_dtype_of
from jaxtrain.interop.tensors import KNOWN, metadata_of, read_header
from jaxtrain.model import Transformer, split
from jaxtrain.objectives.distill import DistillConfig
from jaxtrain.objectives.selective import SelectiveConfig
from jaxtrain.parallel import partition_spec
from jaxtrain.parallel.mesh import num_batch_shards
from jaxtrain.runs.saved import QUANTIZED, WEIGHTS, folder_of, load_resolved
from jaxtrain.storage.location import local
from jaxtrain.weights.contract import flatten


class FrozenSize(NamedTuple):
    """A saved model's weight bytes on one device, its width, and the columns of its head."""

    weight_bytes: int
    width: int
    columns: int


def reference_bytes(c: Resolved, mesh: Mesh, dtype: jnp.dtype, vocab_size: int) -> int:
    """Bytes on one device that the objective's second model takes; 0 for other objectives.

    Teacher: its weights in `dtype`, a second copy of its head, and its hidden states of a step.
    Teacher's cache: token ids and log-probs of a step. Reference model: its weights, and a float32
    loss for each token of a step. Raises UserError for a folder without a model.
    """
    objective = c.objective
    tokens = c.train.batch_size // num_batch_shards(mesh) * c.train.sequence_length
    if isinstance(objective, SelectiveConfig) and objective.reference:
        return saved_size(objective.reference, mesh, dtype, vocab_size).weight_bytes + 4 * tokens
    if not isinstance(objective, DistillConfig):
        return 0
    if objective.cache:
        id_bytes = 2 if vocab_size <= 2**16 else 4
        return tokens * (id_bytes * objective.top_k + 2 * (objective.top_k + 1))
    size = saved_size(objective.teacher, mesh, dtype, vocab_size)
    return size.weight_bytes + dtype.itemsize * size.width * (tokens + size.columns)


def saved_size(run: str, mesh: Mesh, dtype: jnp.dtype, vocab_size: int) -> FrozenSize:
    """Size of a run's model as `reference_model.load_frozen` shards it. Reads only file headers.

    Quantized matrices are replicated. Raises UserError for a folder without a model.
    """
    folder = folder_of(local(run))
    model = load_resolved(folder / "config.yaml").model
    file = folder / WEIGHTS  # an unfinished run has only checkpoints, which are not quantized
    stored = read_header(file) if file.is_file() else {}
    quantized = json.loads(metadata_of(file).get(QUANTIZED, "{}")) if stored else {}
    specs, total = flatten(split(Transformer(model, vocab_size))[1]), 0
    for name, spec in specs.items():
        if name in quantized:
            parts = (x for key, x in stored.items() if key.startswith(f"{name}/"))
            total += sum(prod(x.shape) * KNOWN[x.dtype].itemsize for x in parts)
            continue
        where = NamedSharding(mesh, partition_spec(spec.axes, spec.shape, mesh))
        item_bytes = jnp.dtype(compute_dtype_of(spec, dtype)).itemsize
        total += prod(where.shard_shape(spec.shape)) * item_bytes
    return FrozenSize(total, model.width, specs["embed"].shape[0])
