"""Sharding: the device mesh, logical-axis rules, kernels under a mesh, and parallel schedules."""

from jaxtrain.parallel.axes import (
    BATCH,
    constrain,
    constrain_tree,
    num_shards,
    partition_spec,
    replicated_axes,
    shard_map,
    shardings,
    split_rows,
)
from jaxtrain.parallel.context import (
    check_context_chunks,
    context_size,
    previous_token,
    zigzag_shard,
)
from jaxtrain.parallel.experts import has_whole_experts, moe_dispatch_combine, moe_of_rows
from jaxtrain.parallel.kernels import (
    attention,
    embedding_grad,
    embedding_lookup,
    feed_forward_relu2,
    linear_cross_entropy,
    paged_attention,
    rope_attention,
    shard_map_tokens,
    token_losses,
)
from jaxtrain.parallel.mesh import MeshConfig, make_mesh, place_batch
from jaxtrain.parallel.pipeline import (
    bubble_fraction,
    check_stages,
    pad_chunks,
    pipeline_size,
    run_pipeline,
    split_layers,
)
from jaxtrain.parallel.pipeline_1f1b import pipeline_loss
from jaxtrain.parallel.stacks import distribute_matrices
from jaxtrain.parallel.tensor import (
    joined_matmul,
    splits_heads,
    tensor_matmuls,
    tensor_size,
)

__all__ = [
    "BATCH", "MeshConfig", "attention", "bubble_fraction", "check_context_chunks", "check_stages",
    "constrain", "constrain_tree", "context_size", "distribute_matrices", "embedding_grad",
    "embedding_lookup", "feed_forward_relu2", "has_whole_experts", "joined_matmul",
    "linear_cross_entropy", "make_mesh", "moe_dispatch_combine", "moe_of_rows", "num_shards",
    "pad_chunks", "paged_attention", "partition_spec", "pipeline_loss", "pipeline_size",
    "place_batch", "previous_token", "replicated_axes", "rope_attention", "run_pipeline",
    "shard_map", "shard_map_tokens", "shardings", "split_layers", "split_rows", "splits_heads",
    "tensor_matmuls", "tensor_size", "token_losses", "zigzag_shard",
]  # fmt: skip
