"""Our kernels under a mesh.

XLA has no partitioning rule for a hand-written kernel, and a scan over token chunks would gather
the batch. So each device runs the kernel on its own rows and heads under `shard_map`; the
gradient of a replicated operand is summed by shard_map's own transpose.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jaxtrain_kernels as kernels
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxtrain.parallel.axes import constrain, partition_spec
from jaxtrain.settings import UserError

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
    deterministic: bool = False,
) -> Float[Array, "B T N H"]:
    """Causal attention, split over batch rows and heads (see `jaxtrain_kernels.attention`).

    Raises UserError if the backend that was asked for cannot serve.
    """

    def local(q, k, v, segments):
        try:
            return kernels.attention(
                q, k, v, causal=True, window=window, segment_ids_BT=segments, softcap=softcap,
                scale=scale, implementation=implementation, deterministic=deterministic,
            )  # fmt: skip
        except NotImplementedError as error:
            raise UserError(f"model.{error}; model.attention=null takes one that can") from None

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


def by_rows(kernel: Callable[..., Any], *arrays: Any) -> Any:
    """kernel(*arrays), split over the batch rows of what has three dims or more; None may be among.

    The results have batch rows first as well. Columns (of a tensor-parallel hidden layer, say) are
    gathered.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return kernel(*arrays)
    specs = tuple(P(ROWS) if x is not None and x.ndim >= 3 else P() for x in arrays)
    return jax.shard_map(kernel, in_specs=specs, out_specs=P(ROWS), check_vma=False)(*arrays)


def feed_forward_relu2(
    x_BTD: Float[Array, "B T D"],
    w_up_DF: Float[Array, "D F"],
    w_down_FD: Float[Array, "F D"],
    implementation: str | None = None,
) -> Float[Array, "B T D"]:
    """relu(x W_up)^2 W_down, split over batch rows and the hidden dim (see `jaxtrain_kernels`).

    Raises UserError if the backend that was asked for cannot serve.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if implementation != "mosaic":  # XLA knows how to split the others
        pin = lambda h_BTF: constrain(h_BTF, "batch", None, "hidden")
        return kernels.feed_forward_relu2(
            x_BTD, w_up_DF, w_down_FD, constrain=pin, implementation=implementation
        )

    def local(x, w_up, w_down):
        try:
            return kernels.feed_forward_relu2(x, w_up, w_down, implementation=implementation)
        except NotImplementedError as error:
            raise UserError(f"model.rows.ffn: {error}; null takes XLA's") from None

    if mesh.empty or mesh.size == 1:
        return local(x_BTD, w_up_DF, w_down_FD)
    (hidden,) = partition_spec(("hidden",), w_down_FD.shape[:1], mesh)

    def part(x, w_up, w_down):
        y = local(x, w_up, w_down)
        return y if hidden is None else jax.lax.psum(y, hidden)

    rows = partition_spec(("batch", None, None), x_BTD.shape, mesh)
    specs = rows, P(None, hidden), P(hidden, None)
    return jax.shard_map(part, in_specs=specs, out_specs=rows, check_vma=False)(
        x_BTD, w_up_DF, w_down_FD
    )
