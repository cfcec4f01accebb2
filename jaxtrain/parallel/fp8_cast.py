"""Casts to float8 under a mesh: each device runs the kernel on its own rows.

A scale is of the whole array. Delayed scaling knows it before; the new amax is a maximum over the
devices. With current scaling XLA finds the amax first.
"""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtrain_kernels.matmul.fp8 import BACKENDS, CastBackend, Implementation, choose_cast
from jaxtrain_kernels.matmul.fp8.functions import Function
from jaxtyping import Array

from jaxtrain.parallel.axes import current_mesh, partition_spec, shard_map

ROWS_ALONE = ("data", "fsdp")  # mesh axes that divide an activation's rows and nothing else of it


class ShardedCast(NamedTuple):
    """A `CastBackend`. axes: mesh axes that divide the rows. implementation: of each device's."""

    axes: tuple[str, ...]
    implementation: str | None = None

    def cast(
        self,
        arrays: tuple[Array, ...],
        multiplier: Array,
        dtype: DTypeLike,
        function: Function,
        *,
        saturate: bool,
    ) -> tuple[Array, Array]:
        backend = self.choose(arrays, dtype)

        def local(multiplier: Array, *arrays: Array) -> tuple[Array, Array]:
            q_MK, q_KM = backend.cast(arrays, multiplier, dtype, function, saturate=saturate)
            return q_MK, q_KM

        if backend is BACKENDS["xla"]:
            return local(multiplier, *arrays)
        rows = P(self.axes, None)
        outs = rows, P(None, self.axes)
        return shard_map(local, (P(), *[rows] * len(arrays)), outs)(multiplier, *arrays)

    def cast_measured(
        self, arrays: tuple[Array, ...], multiplier: Array, dtype: DTypeLike, function: Function
    ) -> tuple[Array, Array, Array]:
        backend = self.choose(arrays, dtype)
        if backend is BACKENDS["xla"]:
            return backend.cast_measured(arrays, multiplier, dtype, function)

        def local(multiplier: Array, *arrays: Array) -> tuple[Array, Array, Array]:
            q_MK, q_KM, seen = backend.cast_measured(arrays, multiplier, dtype, function)
            return q_MK, q_KM, jax.lax.pmax(jnp.max(seen), self.axes)

        rows = P(self.axes, None)
        outs = rows, P(None, self.axes), P()
        return shard_map(local, (P(), *[rows] * len(arrays)), outs)(multiplier, *arrays)

    def choose(self, arrays: tuple[Array, ...], dtype: DTypeLike) -> CastBackend:
        """The backend for each device's rows; XLA, which divides an array itself, for others."""
        mesh = current_mesh()
        (M, K), count = arrays[0].shape, prod(mesh.shape[name] for name in self.axes) if mesh else 1
        here = [jax.ShapeDtypeStruct((M // count, K), x.dtype) for x in arrays]
        return choose_cast(tuple(here), dtype, "xla" if M % count else self.implementation)


def cast_backend() -> Implementation:
    """The backend of the casts of a step; None is the default of one device.

    XLA serves meshes that divide columns or the sequence, and code that is manual already.
    """
    mesh = current_mesh()
    if mesh is None:
        return None
    divided = {name for name, size in mesh.shape.items() if size > 1}
    if mesh.manual_axes or not divided.issubset(ROWS_ALONE):
        return "xla"
    (axes,) = partition_spec(("batch",), (mesh.size,), mesh)
    return ShardedCast((axes,) if isinstance(axes, str) else tuple(axes))
