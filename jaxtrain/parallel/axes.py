"""Logical axes to mesh axes: the model names its dims, this one table places them."""

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

SpecTree = dict[str, Any]  # of declarations that have `axes` and `shape`, as `ParamSpec`
Shardings = dict[str, Any]  # the same tree, of NamedSharding
# The devices that hold different batch rows; those of `expert` hold different experts as well.
BATCH = ("data", "fsdp", "expert")
# Parameters follow `embed` (FSDP) and the tensor-parallel dims; activations follow `batch` and,
# along the text, `tokens` or, where each token is worked on by itself (the stream), `sequence`.
# The devices of `tensor` divide the rows of the stream where they can, else the tokens of a row:
# an exchange of the outer dim needs no transpose.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": BATCH,
    "tokens": "context",
    "sequence": ("context", "tensor"),
    "layers": "pipeline",
    "micro": "pipeline",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    "experts": "expert",
}
# What else than the weights' masters and the states is split over `fsdp` at each stage of ZeRO
# (Rajbhandari et al. 2020); the rest is whole on each of its devices.
ZERO: dict[int, tuple[str, ...]] = {1: (), 2: ("gradients",), 3: ("gradients", "parameters")}


def partition_spec(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    without: str | None = None,
) -> PartitionSpec:
    """The placement of an array whose dims carry these logical axes.

    A dim that its mesh axes do not divide is split by the first of them alone, or stays whole (a
    gate of 12 channels, say): that is always correct and costs memory only. without: a mesh axis
    that is not to split this array.
    """
    entries, rules = [], RULES
    if "sequence" in axes and "batch" in axes:
        outer = (*BATCH, "tensor")
        split = prod(mesh.shape[name] for name in outer if name not in manual_axes(mesh))
        if shape[list(axes).index("batch")] % split == 0:
            rules = RULES | {"batch": outer, "sequence": "context"}
    for axis, size in zip(axes, shape, strict=True):
        rule = rules[axis] if axis else None
        names = (rule,) if isinstance(rule, str) else rule or ()
        names = tuple(name for name in names if name not in (*manual_axes(mesh), without))
        count = lambda names: prod(mesh.shape[name] for name in names)
        while size % count(names):
            names = names[:-1]
        entries.append(None if count(names) == 1 else rule if isinstance(rule, str) else names)
    return PartitionSpec(*entries)


def mesh_axes_in(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def shardings(specs: SpecTree, mesh: Mesh) -> Shardings:
    """A tree of NamedSharding for a tree of parameter declarations (`.axes`, `.shape`)."""
    return jax.tree.map(lambda s: NamedSharding(mesh, partition_spec(s.axes, s.shape, mesh)), specs)


def manual_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes along which a surrounding shard_map has split everything already."""
    return mesh.manual_axes if isinstance(mesh, AbstractMesh) else ()


def current_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh`, if it has several devices along the axes that are not taken."""
    mesh = jax.sharding.get_abstract_mesh()
    free = [size for name, size in mesh.shape.items() if name not in manual_axes(mesh)]
    return None if prod(free) == 1 else mesh


def num_shards(axis: str, size: int) -> int:
    """In how many parts the mesh in force splits a dim of that logical axis and size."""
    mesh = current_mesh()
    if mesh is None:
        return 1
    (entry,) = partition_spec((axis,), (size,), mesh)
    return prod(mesh.shape[name] for name in mesh_axes_in(entry))


def split_rows[Tree](tree: Tree, parts: int) -> list[Tree]:
    """Arrays [B, ...] in parts [B / parts, ...], each with equally many rows of every device.

    B is a multiple of parts x the devices that hold different rows; nothing is sent.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shards = prod(mesh.shape.get(name, 1) for name in BATCH if name not in manual_axes(mesh))

    def part(x: jax.Array, i: int) -> jax.Array:
        own = x.reshape(shards, parts, -1, *x.shape[1:])[:, i]
        return constrain(own.reshape(-1, *x.shape[1:]), "batch", *(None,) * (x.ndim - 1))

    return [jax.tree.map(functools.partial(part, i=i), tree) for i in range(parts)]


def replicated_axes(zero: int) -> tuple[str, ...]:
    """The mesh axes with several devices, if each has all weights and gradients, at this stage of
    ZeRO, and batch rows of its own; () where anything else is split.
    """
    mesh = current_mesh()
    if mesh is None:
        return ()
    split = [
        name for name, size in mesh.shape.items() if size > 1 and name not in manual_axes(mesh)
    ]
    whole = ("data", "fsdp") if zero == 1 else ("data",)
    return tuple(split) if set(split) <= set(whole) else ()


def shard_map[**Arrays, Result](
    function: Callable[Arrays, Result], in_specs: PyTree, out_specs: PyTree
) -> Callable[Arrays, Result]:
    """`function` run by each device of the mesh in force on its own parts of the arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    names = set(mesh.axis_names) - set(manual_axes(mesh))
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def psum_replicated_grad(x: jax.Array, axis: str) -> jax.Array:
    """The sum over a mesh axis, in `shard_map`, whose results are the same along it.

    Such a result's gradient comes to each device in equal shares, so that it is there already.
    That of `jax.lax.psum` sends them all the same.
    """
    return jax.lax.psum(x, axis)


psum_replicated_grad.defvjp(
    lambda x, axis: (psum_replicated_grad(x, axis), None),
    lambda axis, _, g: (g * jax.lax.axis_size(axis),),
)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation's placement under the mesh in force (`jax.set_mesh`); free without one."""
    mesh = current_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh))


def gather_fsdp[Tree](tree: Tree) -> Tree:
    """Arrays whole on each device, where `fsdp` is the one axis that splits parameters.

    For packed matrices before they are dequantized: XLA would dequantize a device's part and send
    the result, 4 to 8 times the bytes.
    """
    mesh = current_mesh()
    if mesh is None or mesh.shape["fsdp"] == 1 or "fsdp" in manual_axes(mesh):
        return tree
    if any(mesh.shape[axis] > 1 for axis in ("pipeline", "expert", "tensor")):
        return tree
    whole = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec())
    return jax.tree.map(whole, tree)


def constrain_tree[Tree](kind: str, tree: Tree, specs: SpecTree, zero: int) -> Tree:
    """Pin parameters or gradients (`kind`) as this stage of ZeRO has them; free without a mesh."""
    mesh = current_mesh()
    if mesh is None:
        return tree
    without = None if kind in ZERO[zero] else "fsdp"
    place = lambda s: partition_spec(s.axes, s.shape, mesh, without)
    return jax.tree.map(lambda x, s: jax.lax.with_sharding_constraint(x, place(s)), tree, specs)
