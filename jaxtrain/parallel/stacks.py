"""Work on whole matrices of a sharded stack: each device gets some, and none is replicated.

On a mesh with one axis a sharding constraint would suffice. With two axes XLA makes a replicated
copy, so the exchange is written by hand.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.axes import current_mesh, manual_axes, partition_spec, shard_map


def distribute_matrices(
    work: Callable[..., tuple[Any, ...]],
    axes: Sequence[str | None],
    *stacks: jax.Array | None,
    rate: jax.Array | float,
) -> tuple[Any, ...]:
    """`work(rate, *stacks)`, with the stacks' matrices distributed over all devices of the mesh.

    A stack `[..., in, out]` is sharded by its logical `axes`; None is passed through. `rate` is a
    replicated scalar. `work` takes stacks `[n, in, out]` of any n and returns as many, of the same
    shapes; the results have the shapes and shardings of the arguments. If the number of matrices is
    not a multiple of the devices, zero matrices are added. Along mesh axes that shard a matrix,
    devices exchange shards (two all-to-alls). Along axes that replicate it, each device takes its
    share, and the results are all-gathered.
    """
    mesh = current_mesh()
    if mesh is None:
        return work(rate, *stacks)
    specs = tuple(P() if x is None else partition_spec(axes, x.shape, mesh) for x in stacks)

    def local(rate: Any, *parts: Any) -> tuple[Any, ...]:
        results = work(
            rate, *(x if x is None else scatter_matrices(x, s, mesh) for x, s in zip(parts, specs))
        )
        return tuple(
            x if x is None else gather_matrices(x, s, mesh, part.shape)
            for x, s, part in zip(results, specs, parts)
        )

    return shard_map(local, (P(), *specs), specs)(rate, *stacks)


def distribution_axes(spec: P, mesh: AbstractMesh) -> list[tuple[str, int | None]]:
    """Mesh axes to distribute over, in order, each with the matrix dim (1 or 2) that it shards, or
    None."""
    names = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    stacked = [name for entry in names[:-2] for name in entry]
    dims = {name: dim for dim, entry in enumerate(names[-2:], 1) for name in entry}
    return [
        (name, dims.get(name))
        for name, size in mesh.shape.items()
        if size > 1 and name not in (*stacked, *manual_axes(mesh))
    ]


def scatter_matrices(x: jax.Array, spec: P, mesh: AbstractMesh) -> jax.Array:
    """Turn this device's shard of a stack into its own whole matrices `[n, in, out]`."""
    x = x.reshape(-1, *x.shape[-2:])
    steps = distribution_axes(spec, mesh)
    sizes = [mesh.shape[name] for name, _ in steps]
    share = -(-len(x) // prod(sizes))
    x = jnp.pad(x, ((0, share * prod(sizes) - len(x)), (0, 0), (0, 0)))
    for (name, dim), count in zip(steps, sizes):
        if dim is not None:
            x = jax.lax.all_to_all(x, name, 0, dim, tiled=True)
        else:
            size = len(x) // count
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(name) * size, size)
    return x


def gather_matrices(x: jax.Array, spec: P, mesh: AbstractMesh, shape: tuple[int, ...]) -> jax.Array:
    """Turn whole matrices `[n, in, out]` into this device's shard of the stack, of this shape."""
    for name, dim in reversed(distribution_axes(spec, mesh)):
        if dim is not None:
            x = jax.lax.all_to_all(x, name, dim, 0, tiled=True)
        else:
            x = jax.lax.all_gather(x, name, tiled=True)
    return x[: prod(shape[:-2])].reshape(shape)
