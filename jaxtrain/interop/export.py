"""Our parameters as a Hugging Face checkpoint, written tensor by tensor."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxtrain.interop.configs import Json
from jaxtrain.interop.families import Family, Row
from jaxtrain.interop.layouts import LAYOUTS
from jaxtrain.interop.load import expected, is_stacked, places
from jaxtrain.interop.tensors import INDEX, SHARD_BYTES, WEIGHTS, shards, write
from jaxtrain.model import Params, ParamSpec
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import Specs

VOCABULARY = {"embed": 0, "head": 1}  # the dim that has padding


def export_weights(
    folder: Path,
    family: Family,
    config: Json,
    specs: Specs,
    params: Params,
    dtype: np.dtype,
    head_dim: int,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write config.json and model.safetensors, or shards of at most so many bytes and their index.

    metadata: entries of the files' `__metadata__`, beside the format.
    params: arrays as `specs` declares them; rows of the vocabulary beyond config's are left out.
    Raises UserError, before anything is written, for a parameter that the family has no tensor for.
    """
    flat = {
        name: without_padding(name, spec, config["vocab_size"])
        for name, spec in flatten(specs).items()
    }
    if lost := sorted(flat.keys() - places(family, flat).keys()):
        raise UserError(f"the family {family.model_type} has no tensor for {', '.join(lost)}")
    arrays = flatten(params)
    rows = {
        row.theirs.format(i): (row, i)
        for row in family.rows
        if row.ours[0] in flat
        for i in range(flat[row.ours[0]].shape[0] if is_stacked(flat[row.ours[0]]) else 1)
    }

    def tensor(row: Row, layer: int) -> np.ndarray:
        parts = []
        for name in row.ours:
            x, spec = arrays[name], flat[name]
            x = x[layer] if is_stacked(spec) else x[tuple(map(slice, spec.shape))]
            parts.append(LAYOUTS[row.layout].write(np.asarray(x), head_dim))
        return np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    table = {name: (dtype, shape) for name, shape in expected(family, flat).items()}
    groups = list(shards(table, shard_bytes))
    index: dict[str, str] = {}
    for i, names in enumerate(groups):
        file = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" if groups[1:] else WEIGHTS
        pieces = (tensor(*rows[name]).astype(dtype, copy=False) for name in names)
        facts = {"format": "pt"} | dict(metadata or {})
        write(folder / file, {name: table[name] for name in names}, pieces, facts)
        index |= dict.fromkeys(names, file)
    if groups[1:]:
        total = sum(int(np.prod(shape)) * dtype.itemsize for _, shape in table.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
    write_json(folder / "config.json", config | dict.fromkeys(("dtype", "torch_dtype"), dtype.name))


def without_padding(name: str, spec: ParamSpec, rows: int) -> ParamSpec:
    """The declaration as a checkpoint has it: its vocabulary is not padded."""
    if name not in VOCABULARY:
        return spec
    shape = list(spec.shape)
    shape[VOCABULARY[name]] = rows
    return dataclasses.replace(spec, shape=tuple(shape))
