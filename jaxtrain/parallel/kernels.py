"""Our kernels under a mesh.

XLA has no partitioning rule for a hand-written kernel, and a scan over token chunks would gather
the batch. So each device runs the kernel on its own batch rows and heads under `shard_map`.
shard_map's own transpose sums the gradient of a replicated operand.
"""

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtrain_kernels.attention.paged import Pages
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.feed_forward import BACKENDS as FEED_FORWARD
from jaxtrain_kernels.feed_forward import Placement
from jaxtyping import Array, Float, Int

from jaxtrain.parallel import context, tensor
from jaxtrain.parallel.axes import (
    constrain,
    current_mesh,
    manual_axes,
    mesh_axes_in,
    partition_spec,
    psum_replicated_grad,
    shard_map,
)
from jaxtrain.settings import UserError


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
    causal: bool = True,
    zigzag: bool = False,
    return_lse: bool = False,
) -> Any:
    """Self-attention, sharded over batch and heads (see `jaxtrain_kernels.attention`).

    Returns [B, T, N, H]; with return_lse also the log-sum-exp [B, N, T], not with sharded
    sequences. zigzag: sequences are in the order of `zigzag_shard`, so they are also sharded over
    the axis `context`; causal attention only. Raises UserError if the requested backend does not
    support the call.
    """

    def local(q, k, v, segments):
        try:
            return kernels.attention(
                q, k, v, causal=causal, window=window, segment_ids_BT=segments, softcap=softcap,
                scale=scale, implementation=implementation, deterministic=deterministic,
                return_lse=return_lse,
            )  # fmt: skip
        except NotImplementedError as error:
            raise UserError(
                f"model.{error}; model.attention=null chooses a backend that can"
            ) from None

    mesh = current_mesh()
    if mesh is None:
        return local(q_BTNH, k_BSKH, v_BSKH, segments_BT)
    if zigzag and context.context_size() > 1:
        assert causal
        return context.attention(
            q_BTNH, k_BSKH, v_BSKH, window=window, segments_BT=segments_BT, softcap=softcap,
            scale=scale, implementation=implementation, deterministic=deterministic,
        )  # fmt: skip
    # A batch of few prompts, or fewer key/value heads than devices, stays replicated.
    rows = partition_spec(("batch", None, "kv_heads", None), k_BSKH.shape, mesh)
    specs = (rows, rows, rows, None if segments_BT is None else P(rows[0], None))
    out = (rows, P(rows[0], rows[2], None)) if return_lse else rows
    return shard_map(local, specs, out)(q_BTNH, k_BSKH, v_BSKH, segments_BT)


def rope_attention(
    qkv_BTCH: Float[Array, "B T C H"],
    cos_BTH: Float[Array, "b T H"],
    sin_BTH: Float[Array, "b T H"],
    value_BTKH: Float[Array, "B T K H"] | None,
    segments_BT: Int[Array, "B T"] | None,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """RoPE, norm and attention, sharded over batch and heads (see
    `jaxtrain_kernels.rope_attention`).

    With `tensor`, queries, keys and values of a device's heads are together (`joined_matmul`).
    Raises UserError if the requested backend does not support the call, or where `tensor` does not
    divide the heads.
    """
    heads, shards = options.pop("heads"), 1

    def local(qkv, cos, sin, value, segments):
        try:
            arrays = qkv, cos, sin, value
            return kernels.rope_attention(
                *arrays, segment_ids_BT=segments, heads=heads // shards, **options
            )
        except NotImplementedError as error:
            raise UserError(f"model.kernels.qkv: {error}; set it to xla") from None

    mesh, arrays = current_mesh(), (qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, segments_BT)
    if mesh is None:
        return local(*arrays)
    kv_heads = (qkv_BTCH.shape[2] - heads) // 2
    shards = mesh.shape["tensor"]
    if heads % shards or kv_heads % shards:
        raise UserError(
            f"model.kernels.qkv: mesh.tensor={shards} does not divide {heads} and {kv_heads} "
            "heads; set it to xla"
        )

    def split(x: Array | None, *more: str | None) -> P | None:
        return None if x is None else P(*partition_spec(("batch",), x.shape[:1], mesh), *more)

    by_head = None, "tensor" if shards > 1 else None
    qkv, value = split(qkv_BTCH, *by_head), split(value_BTKH, *by_head)
    given = qkv, split(cos_BTH), split(sin_BTH), value, split(segments_BT)
    return shard_map(local, given, qkv)(*arrays)


def paged_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_PpKH: Pages,
    v_PpKH: Pages,
    table_BW: Int[Array, "B W"],
    starts_B: Int[Array, "B"],
    counts_B: Int[Array, "B"],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attention over KV pages, sharded over heads (see `jaxtrain_kernels.paged_attention`)."""
    local = functools.partial(
        kernels.paged_attention, window=window, softcap=softcap, scale=scale,
        implementation=implementation,
    )  # fmt: skip
    arrays = q_BTNH, k_PpKH, v_PpKH, table_BW, starts_B, counts_B
    mesh, shape = current_mesh(), jax.tree.leaves(k_PpKH)[0].shape
    if mesh is None:
        return local(*arrays)
    heads = partition_spec((None, None, "kv_heads", None), shape, mesh)
    if heads[2] is None:
        return local(*arrays)  # XLA may shard the query heads
    pages = jax.tree.map(lambda x: P(*heads[: x.ndim]), k_PpKH)
    return shard_map(local, (heads, pages, pages, P(), P(), P()), heads)(*arrays)


def linear_cross_entropy(
    x_BTD: Float[Array, "*M B T D"],
    w_DV: Float[Array, "D V"],
    labels_BT: Int[Array, "*M B T"],
    weights_BT: Float[Array, "*M B T"],
    **options,
) -> Float[Array, ""]:
    """Weighted sum of token losses, each device over its own tokens (see `jaxtrain_kernels`).

    M: microbatches of a pipeline, if there is one.
    """

    def loss(x, w, labels, weights):
        arrays = x.reshape(-1, x.shape[-1]), w, labels.reshape(-1), weights.reshape(-1)
        return kernels.linear_cross_entropy(*arrays, **options)

    mesh = current_mesh()
    if mesh is None:
        return loss(x_BTD, w_DV, labels_BT, weights_BT)
    axes = ("micro", "batch", "sequence")[-labels_BT.ndim :]
    rows = partition_spec(axes, labels_BT.shape, mesh)
    names = [entry if isinstance(entry, tuple) else (entry,) for entry in rows if entry]
    local = lambda *arrays: jax.lax.psum(loss(*arrays), sum(names, ()))
    return shard_map(local, (P(*rows, None), P(), rows, rows), P())(
        x_BTD, w_DV, labels_BT, weights_BT
    )


def token_losses(
    x_BTD: Float[Array, "*M B T D"],
    w_DV: Float[Array, "D V"],
    labels_BT: Int[Array, "*M B T"],
    **options,
) -> Float[Array, "*M B T"]:
    """Loss of each token, each device over its own tokens (`linear_cross_entropy_per_token`).

    M: microbatches of a pipeline, if there is one.
    """

    def losses(x, w, labels):
        flat = x.reshape(-1, x.shape[-1]), w, labels.reshape(-1)
        return kernels.linear_cross_entropy_per_token(*flat, **options).reshape(labels.shape)

    mesh = current_mesh()
    if mesh is None:
        return losses(x_BTD, w_DV, labels_BT)
    axes = ("micro", "batch", "sequence")[-labels_BT.ndim :]
    rows = partition_spec(axes, labels_BT.shape, mesh)
    return shard_map(losses, (P(*rows, None), P(), rows), rows)(x_BTD, w_DV, labels_BT)


def embedding_spec(shape: tuple[int, ...]) -> P | None:
    """Sharding of an embedding on a mesh with `fsdp` and a further axis; None on any other.

    With `fsdp` alone XLA looks up each device's columns of all rows and exchanges the results. With
    a further axis it replicates the table on every device, or fails (if `data` is manual in a
    surrounding shard_map). There the lookup is written by hand.
    """
    mesh = current_mesh()
    if mesh is None or mesh.shape["fsdp"] == 1 or "fsdp" in manual_axes(mesh):
        return None
    others = set(mesh.axis_names) - {*manual_axes(mesh), "data", "fsdp"}
    if all(mesh.shape[name] == 1 for name in others):
        return None
    return partition_spec(("vocab", "embed"), shape, mesh)


def embedding_lookup(
    table_VD: Float[Array, "V D"], places_BT: Int[Array, "*B T"]
) -> Float[Array, "*B T D"]:
    """Look up rows of an embedding."""
    split, mesh = embedding_spec(table_VD.shape), current_mesh()
    if split is None or mesh is None or places_BT.ndim != 2:
        return table_VD[places_BT]
    rows, columns = split

    def local(table, places):
        if columns:
            table = jax.lax.all_gather(table, columns, axis=1, tiled=True)
        if not rows:
            return table[places]
        places = places - jax.lax.axis_index(rows) * len(table)
        mine = (places >= 0) & (places < len(table))
        return jax.lax.psum(jnp.where(mine[..., None], table[jnp.where(mine, places, 0)], 0), rows)

    texts = partition_spec(("batch", "tokens"), places_BT.shape, mesh)
    return shard_map(local, (split, texts), P(*texts, None))(table_VD, places_BT)


def embedding_grad(
    rows_BTD: Float[Array, "*M B T D"], places_BT: Int[Array, "*M B T"], size: int, dtype: DTypeLike
) -> Float[Array, "V D"]:
    """Gradient of an embedding with V = size rows: sums in float32, then cast to `dtype`.

    Devices all-reduce the result next, so without the cast XLA would send float32.
    """

    def sums(rows, places):
        return kernels.embedding_grad(
            rows.reshape(-1, rows.shape[-1]), places.reshape(-1), size, dtype
        )

    mesh, split = current_mesh(), embedding_spec((size, rows_BTD.shape[-1]))
    if mesh is None or places_BT.ndim != 2:
        return sums(rows_BTD, places_BT)
    if split is not None:
        return sharded_embedding_grad(rows_BTD, places_BT, size, dtype, split)
    if prod(mesh.shape[name] for name in ("data", "expert", "context")) != mesh.size:
        return sums(rows_BTD, places_BT)  # XLA shards it like the table
    texts = partition_spec(("batch", "tokens"), places_BT.shape, mesh)
    apart = mesh_axes_in(texts[0]) + mesh_axes_in(texts[1])
    local = lambda *arrays: jax.lax.psum(sums(*arrays), apart) if apart else sums(*arrays)
    return shard_map(local, (P(*texts, None), texts), P())(rows_BTD, places_BT)


def sharded_embedding_grad(
    rows_BTD: Float[Array, "B T D"],
    places_BT: Int[Array, "B T"],
    size: int,
    dtype: DTypeLike,
    split: P,
) -> Float[Array, "V D"]:
    """`embedding_grad` of each device's own tokens, summed over devices; split: the sharding from
    `embedding_spec`."""
    rows, columns = split
    mesh = jax.sharding.get_abstract_mesh()
    texts = partition_spec(("batch", "tokens"), places_BT.shape, mesh)
    # The axes that shard the tokens, and not those that shard neither batch nor sequence.
    apart = [name for entry in texts if entry for name in np.atleast_1d(entry).tolist()]
    together = tuple(name for name in apart if name != columns)

    def local(g, places):
        count = size // mesh.shape[rows] if rows else size
        first = jax.lax.axis_index(rows) * count if rows else 0
        # Tokens of other devices' rows get an index past the end, and are dropped.
        places = jnp.where((places >= first) & (places < first + count), places - first, count)
        zeros = jnp.zeros((count, g.shape[-1]), jnp.float32)
        sums = zeros.at[places].add(g.astype(jnp.float32), mode="drop").astype(dtype)
        sums = jax.lax.psum(sums, together) if together else sums
        if columns in apart:
            return jax.lax.psum_scatter(sums, columns, scatter_dimension=1, tiled=True)
        if columns is None:
            return sums
        width = g.shape[-1] // mesh.shape[columns]
        return jax.lax.dynamic_slice_in_dim(sums, jax.lax.axis_index(columns) * width, width, 1)

    return shard_map(local, (P(*texts, None), texts), split)(rows_BTD, places_BT)


def shard_map_tokens[Result](
    kernel: Callable[..., Result],
    *arrays: Any,
    tokens: str = "sequence",
    columns: Sequence[str | None] = (),
) -> Result:
    """Run kernel(*arrays), sharded over the batch and, by the logical axis `tokens`, the sequence.

    Arrays with three dims or more, and the results, are [B, T, ...]; smaller arrays are replicated;
    None is allowed. columns: for the first arrays, the logical axis of the third dim (heads or
    hidden), whose entries the kernel computes independently. With several columns each such array
    has a result; otherwise the results are sharded like the first array. Dims without a logical
    axis are gathered.
    """
    mesh = current_mesh()
    if mesh is None:
        return kernel(*arrays)

    def spec_of(x: Any, *column: str | None) -> P:
        if x is None or x.ndim < 3:
            return P()
        axes = ("batch", tokens, *column)
        return partition_spec(axes, x.shape[: len(axes)], mesh)

    split = [spec_of(x, column) for x, column in zip(arrays, columns)]
    specs = (*split, *(spec_of(x) for x in arrays[len(split) :]))
    results = tuple(split) if len(split) > 1 else specs[0]
    return shard_map(kernel, specs, results)(*arrays)


def shard_shape(shape: tuple[int, ...], spec: P, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Shape of a device's shard; JAX has this for meshes without manual axes only."""
    counts = [prod(mesh.shape[name] for name in mesh_axes_in(entry)) for entry in spec]
    return tuple(size // count for size, count in zip(shape, counts, strict=True))


def feed_forward_relu2(
    x_BTD: Float[Array, "B T D"],
    w_up_DF: Float[Array, "D F"],
    w_down_FD: Float[Array, "F D"],
    implementation: str | None = None,
) -> Float[Array, "B T D"]:
    """relu(x W_up)^2 W_down, sharded over batch and hidden dim (see `jaxtrain_kernels`).

    Raises UserError if the requested backend does not support the call.
    """
    mesh, placement = current_mesh(), None
    exchanged = tensor.exchanges_rows(x_BTD, "hidden", len(w_down_FD))
    if mesh is not None:
        (hidden,) = partition_spec(("hidden",), w_down_FD.shape[:1], mesh)
        rows = partition_spec(("batch", "tokens", None), x_BTD.shape, mesh)
        up_spec, down_spec = P(None, hidden), P(hidden, None)
        if implementation is None and (hidden is None or exchanged):
            arrays = (x_BTD, rows), (w_up_DF, up_spec), (w_down_FD, down_spec)
            shapes = [shard_shape(x.shape, spec, mesh) for x, spec in arrays]
            here = [jax.ShapeDtypeStruct(shape, x_BTD.dtype) for shape in shapes]
            ours = FEED_FORWARD["mosaic"].supports(target(), *here) is None
            implementation = "mosaic" if ours else None
        if exchanged:
            placement = tensor.placement_of_rows()
            rows = partition_spec(("batch", "sequence", None), x_BTD.shape, mesh)
        elif implementation != "mosaic":  # XLA can partition the others
            pin = lambda h_BTF: constrain(h_BTF, "batch", "tokens", "hidden")
            return kernels.feed_forward_relu2(
                x_BTD, w_up_DF, w_down_FD, placement=Placement(constrain=pin),
                implementation=implementation or "xla",
            )  # fmt: skip

    def local(x, w_up, w_down):
        try:
            return kernels.feed_forward_relu2(
                x, w_up, w_down, placement=placement, implementation=implementation
            )
        except NotImplementedError as error:
            raise UserError(f"model.kernels.ffn: {error}; set it to xla") from None

    if mesh is None:
        return local(x_BTD, w_up_DF, w_down_FD)

    def part(x, w_up, w_down):
        y = local(x, w_up, w_down)
        return y if hidden is None or exchanged else psum_replicated_grad(y, hidden)

    return shard_map(part, (rows, up_spec, down_spec), rows)(x_BTD, w_up_DF, w_down_FD)
