"""The device mesh. One device is the 1x1x1 mesh, so there is no other code path."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from pydantic import Field

from jaxtrain.settings import Settings, UserError

AXES = ("data", "fsdp", "tensor")
Ways = Annotated[int, Field(ge=1)] | Literal["auto"]


class MeshConfig(Settings):
    """How many devices each axis takes. One axis may be `auto`: what the others leave."""

    data: Ways = Field("auto", description="devices that hold different batch rows")
    fsdp: Ways = Field(
        1, description="devices that split parameters and states as well as batch rows (ZeRO-3)"
    )
    tensor: Ways = Field(
        1, description="devices that split heads, hidden units and vocabulary of each layer"
    )


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh with the axes data, fsdp, tensor over `devices` (default: all)."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = {axis: getattr(config, axis) for axis in AXES}
    autos = [axis for axis, size in sizes.items() if size == "auto"]
    fixed = int(np.prod([size for size in sizes.values() if size != "auto"]))
    if len(autos) > 1:
        raise UserError(f"mesh: only one axis can be auto, but {' and '.join(autos)} are")
    if len(devices) % fixed or (not autos and fixed != len(devices)):
        asked = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise UserError(
            f"mesh: {asked} does not fit {len(devices)} devices; make the product equal"
        )
    for axis in autos:
        sizes[axis] = len(devices) // fixed
    grid = np.asarray(devices).reshape([sizes[axis] for axis in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_ways(mesh: Mesh) -> int:
    """Over how many devices the batch dim is split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def place_batch(batch: Any, mesh: Mesh, batch_dim: int = 0) -> Any:
    """Host rows of this process -> global arrays split over the batch axes (None leaves stay)."""
    spec = [None] * batch_dim + [("data", "fsdp")]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)
