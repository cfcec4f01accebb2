"""Logical axes to mesh axes: the model names its dims, this one table places them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Parameters follow `embed` (FSDP) and the tensor-parallel dims; activations follow `batch`.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
}


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | jax.sharding.AbstractMesh
) -> PartitionSpec:
    """The placement of an array whose dims carry these logical axes.

    A dim that its mesh axes do not divide stays whole (a gate of 12 channels, say): that is
    always correct and costs memory only.
    """
    entries = []
    for axis, size in zip(axes, shape, strict=True):
        rule = RULES[axis] if axis else None
        names = (rule,) if isinstance(rule, str) else rule or ()
        ways = 1
        for name in names:
            ways *= mesh.shape[name]
        entries.append(rule if ways > 1 and size % ways == 0 else None)
    return PartitionSpec(*entries)


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of NamedSharding for a tree of parameter declarations (`.axes`, `.shape`)."""
    return jax.tree.map(lambda s: NamedSharding(mesh, partition_spec(s.axes, s.shape, mesh)), specs)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation's placement under the mesh in force (`jax.set_mesh`); free without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh))
