"""Our parameters as a Hugging Face checkpoint, written tensor by tensor."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxtrain.interop.compressed_tensors import quantization_config, tensors_of
from jaxtrain.interop.configs import Json
from jaxtrain.interop.families import Family, Row
from jaxtrain.interop.layouts import LAYOUTS, Change
from jaxtrain.interop.load import expected, is_stacked, places
from jaxtrain.interop.tensors import INDEX, SHARD_BYTES, WEIGHTS, shards, write
from jaxtrain.model import Params, ParamSpec
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import Specs
from jaxtrain.weights.quantized import QuantizedWeight

VOCABULARY = {"embed": 0, "head": 1}  # the padded dim


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
    """Write config.json and model.safetensors, or shards of at most `shard_bytes` and their index.

    metadata: further entries of the files' `__metadata__`, which always has the format.
    params: arrays as `specs` declares them; vocabulary rows beyond config's are left out.
    Raises UserError, before anything is written, for a parameter that the family has no tensor for.
    """
    section = check_tensors(family, config, specs, params)
    flat, arrays = unpadded(specs, config), flatten(params)
    rows = {
        row.theirs.format(i): (row, i)
        for row in family.rows
        if row.ours[0] in flat
        for i in range(flat[row.ours[0]].shape[0] if is_stacked(flat[row.ours[0]]) else 1)
    }

    packed = quantized_matrices(params)

    def tensors(name: str) -> dict[str, np.ndarray]:
        row, layer = rows[name]
        if row.ours[0] in packed:
            spec, write = flat[row.ours[0]], LAYOUTS[row.layout].write
            return packed_tensors(name, packed[row.ours[0]], spec, layer, dtype, write, head_dim)
        return {name: tensor(row, layer).astype(dtype, copy=False)}

    def tensor(row: Row, layer: int) -> np.ndarray:
        parts = []
        for name in row.ours:
            x, spec = arrays[name], flat[name]
            x = x[layer] if is_stacked(spec) else x[tuple(map(slice, spec.shape))]
            parts.append(LAYOUTS[row.layout].write(np.asarray(x), head_dim))
        return np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    sizes = {name: (dtype, shape) for name, shape in expected(family, flat).items()}
    groups = list(shards(sizes, shard_bytes))
    index: dict[str, str] = {}
    total = 0
    for i, names in enumerate(groups):
        file = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" if groups[1:] else WEIGHTS
        table = {name: sizes[name] for name in names}
        if packed:  # quantized tensors are small enough to be computed twice
            made = (found for name in names for found in tensors(name).items())
            table = {name: (x.dtype, x.shape) for name, x in made}
        pieces = (x for name in names for x in tensors(name).values())
        facts = {"format": "pt"} | dict(metadata or {})
        write(folder / file, table, pieces, facts)
        index |= dict.fromkeys(table, file)
        total += sum(int(np.prod(shape)) * kind.itemsize for kind, shape in table.values())
    if groups[1:]:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
    kinds = dict.fromkeys(("dtype", "torch_dtype"), dtype.name)
    write_json(folder / "config.json", config | kinds | section)


def check_tensors(family: Family, config: Json, specs: Specs, params: Params) -> Json:
    """The config.json section of quantized matrices; writes nothing.

    Raises UserError for a parameter without a tensor in the family, and for matrices that the
    layout cannot hold.
    """
    flat = unpadded(specs, config)
    if lost := sorted(flat.keys() - places(family, flat).keys()):
        raise UserError(f"the family {family.model_type} has no tensor for {', '.join(lost)}")
    return quantized_section(family, quantized_matrices(params))


def quantized_matrices(params: Params) -> dict[str, QuantizedWeight]:
    """The quantized matrices among the parameters, by name."""
    return {name: x for name, x in flatten(params).items() if isinstance(x, QuantizedWeight)}


def unpadded(specs: Specs, config: Json) -> dict[str, ParamSpec]:
    """ParamSpecs by name, with the vocabulary size of the checkpoint's config.json."""
    rows = config["vocab_size"]
    return {name: without_padding(name, spec, rows) for name, spec in flatten(specs).items()}


def quantized_section(family: Family, packed: Mapping[str, QuantizedWeight]) -> Json:
    """The config.json section of quantized matrices.

    Raises UserError for models that transformers (5.x) cannot load quantized: GPT-2 has no Linear
    layers, and NanoChat initializes matrices that packed layers do not have.
    """
    if not packed:
        return {}
    if family.model_type == "gpt2":
        raise UserError(
            "GPT-2's layers in transformers are no Linear ones, and compressed-tensors quantizes "
            "those alone: export the model that this one was made of"
        )
    section = quantization_config(packed)
    if family.model_type == "nanochat" and section["format"] == "pack-quantized":
        raise UserError(
            "transformers' NanoChat does not load packed integers: quantize it by float8"
        )
    return {"quantization_config": section}


def packed_tensors(
    name: str,
    stack: QuantizedWeight,
    spec: ParamSpec,
    layer: int,
    dtype: np.dtype,
    write: Change,
    head_dim: int,
) -> dict[str, np.ndarray]:
    """The tensors that store a layer's quantized matrix. name: of the unquantized tensor."""
    one = jax.tree.map(lambda x: x[layer], stack) if is_stacked(spec) else stack
    columns = spec.shape[-1]  # without the vocabulary padding of a head
    theirs = lambda x: write(x[..., :columns], head_dim)
    return tensors_of(name.removesuffix(".weight"), one, theirs, dtype)


def without_padding(name: str, spec: ParamSpec, rows: int) -> ParamSpec:
    """The ParamSpec without vocabulary padding, as in a Hugging Face checkpoint."""
    if name not in VOCABULARY:
        return spec
    shape = list(spec.shape)
    shape[VOCABULARY[name]] = rows
    return dataclasses.replace(spec, shape=tuple(shape))
