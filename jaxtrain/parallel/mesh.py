"""The device mesh. A single device is a mesh of ones, so there is no separate code path."""

import os
from collections.abc import Sequence
from math import gcd, prod
from typing import Annotated, Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from pydantic import Field

from jaxtrain.parallel.axes import BATCH
from jaxtrain.settings import Settings, UserError

# Outer first: the axes with the largest and most frequent communication join the nearest devices.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
AxisSize = Annotated[int, Field(ge=1)] | Literal["auto"]


class MeshConfig(Settings):
    """Number of devices along each parallel axis. One axis may be `auto`: all remaining devices."""

    data: AxisSize = Field(
        "auto", description="data parallelism: devices with different sequences of the batch"
    )
    fsdp: AxisSize = Field(
        1,
        description="FSDP: devices that shard parameters and optimizer states (see zero) as well "
        "as the batch",
    )
    tensor: AxisSize = Field(
        1,
        description="tensor parallelism: devices that split heads, hidden units and vocabulary of "
        "each layer",
    )
    expert: AxisSize = Field(
        1,
        description="expert parallelism: devices that split the experts of model.moe as well as "
        "the batch",
    )
    context: AxisSize = Field(
        1, description="context parallelism: devices that split each sequence, for long sequences"
    )
    pipeline: AxisSize = Field(
        1, description="pipeline parallelism: number of stages, each with some of the layers"
    )
    pipeline_repeats: int = Field(
        1,
        ge=1,
        description="chunks of layers per stage, through which a microbatch passes in turn "
        "(interleaved schedule, virtual stages); more chunks give a smaller pipeline bubble",
    )
    pipeline_schedule: Literal["gpipe", "1f1b"] = Field(
        "gpipe",
        description="gpipe: all forward passes, then all backward passes, which recompute the "
        "layers. 1f1b: a backward pass after each forward pass, without recomputation (except "
        "model.remat); all stages share the head",
    )
    batch_overlap: int = Field(
        1,
        ge=1,
        description="parts of a device's batch that are computed concurrently, so that the "
        "communication of one part (tensor, expert, fsdp) overlaps the matmuls of another "
        "(Domino, two-batch overlap); 1: off",
    )
    zero: Literal[1, 2, 3] = Field(
        3,
        description="ZeRO stage, the state that fsdp shards: 1 master weights and optimizer "
        "states, 2 also gradients, 3 also the weights in the compute dtype, which are gathered "
        "layer by layer",
    )


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh with the axes of AXES over `devices` (default: all)."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = axis_sizes(config, len(devices))
    mesh = Mesh(device_grid(sizes, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if exchanges_within_layers(mesh):
        prefer_copy_engines()
    return mesh


def exchanges_within_layers(mesh: Mesh) -> bool:
    """Whether devices exchange activations within each layer (`tensor`, `expert`)."""
    return any(mesh.shape.get(axis, 1) > 1 for axis in ("tensor", "expert"))


def prefer_copy_engines() -> None:
    """Let NCCL exchange symmetric buffers by the copy engines, unless the environment says how.

    2 is NCCL_CTA_POLICY_ZERO of NCCL 2.28, which reads it when a process has its first exchange.
    """
    os.environ.setdefault("NCCL_CTA_POLICY", "2")


def axis_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """Number of devices along each axis, `auto` resolved. Raises UserError if they do not fit."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    asked = {axis: size for axis, size in sizes.items() if size not in (1, "auto")}
    autos = [axis for axis in MeshConfig.model_fields if sizes.get(axis) == "auto"]
    if len(autos) > 1:
        raise UserError(f"mesh: only one axis can be auto, but {' and '.join(autos)} are")
    for axis, size in asked.items():
        check_divides(f"mesh.{axis}", size, {"devices": devices}, "the number of")
    fixed = prod(asked.values())
    if devices % fixed or (not autos and fixed != devices):
        given = asked if autos else {"data": sizes["data"]} | asked  # auto by default, so 1 is too
        raise UserError(mesh_size_error(given, devices, bool(autos)))
    return {axis: devices // fixed if size == "auto" else size for axis, size in sizes.items()}


def mesh_size_error(given: dict[str, int], devices: int, auto: bool) -> str:
    """Error message for axis sizes that do not fit the number of devices, with sizes that do.

    auto: another axis is `auto`.
    """
    fixed = prod(given.values())
    rest = {axis: fixed // size for axis, size in given.items()}
    would = [f"mesh.{axis}={devices // n}" for axis, n in rest.items() if devices % n == 0]
    right = f"make the product {'a divisor of ' * auto}{devices}"
    if would:
        right = f"give {' or '.join(would)}"
        right += "" if auto else ", or auto" if len(would) == 1 else ", or auto for one of them"
    names = " ".join(f"mesh.{axis}={size}" for axis, size in given.items())
    has = f"of {devices} devices" if fixed < devices else f"devices, but there are {devices}"
    return f"{names}: {fixed} {has}; {right}"


def check_divides(name: str, shards: int, dims: dict[str, int], of: str = "") -> None:
    """Raise UserError, with valid sizes, unless `shards` divides each of these dims."""
    for dim, size in dims.items():
        if size % shards:
            most = gcd(*dims.values())
            would = ", ".join(str(n) for n in range(1, min(most, 512) + 1) if most % n == 0)
            what = f"{of} {dim}, {size}" if of else f"{dim} {size}"
            raise UserError(f"{name}={shards} does not divide {what}; these would: {would}")


def device_grid(sizes: dict[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Arrange devices in the order of the axes: devices of a host inside, hosts outside.

    The outer axes span as many hosts as they can. So gradient sums cross the network, and
    communication within a layer does so only if no other axis can.
    """
    shape = [sizes[axis] for axis in AXES]
    hosts = len({device.process_index for device in devices})
    if hosts == 1 or len(devices) % hosts:
        return np.asarray(devices).reshape(shape)
    across, left = [], hosts
    for size in shape:
        across.append(gcd(size, left))
        left //= across[-1]
    within = [size // outer for size, outer in zip(shape, across)]
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, process_is_granule=True, allow_split_physical_axes=True
    )


def num_batch_shards(mesh: Mesh) -> int:
    """Number of shards of the batch dim."""
    return prod(mesh.shape[axis] for axis in BATCH)


def process_batch_shard(mesh: Mesh) -> tuple[int, int]:
    """(i, n): this process loads shard i of n of a batch's rows.

    Processes load the same rows if an axis that does not shard the batch spans them.
    """
    parts: dict[int, list[int]] = {}
    places = [mesh.axis_names.index(axis) for axis in BATCH]  # `pipeline` is outside of these
    devices = np.moveaxis(mesh.devices, places, range(len(places)))
    for part, row in enumerate(devices.reshape(num_batch_shards(mesh), -1)):
        for process in {process_of(device) for device in row}:
            parts.setdefault(process, []).append(part)
    size = len(parts[jax.process_index()])
    for process, mine in parts.items():
        if len(mine) != size or mine[0] % size or mine[-1] - mine[0] != size - 1:
            raise UserError(
                f"mesh: process {process} would hold the batch shards {mine} of "
                f"{num_batch_shards(mesh)}: give all processes equally many devices, and let "
                "mesh.tensor divide their number or be a multiple of it"
            )
    return parts[jax.process_index()][0] // size, num_batch_shards(mesh) // size


def process_of(device: Any) -> int:
    return device.process_index


def gather_to_host[Tree](tree: Tree) -> Tree:
    """Gather sharded arrays as whole NumPy arrays in every process, one array at a time."""

    def one(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            x = jax.jit(lambda y: y, out_shardings=PartitionSpec())(x)
        return np.asarray(x)

    return jax.tree.map(one, tree)


def shard_from_host[Tree](tree: Tree, where: PyTree) -> Tree:
    """Put arrays that every process has whole on the mesh; each process places its shards."""
    if jax.process_count() == 1:
        return jax.device_put(tree, where)
    return jax.device_put(jax.tree.map(np.asarray, tree), where)


def place_batch[Tree](batch: Tree, mesh: Mesh, batch_dim: int = 0) -> Tree:
    """Make global arrays, sharded over the batch axes, from this process's host rows (None leaves
    stay)."""
    sharding = batch_sharding(mesh, batch_dim)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def batch_types[Tree](batch: Tree, mesh: Mesh, batch_dim: int = 0) -> Tree:
    """Return the shapes, dtypes and shardings of `place_batch`'s arrays, without the devices."""
    sharding, processes = batch_sharding(mesh, batch_dim), process_batch_shard(mesh)[1]

    def one(x: np.ndarray) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        shape[batch_dim] *= processes
        return jax.ShapeDtypeStruct(
            shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding
        )

    return jax.tree.map(one, batch)


def batch_sharding(mesh: Mesh, batch_dim: int = 0) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[None] * batch_dim, BATCH))
