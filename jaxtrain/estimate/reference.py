"""Bytes of the frozen model beside a step: a teacher, a cache of one, or a reference model."""

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
    """Of a saved model: bytes of its weights on one device, its width, columns of its head."""

    weight_bytes: int
    width: int
    columns: int


def reference_bytes(c: Resolved, mesh: Mesh, dtype: jnp.dtype, vocab_size: int) -> int:
    """Bytes on one device of what the objective takes of a saved model; 0 for other objectives.

    A teacher: its weights in `dtype`, its head once more, and its hidden states of a step. A cache
    of one: token ids and log-probabilities of a step. A reference model: its weights, and a float32
    loss for each token of a step. UserError for a folder without a model.
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
    """A run's model as `reference_model.load_frozen` places it; of its files the headers are read.

    Each device has all of a quantized matrix. UserError for a folder without a model.
    """
    folder = folder_of(local(run))
    model = load_resolved(folder / "config.yaml").model
    file = folder / WEIGHTS  # a run that has not ended has checkpoints, which are not quantized
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
