"""Logical axes to mesh axes: the model names its dims, and one table (`RULES`) shards them."""

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

SpecTree = dict[str, Any]  # a tree of declarations with `axes` and `shape`, such as `ParamSpec`
Shardings = dict[str, Any]  # a tree of the same structure, of NamedSharding
# Mesh axes that shard the batch; devices along `expert` also hold different experts.
BATCH = ("data", "fsdp", "expert")
# Parameters are sharded by `embed` (FSDP) and the tensor-parallel dims. Activations are sharded by
# `batch` and, along the sequence, by `tokens`, or by `sequence` for token-wise operations (the
# residual stream). There `tensor` shards the batch if it divides it, else the sequence, since an
# exchange of the outer dim needs no transpose.
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
# Sharded over `fsdp` at each ZeRO stage, besides master weights and optimizer states (Rajbhandari
# et al. 2020); the rest is replicated over `fsdp`.
ZERO: dict[int, tuple[str, ...]] = {1: (), 2: ("gradients",), 3: ("gradients", "parameters")}


def partition_spec(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    without: str | None = None,
) -> PartitionSpec:
    """Sharding of an array whose dims have these logical axes.

    A dim that its mesh axes do not divide is sharded over fewer of them, the first ones, or
    replicated (a gate of 12 channels, say). That is always correct and only costs memory. without:
    a mesh axis that must not shard this array.
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
    """Mesh axes in an entry of a PartitionSpec, as a tuple."""
    return (entry,) if isinstance(entry, str) else entry or ()


def shardings(specs: SpecTree, mesh: Mesh) -> Shardings:
    """A tree of NamedSharding for a tree of parameter declarations (`.axes`, `.shape`)."""
    return jax.tree.map(lambda s: NamedSharding(mesh, partition_spec(s.axes, s.shape, mesh)), specs)


def manual_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Mesh axes that are manual in a surrounding shard_map."""
    return mesh.manual_axes if isinstance(mesh, AbstractMesh) else ()


def current_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh`, if it has several devices along the axes that are not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    free = [size for name, size in mesh.shape.items() if name not in manual_axes(mesh)]
    return None if prod(free) == 1 else mesh


def num_shards(axis: str, size: int) -> int:
    """Number of shards of a dim with this logical axis and size on the current mesh."""
    mesh = current_mesh()
    if mesh is None:
        return 1
    (entry,) = partition_spec((axis,), (size,), mesh)
    return prod(mesh.shape[name] for name in mesh_axes_in(entry))


def split_rows[Tree](tree: Tree, parts: int) -> list[Tree]:
    """Split arrays [B, ...] into parts [B / parts, ...], with equally many rows per device in each.

    B is a multiple of parts x the batch shards; no communication.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shards = prod(mesh.shape.get(name, 1) for name in BATCH if name not in manual_axes(mesh))

    def part(x: jax.Array, i: int) -> jax.Array:
        own = x.reshape(shards, parts, -1, *x.shape[1:])[:, i]
        return constrain(own.reshape(-1, *x.shape[1:]), "batch", *(None,) * (x.ndim - 1))

    return [jax.tree.map(functools.partial(part, i=i), tree) for i in range(parts)]


def replicated_axes(zero: int) -> tuple[str, ...]:
    """The mesh axes with several devices, if at this ZeRO stage all weights and gradients are
    replicated and only the batch is sharded; () if anything else is sharded.
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
    """`jax.shard_map` over all axes of the current mesh that are not manual already."""
    mesh = jax.sharding.get_abstract_mesh()
    names = set(mesh.axis_names) - set(manual_axes(mesh))
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def psum_replicated_grad(x: jax.Array, axis: str) -> jax.Array:
    """psum over a mesh axis, in `shard_map`, for a result that is replicated along the axis.

    Each device receives an equal share of the result's gradient, so multiplying by the axis size
    gives the whole gradient. The gradient of `jax.lax.psum` would communicate nevertheless.
    """
    return jax.lax.psum(x, axis)


psum_replicated_grad.defvjp(
    lambda x, axis: (psum_replicated_grad(x, axis), None),
    lambda axis, _, g: (g * jax.lax.axis_size(axis),),
)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain an activation's sharding on the current mesh (`jax.set_mesh`), if there is one."""
    mesh = current_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh))


def gather_fsdp[Tree](tree: Tree) -> Tree:
    """All-gather arrays, if `fsdp` is the only axis that shards parameters; else return them.

    For packed matrices before they are dequantized: XLA would dequantize each shard and gather the
    result, 4 to 8 times the bytes.
    """
    mesh = current_mesh()
    if mesh is None or mesh.shape["fsdp"] == 1 or "fsdp" in manual_axes(mesh):
        return tree
    if any(mesh.shape[axis] > 1 for axis in ("pipeline", "expert", "tensor")):
        return tree
    whole = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec())
    return jax.tree.map(whole, tree)


def constrain_tree[Tree](kind: str, tree: Tree, specs: SpecTree, zero: int) -> Tree:
    """Constrain parameters or gradients (`kind`) to the sharding of this ZeRO stage; no-op without
    a mesh."""
    mesh = current_mesh()
    if mesh is None:
        return tree
    without = None if kind in ZERO[zero] else "fsdp"
    spec_of = lambda s: partition_spec(s.axes, s.shape, mesh, without)
    return jax.tree.map(lambda x, s: jax.lax.with_sharding_constraint(x, spec_of(s)), tree, specs)
