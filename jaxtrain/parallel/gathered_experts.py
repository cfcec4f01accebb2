"""Expert parallelism over few devices: each gathers all tokens and runs its own experts.

With top_k experts a token, an all-to-all of copies (`experts.py`) sends as many bytes as an
all-gather of tokens over top_k devices. Up to that number the all-gather is cheaper: copies are
neither sorted before they are sent, nor again where they arrive (Megatron-LM's `allgather` token
dispatcher). Partial sums return by all-to-all, and their device adds them in float32.

Barriers tell XLA's scheduler what runs beside exchanges: the router beside the gathering of tokens,
and gradients of matrices beside the sending of tokens' gradients.

A device has as many copies as the load gives it. The first pass has room for a balanced load and a
sixteenth more; further passes of a balanced load, as many as needed, run the rest.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from jaxtyping import Array, Float, Int

# (rows [M, D], their weights [M, 1], ups, down, sizes_e) -> rows [M, D]
Network = Callable[..., Array]


class Copies(NamedTuple):
    """The tokens of all devices of `expert`, and where their copies are on this device."""

    x_GD: Array
    weights_Gk: Array
    row_Gk: Array  # row of each copy, sorted by expert; -1 for copies of other devices
    sizes_e: Array  # number of rows of each expert of this device


class LocalPass(NamedTuple):
    """Copies of one pass, in rows sorted by expert."""

    copy_S: Array  # copy (token x k + choice) of each row; out of range for an empty row
    row_Gk: Array  # row of each copy; out of range for copies that are not in the pass
    sizes_e: Array  # number of rows of each expert of this device


def gathered_experts(
    network: Network,
    x_ND: Float[Array, "N D"],
    chosen_Nk: Int[Array, "N k"],
    weights_Nk: Float[Array, "N k"],
    ups_eDF: Sequence[Float[Array, "e D F"]],
    down_eFD: Float[Array, "e F D"],
) -> Float[Array, "N D"]:
    """Sum over a token's experts, on whatever device of `expert` they are, of weight x network."""
    return _gathered(network, x_ND, chosen_Nk, weights_Nk, tuple(ups_eDF), down_eFD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(
    network: Network,
    x_ND: Array,
    chosen_Nk: Array,
    weights_Nk: Array,
    ups_eDF: tuple[Array, ...],
    down_eFD: Array,
) -> Array:
    return _forward(network, x_ND, chosen_Nk, weights_Nk, ups_eDF, down_eFD)[0]


def _forward(network: Network, x_ND: Array, chosen_Nk: Array, *given: Any) -> tuple[Array, Any]:
    weights_Nk, *matrices = given
    # The tokens come while the router computes; what it chose comes later.
    x_GD, chosen_Nk, weights_Nk = jax.lax.optimization_barrier(
        (gather_tokens(x_ND), chosen_Nk, weights_Nk)
    )
    rows = rows_of_device(gather_tokens(chosen_Nk), len(matrices[1]))
    copies = Copies(x_GD, gather_tokens(weights_Nk), *rows)
    run = lambda part: network(*permuted_tokens(copies, part), *matrices, part.sizes_e)
    sums_of = lambda y_SD, part: kernels.sum_rows(y_SD, part.row_Gk)
    y_GD = sum_of_passes(run, sums_of, run(first_pass(copies)), copies)
    return sum_partials(y_GD), (copies, matrices)


def _backward(network: Network, given: Any, g_ND: Array) -> Any:
    """Gradients of tokens, weights and matrices. It repeats the forward computation; XLA instead
    keeps what the forward pass computed, except in further passes."""
    copies, matrices = given
    g_GD = gather_tokens(g_ND)

    def run(part: LocalPass) -> Any:
        layer = lambda rows, *matrices: network(*rows, *matrices, part.sizes_e)
        pull = jax.vjp(layer, permuted_tokens(copies, part), *matrices)[1]
        drows, *dw = pull(kernels.gather_rows(g_GD, part.copy_S // copies.row_Gk.shape[1]))
        return drows, tuple(dw)

    def sums_of(drows: tuple[Array, Array], part: LocalPass) -> tuple[Array, Array]:
        drows_SD, dweights_S1 = drows
        dweights_Gk = kernels.gather_rows(dweights_S1, part.row_Gk.reshape(-1))
        return kernels.sum_rows(drows_SD, part.row_Gk), dweights_Gk.reshape(part.row_Gk.shape)

    drows, dw = run(first_pass(copies))
    dx_GD, dweights_Gk = sum_of_passes(lambda part: run(part)[0], sums_of, drows, copies)
    # Gradients of matrices hide the exchange of tokens. Only then, weights': they are small.
    dx_ND, dweights_Gk, dw = jax.lax.optimization_barrier((sum_partials(dx_GD), dweights_Gk, dw))
    dw = sum_of_passes(lambda part: run(part)[1], lambda dw, _: dw, dw, copies)
    return dx_ND, None, sum_partials(dweights_Gk), *dw


_gathered.defvjp(_forward, _backward)


def rows_of_device(chosen_Gk: Array, local: int) -> tuple[Array, Array]:
    """`Copies.row_Gk` and `Copies.sizes_e`."""
    experts = jnp.arange(jax.lax.axis_size("expert") * local)
    row_Gk, sizes_E = kernels.row_id_map(chosen_Gk, len(experts))
    mine = jax.lax.axis_index("expert") * local
    before = jnp.sum(jnp.where(experts < mine, sizes_E, 0))
    count = jnp.sum(jnp.where((experts >= mine) & (experts < mine + local), sizes_E, 0))
    row_Gk = jnp.where((row_Gk >= before) & (row_Gk < before + count), row_Gk - before, -1)
    return row_Gk, jax.lax.dynamic_slice(sizes_E, (mine,), (local,))


def gather_tokens(x_ND: Array) -> Array:
    """The tokens of all devices of `expert`."""
    return jax.lax.all_gather(x_ND, "expert", tiled=True)


def sum_partials(y_GD: Array) -> Array:
    """Sum of all devices' partial sums for this device's tokens, in float32, in y's dtype."""
    came_GD = jax.lax.all_to_all(y_GD, "expert", 0, 0, tiled=True)
    came_WND = came_GD.reshape(jax.lax.axis_size("expert"), -1, y_GD.shape[1])
    return jnp.sum(came_WND, axis=0, dtype=jnp.float32).astype(y_GD.dtype)


def permuted_tokens(copies: Copies, part: LocalPass) -> tuple[Array, Array]:
    """Tokens and weights of a pass's rows; zeros in empty ones."""
    k = copies.weights_Gk.shape[1]
    rows_SD = kernels.gather_rows(copies.x_GD, part.copy_S // k)
    return rows_SD, kernels.gather_rows(copies.weights_Gk.reshape(-1, 1), part.copy_S)


def in_float32(x: Array) -> Array:
    """16-bit arrays in float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def first_pass(copies: Copies) -> LocalPass:
    """Room for a balanced load and a sixteenth more."""
    balanced = copies.row_Gk.size // jax.lax.axis_size("expert")
    return local_pass(0, min(copies.row_Gk.size, balanced + balanced // 16), copies)


def sum_of_passes[Rows, Sums](
    run: Callable[[LocalPass], Rows],
    sums_of: Callable[[Rows, LocalPass], Sums],
    first: Rows,
    copies: Copies,
) -> Sums:
    """Sums of the first pass, and in float32 of the other passes if rows are left for them.

    first: `run` of the first pass. `sums_of` it is in the branches, since a branch that changes
    nothing copies it. With two devices at most one pass is left, and nothing is in a loop. XLA puts
    branches into a CUDA graph; a loop's condition is read by the host, which waits for the GPU.
    """
    part, number = first_pass(copies), copies.row_Gk.size
    balanced, width = number // jax.lax.axis_size("expert"), len(part.copy_S)
    count = jnp.sum(copies.sizes_e)

    def add(i: Array | int, total: Sums) -> Sums:
        other = local_pass(width + i * balanced, balanced, copies)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, sums_of(run(other), other))

    def with_others(first: Rows) -> Sums:
        sums = sums_of(first, part)
        total = jax.tree.map(in_float32, sums)
        if number <= width + balanced:
            total = add(0, total)
        else:
            total = jax.lax.fori_loop(0, -(-(count - width) // balanced), add, total)
        return jax.tree.map(lambda a, b: a.astype(b.dtype), total, sums)

    return jax.lax.cond(count > width, with_others, lambda first: sums_of(first, part), first)


def local_pass(first: Array | int, width: int, copies: Copies) -> LocalPass:
    """The pass of rows first .. first + width - 1."""
    row_Gk = copies.row_Gk - first
    row_Gk = jnp.where((row_Gk >= 0) & (row_Gk < width), row_Gk, width)
    copy_M = jnp.arange(row_Gk.size, dtype=jnp.int32)
    empty_S = jnp.full(width, row_Gk.size, jnp.int32)
    copy_S = empty_S.at[row_Gk.reshape(-1)].set(copy_M, mode="drop")
    ends_e = jnp.cumsum(copies.sizes_e) - first
    inside = lambda ends: jnp.clip(ends, 0, width)
    return LocalPass(copy_S, row_Gk, inside(ends_e) - inside(ends_e - copies.sizes_e))
