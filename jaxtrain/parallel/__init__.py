"""Where arrays live: the device mesh, the logical-axis rules, and kernels wrapped for a mesh."""

from jaxtrain.parallel.axes import (
    BATCH,
    RULES,
    axes_of_copies,
    constrain,
    constrain_tree,
    over_devices,
    partition_spec,
    shardings,
    ways_of,
)
from jaxtrain.parallel.context import check_pieces, previous, spread
from jaxtrain.parallel.experts import feed_experts
from jaxtrain.parallel.kernels import (
    attention,
    by_rows,
    feed_forward_relu2,
    linear_cross_entropy,
    row_sums,
    rows_at,
    token_losses,
)
from jaxtrain.parallel.mesh import MeshConfig, make_mesh, place_batch
from jaxtrain.parallel.pipeline import bubble, check_stages, cut, padded, pipeline_ways, pipelined
from jaxtrain.parallel.stacks import over_matrices

__all__ = [
    "BATCH",
    "RULES",
    "MeshConfig",
    "attention",
    "axes_of_copies",
    "bubble",
    "by_rows",
    "check_pieces",
    "check_stages",
    "constrain",
    "constrain_tree",
    "cut",
    "feed_experts",
    "feed_forward_relu2",
    "linear_cross_entropy",
    "make_mesh",
    "over_devices",
    "over_matrices",
    "padded",
    "partition_spec",
    "pipeline_ways",
    "pipelined",
    "place_batch",
    "previous",
    "row_sums",
    "rows_at",
    "shardings",
    "spread",
    "token_losses",
    "ways_of",
]
