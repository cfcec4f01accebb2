"""Our kernels under a mesh.

XLA has no partitioning rule for a hand-written kernel, and a scan over token chunks would gather
the batch. So each device runs the kernel on its own rows and heads under `shard_map`; the
gradient of a replicated operand is summed by shard_map's own transpose.
"""

import functools

import jax
import jaxtrain_kernels as kernels
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxtrain.parallel.axes import partition_spec

ROWS = ("data", "fsdp")


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    *,
    window: int | None,
    segments_BT: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention, split over batch rows and heads (see `jaxtrain_kernels.attention`)."""

    def local(q, k, v, segments):
        return kernels.attention(
            q, k, v, causal=True, window=window, segment_ids_BT=segments,
            softcap=softcap, scale=scale, implementation=implementation,
        )  # fmt: skip

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(q_BTNH, k_BSKH, v_BSKH, segments_BT)
    # A few prompts, or fewer key/value heads than devices, stay whole.
    rows = partition_spec(("batch", None, "kv_heads", None), k_BSKH.shape, mesh)
    specs = (rows, rows, rows, None if segments_BT is None else P(rows[0], None))
    return jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)(
        q_BTNH, k_BSKH, v_BSKH, segments_BT
    )


def linear_cross_entropy(
    x_ND: Float[Array, "N D"],
    w_DV: Float[Array, "D V"],
    labels_N: Int[Array, "N"],
    weights_N: Float[Array, "N"],
    **options,
) -> Float[Array, ""]:
    """Weighted sum of token losses, each device over its own tokens (see `jaxtrain_kernels`)."""
    loss = functools.partial(kernels.linear_cross_entropy, **options)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return loss(x_ND, w_DV, labels_N, weights_N)

    def local(x, w, labels, weights):
        return jax.lax.psum(loss(x, w, labels, weights), ROWS)

    specs = (P(ROWS, None), P(), P(ROWS), P(ROWS))
    return jax.shard_map(local, in_specs=specs, out_specs=P(), check_vma=False)(
        x_ND, w_DV, labels_N, weights_N
    )
