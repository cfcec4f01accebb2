"""Where arrays live: the device mesh, the logical-axis rules, and kernels wrapped for a mesh."""

from jaxtrain.parallel.axes import RULES, constrain, partition_spec, shardings
from jaxtrain.parallel.kernels import (
    attention,
    by_rows,
    feed_forward_relu2,
    linear_cross_entropy,
)
from jaxtrain.parallel.mesh import MeshConfig, make_mesh, place_batch
from jaxtrain.parallel.stacks import over_matrices

__all__ = [
    "RULES",
    "MeshConfig",
    "attention",
    "by_rows",
    "constrain",
    "feed_forward_relu2",
    "linear_cross_entropy",
    "make_mesh",
    "over_matrices",
    "partition_spec",
    "place_batch",
    "shardings",
]
