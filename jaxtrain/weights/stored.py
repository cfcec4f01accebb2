"""Quantized matrices as named arrays: saving them in model files, loading and sharding them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.parallel.axes import mesh_axes_in, partition_spec
from jaxtrain.settings import UserError
from jaxtrain.weights.float8_storage import StoredFloat8Weight
from jaxtrain.weights.int4 import Int4Weight, OffsetInt4Weight, ScaledInt4Weight
from jaxtrain.weights.params import ParamSpec
from jaxtrain.weights.quantized import Int8Weight, NF4Weight, QuantizedWeight
from jaxtrain.weights.w8a8 import DynamicInt8Weight, W8A8Weight

# Name of each form in a file; a custom form is a row here.
STORED: dict[str, type[QuantizedWeight]] = {
    "int8": Int8Weight,
    "int4": Int4Weight,
    "int4_scaled": ScaledInt4Weight,
    "int4_offset": OffsetInt4Weight,
    "w8a8": W8A8Weight,
    "dynamic_int8": DynamicInt8Weight,
    "nf4": NF4Weight,
    "float8": StoredFloat8Weight,
}
NAMES = {kind: name for name, kind in STORED.items()}


class StoredForm(NamedTuple):
    """Metadata of a stored matrix: the name of a row of STORED, and its non-array fields."""

    form: str
    facts: dict[str, Any]


def array_fields(kind: type[QuantizedWeight]) -> list[str]:
    """Names of the fields that are arrays."""
    return [field.name for field in dataclasses.fields(kind) if field.type is Any]


def arrays_of(name: str, weight: QuantizedWeight) -> dict[str, Any]:
    """NAME/FIELD -> array, for a matrix called NAME."""
    return {f"{name}/{field}": getattr(weight, field) for field in array_fields(type(weight))}


def form_of(weight: QuantizedWeight) -> StoredForm:
    """Metadata to write with the arrays."""
    arrays = array_fields(type(weight))
    facts = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    return StoredForm(NAMES[type(weight)], {k: v for k, v in facts.items() if k not in arrays})


def rebuild(name: str, stored: StoredForm, arrays: Mapping[str, Any]) -> QuantizedWeight:
    """Rebuild the matrix `name` from arrays named by `arrays_of`. UserError if one is missing."""
    if stored.form not in STORED:
        raise UserError(f"{name} is stored as {stored.form}, which is none of {', '.join(STORED)}")
    kind = STORED[stored.form]
    for field in array_fields(kind):
        if f"{name}/{field}" not in arrays:
            raise UserError(f"{name} is stored as {stored.form}, but there is no {name}/{field}")
    facts: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in stored.facts.items()
    }
    return kind(**{f: arrays[f"{name}/{f}"] for f in array_fields(kind)}, **facts)


def stored_shape(weight: QuantizedWeight) -> tuple[int, ...]:
    """Shape of the dequantized array, with the dims of a stack."""
    return jax.eval_shape(lambda w: w.dequantize(), weight).shape


def stored_bytes(weight: QuantizedWeight) -> int:
    """Number of bytes of its arrays."""
    arrays = arrays_of("", weight).values()
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def packed_shardings(weight: QuantizedWeight, spec: ParamSpec, mesh: Mesh) -> QuantizedWeight:
    """Shardings of its arrays, in the weight's own structure.

    The arrays are sharded by the logical axes of the matrix, `spec`. No shard cuts a group, a byte
    or a block: a mesh axis that would do so shards the other dim instead, or nothing if that does
    not divide either.
    """
    *front, K, N = spec.shape
    sizes = {"K": [K], "N": [N]}  # sizes that must be divided evenly, per matrix dim
    for field, dims in weight.ALONG.items():
        shape = getattr(weight, field).shape
        for dim, size in zip(dims, shape[len(shape) - len(dims) :]):
            sizes[dim].append(size)
    units = {dim: math.gcd(*cut) if cut[1:] else 1 for dim, cut in sizes.items()}
    names = lambda shape: [mesh_axes_in(entry) for entry in partition_spec(spec.axes, shape, mesh)]
    *stack, of_K, of_N = names((*front, units["K"], units["N"]))
    found, wanted = {"K": of_K, "N": of_N}, names(spec.shape)
    for other, more in (("N", wanted[-2][len(of_K) :]), ("K", wanted[-1][len(of_N) :])):
        if units[other] % math.prod(mesh.shape[name] for name in found[other] + more) == 0:
            found[other] += more
    where = {
        field: NamedSharding(mesh, PartitionSpec(*stack, *(found[dim] for dim in dims)))
        for field, dims in weight.ALONG.items()
    }
    return dataclasses.replace(weight, **where)
