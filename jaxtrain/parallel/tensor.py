"""Matmuls of tensor parallelism, over the mesh axis `tensor`.

The residual stream is sharded by batch rows, the matrices by hidden units or heads. A matmul whose
outputs are sharded gathers all rows first. One whose inputs are sharded gives a partial sum per
device: each device sends the others their rows of it by an all-to-all, and adds what it receives in
float32. XLA's partitioner would emit a reduce-scatter, whose additions need multiprocessors. An
all-to-all only copies, which the GPU's copy engines do: the matmuls beside it keep theirs.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtrain_kernels.feed_forward import Placement
from jaxtyping import Array, Float

from jaxtrain.parallel.axes import (
    constrain,
    current_mesh,
    mesh_axes_in,
    partition_spec,
    shard_map,
)
from jaxtrain.settings import UserError

AXIS = "tensor"
# Logical axes of a matrix [in, out] whose in or out dim is sharded over `tensor`.
SHARDED = ("heads", "kv_heads", "hidden")


def tensor_size() -> int:
    """Number of devices along `tensor` on the current mesh."""
    mesh = current_mesh()
    return 1 if mesh is None else mesh.shape[AXIS]


def tensor_matmuls(
    x: Float[Array, "*B K"],
    matrices: Sequence[Float[Array, "K _"]],
    axes: tuple[str | None, str | None],
) -> tuple[Float[Array, "*B _"], ...]:
    """x @ w for each matrix, whose in and out dims have these logical axes. Without `tensor`, or
    where it does not divide rows and matrices, plain matmuls."""
    ins, outs = axes
    if exchanges_rows(x, ins, len(matrices[0])):
        return tuple(matmul_inputs_sharded(x, w) for w in matrices)
    if all(exchanges_rows(x, outs, w.shape[1]) for w in matrices):
        return matmuls_outputs_sharded(x, tuple(matrices))
    return tuple(x @ w for w in matrices)


def exchanges_rows(x: Array | jax.ShapeDtypeStruct, axis: str | None, size: int) -> bool:
    """Whether x's rows and a matrix's dim with this logical axis and size are sharded over
    `tensor`, so that the functions of this file apply."""
    mesh = current_mesh()
    if mesh is None or tensor_size() == 1 or x.ndim != 3 or axis not in SHARDED:
        return False
    rows = partition_spec(("batch", "sequence", None), x.shape, mesh)
    return AXIS in mesh_axes_in(rows[0]) and partition_spec((axis,), (size,), mesh) == P(AXIS)


def splits_heads(x: Array | jax.ShapeDtypeStruct, *sizes: int) -> bool:
    """`exchanges_rows` for matrices of heads with these numbers of heads or columns."""
    return all(exchanges_rows(x, "heads", size) for size in sizes)


def gather_stream(x_BTD: Array) -> Array:
    """All rows of the batch's share of this device's `tensor` group, on each of its devices."""
    return constrain(x_BTD, "batch", "tokens", None)


def joined_matmul(
    x_BTD: Float[Array, "B T D"], matrices: tuple[Float[Array, "D _"], ...]
) -> Float[Array, "B T C"]:
    """As `matmuls_outputs_sharded`, by one matmul: each device concatenates its own columns.

    Raises UserError if `tensor` does not divide rows and matrices.
    """
    if not splits_heads(x_BTD, *(w.shape[1] for w in matrices)):
        raise UserError(
            f"model.kernels.qkv: mesh.tensor={tensor_size()} does not divide {len(x_BTD)} rows or "
            "the heads; set it to xla"
        )
    return _joined(x_BTD, matrices)


@jax.custom_vjp
def _joined(x_BTD: Array, matrices: tuple[Array, ...]) -> Array:
    return _joined_forward(x_BTD, matrices)[0]


def _joined_forward(x_BTD: Array, matrices: tuple[Array, ...]) -> tuple[Array, Any]:
    x_BTD = gather_stream(x_BTD)
    batch, tokens, _ = partition_spec(("batch", "tokens", None), x_BTD.shape, _mesh())
    local = lambda x, *matrices: x @ jnp.concatenate(matrices, axis=1)
    given = P(batch, tokens, None), *(P(None, AXIS) for _ in matrices)
    y_BTC = shard_map(local, given, P(batch, tokens, AXIS))(x_BTD, *matrices)
    return y_BTC, (x_BTD, matrices)


def _joined_backward(saved: Any, dy_BTC: Array) -> Any:
    x_BTD, matrices = saved
    size, columns = _mesh().shape[AXIS], [w.shape[1] for w in matrices]
    ends = list(itertools.accumulate(n // size for n in columns))
    local = lambda dw: tuple(jnp.split(dw, ends[:-1], axis=1))
    parts = tuple(P(None, AXIS) for _ in matrices)
    # Together, as in `weights.contract.gradients_together`.
    dx_BTD, dw_DC = jax.lax.optimization_barrier(
        (sum_partial_joined(dy_BTC, matrices), weight_gradient(x_BTD, dy_BTC))
    )
    return dx_BTD, shard_map(local, (P(None, AXIS),), parts)(dw_DC)


_joined.defvjp(_joined_forward, _joined_backward)


def sum_partial_joined(
    dy_BTC: Float[Array, "B T C"], matrices: tuple[Float[Array, "D _"], ...]
) -> Float[Array, "B T D"]:
    """The gradient of the input of `joined_matmul`, its rows sharded over `tensor`."""
    batch, tokens, _ = partition_spec(("batch", "tokens", None), dy_BTC.shape, _mesh())

    def local(dy: Array, *matrices: Array) -> Array:
        return exchange_partial_sums(dy @ jnp.concatenate(matrices, axis=1).T)

    given = P(batch, tokens, AXIS), *(P(None, AXIS) for _ in matrices)
    out = P((*mesh_axes_in(batch), AXIS), tokens, None)
    return shard_map(local, given, out)(dy_BTC, *matrices)


def _mesh() -> Any:
    return jax.sharding.get_abstract_mesh()


def sum_partial_matmuls(
    *pairs: tuple[Float[Array, "B T _"], Float[Array, "_ D"]],
) -> Float[Array, "B T D"]:
    """Sum of x @ w over pairs of x [B, T, F] and w [F, D], both sharded by F over `tensor`. The
    rows of the result are sharded over it."""
    batch, tokens, _ = partition_spec(("batch", "tokens", None), pairs[0][0].shape, _mesh())

    def local(pairs: tuple[tuple[Array, Array], ...]) -> Array:
        return exchange_partial_sums(functools.reduce(jnp.add, (x @ w for x, w in pairs)))

    given = tuple((P(batch, tokens, AXIS), P(AXIS, None)) for _ in pairs)
    return shard_map(local, (given,), P((*mesh_axes_in(batch), AXIS), tokens, None))(pairs)


def exchange_partial_sums(y_BTD: Array) -> Array:
    """In `shard_map`: the sum of all devices' y for this device's share of the rows."""
    parts_BTD = jax.lax.all_to_all(y_BTD, AXIS, 0, 0, tiled=True)
    parts_PBTD = parts_BTD.reshape(jax.lax.axis_size(AXIS), -1, *y_BTD.shape[1:])
    return parts_PBTD.astype(jnp.float32).sum(0).astype(y_BTD.dtype)


def placement_of_rows() -> Placement:
    """For `feed_forward_relu2` in `shard_map`, with rows and hidden units sharded over `tensor`."""
    gather = lambda x_BTD: jax.lax.all_gather(x_BTD, AXIS, tiled=True)
    return Placement(gather, matmul=lambda h_BTF, w_FD: exchange_partial_sums(h_BTF @ w_FD))


def weight_gradient(x_BTK: Array, dy_BTN: Array) -> Array:
    """x^T dy over all rows and tokens."""
    return jnp.einsum("BTK,BTN->KN", x_BTK, dy_BTN)


@jax.custom_vjp
def matmul_inputs_sharded(
    x_BTF: Float[Array, "B T F"], w_FD: Float[Array, "F D"]
) -> Float[Array, "B T D"]:
    """x @ w, with F sharded over `tensor`; the rows of the result are sharded over it."""
    return sum_partial_matmuls((x_BTF, w_FD))


def _inputs_backward(saved: tuple[Array, Array], dy_BTD: Array) -> tuple[Array, Array]:
    x_BTF, w_FD = saved
    dy_BTD = gather_stream(dy_BTD)
    return dy_BTD @ w_FD.T, weight_gradient(x_BTF, dy_BTD)


matmul_inputs_sharded.defvjp(
    lambda x_BTF, w_FD: (sum_partial_matmuls((x_BTF, w_FD)), (x_BTF, w_FD)), _inputs_backward
)


@jax.custom_vjp
def matmuls_outputs_sharded(
    x_BTD: Float[Array, "B T D"], matrices: tuple[Float[Array, "D _"], ...]
) -> tuple[Float[Array, "B T _"], ...]:
    """x @ w for each w, with x's rows and the columns of the matrices sharded over `tensor`. The
    gradients of x are summed before they are exchanged."""
    return _outputs_forward(x_BTD, matrices)[0]


def _outputs_forward(x_BTD: Array, matrices: tuple[Array, ...]) -> tuple[Any, Any]:
    x_BTD = gather_stream(x_BTD)
    return tuple(x_BTD @ w for w in matrices), (x_BTD, matrices)


def _outputs_backward(saved: Any, gradients: tuple[Array, ...]) -> Any:
    x_BTD, matrices = saved
    pairs = [(dy, w.T) for dy, w in zip(gradients, matrices, strict=True)]
    dw = tuple(weight_gradient(x_BTD, dy) for dy in gradients)
    return sum_partial_matmuls(*pairs), dw


matmuls_outputs_sharded.defvjp(_outputs_forward, _outputs_backward)
