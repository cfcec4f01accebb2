"""Expert parallelism over few devices: each gathers all tokens and runs its own experts.

With top_k experts a token, an all-to-all of copies (`experts.py`) sends as many bytes as an
all-gather of tokens over top_k devices. Up to that number the all-gather is cheaper: copies are
neither sorted before they are sent, nor again where they arrive (Megatron-LM's `allgather` token
dispatcher). Partial sums return by all-to-all, and their device adds them in float32.

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


class LocalPass(NamedTuple):
    """Copies of one pass, in rows sorted by expert."""

    copy_S: Array  # copy (token x k + choice) of each row; out of range for an empty row
    row_Gk: Array  # row of each copy; out of range for copies that are not in the pass
    sizes_e: Array  # number of rows of each expert of this device


def gathered_experts(
    network: Callable[..., Array],
    x_ND: Float[Array, "N D"],
    chosen_Nk: Int[Array, "N k"],
    weights_Nk: Float[Array, "N k"],
    ups_eDF: Sequence[Float[Array, "e D F"]],
    down_eFD: Float[Array, "e F D"],
) -> Float[Array, "N D"]:
    """Sum over a token's experts, on whatever device of `expert` they are, of weight x network."""
    local, devices = len(down_eFD), jax.lax.axis_size("expert")
    chosen_Gk = jax.lax.all_gather(chosen_Nk, "expert", tiled=True)
    row_Gk, sizes_E = kernels.row_id_map(chosen_Gk, devices * local)
    mine = jax.lax.axis_index("expert") * local
    own_E = (jnp.arange(devices * local) >= mine) & (jnp.arange(devices * local) < mine + local)
    before = jnp.sum(jnp.where(jnp.arange(devices * local) < mine, sizes_E, 0))
    count = jnp.sum(jnp.where(own_E, sizes_E, 0))
    row_Gk = jnp.where((row_Gk >= before) & (row_Gk < before + count), row_Gk - before, -1)
    sizes_e = jax.lax.dynamic_slice(sizes_E, (mine,), (local,))
    tokens = gather_tokens(x_ND), gather_tokens(weights_Nk)
    y_GD = local_experts(network, tokens, row_Gk, sizes_e, tuple(ups_eDF), down_eFD)
    return sum_partials(y_GD)


@jax.custom_vjp
def gather_tokens(x_ND: Array) -> Array:
    """The tokens of all devices of `expert`. The gradient is `sum_partials`."""
    return jax.lax.all_gather(x_ND, "expert", tiled=True)


@jax.custom_vjp
def sum_partials(y_GD: Array) -> Array:
    """Sum of all devices' partial sums for this device's tokens, in float32, in y's dtype."""
    came_GD = jax.lax.all_to_all(y_GD, "expert", 0, 0, tiled=True)
    came_WND = came_GD.reshape(jax.lax.axis_size("expert"), -1, y_GD.shape[1])
    return jnp.sum(came_WND, axis=0, dtype=jnp.float32).astype(y_GD.dtype)


gather_tokens.defvjp(lambda x: (gather_tokens(x), None), lambda _, g: (sum_partials(g),))
sum_partials.defvjp(lambda y: (sum_partials(y), None), lambda _, g: (gather_tokens(g),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def local_experts(
    network: Callable[..., Array],
    tokens: tuple[Array, Array],
    row_Gk: Array,
    sizes_e: Array,
    ups: tuple[Array, ...],
    down_eFD: Array,
) -> Array:
    """Sums over the copies of each token that are rows of this device, [G, D].

    tokens: x_GD and weights_Gk. row: -1 for copies of other devices. The backward pass repeats the
    computation; XLA instead keeps what the forward pass computed, except in further passes.
    """

    run = lambda part: network(*permuted_tokens(tokens, part), ups, down_eFD, part.sizes_e)
    return for_each_pass(
        run, lambda y_SD, part: kernels.sum_rows(y_SD, part.row_Gk), row_Gk, sizes_e
    )


def permuted_tokens(tokens: tuple[Array, Array], part: LocalPass) -> tuple[Array, Array]:
    """Tokens and weights of a pass's rows; zeros in empty ones."""
    x_GD, weights_Gk = tokens
    k = weights_Gk.shape[1]
    rows_SD = kernels.gather_rows(x_GD, part.copy_S // k)
    return rows_SD, kernels.gather_rows(weights_Gk.reshape(-1, 1), part.copy_S)


def in_float32(x: Array) -> Array:
    """16-bit arrays in float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def for_each_pass[Rows, Sums](
    run: Callable[[LocalPass], Rows],
    sums_of: Callable[[Rows, LocalPass], Sums],
    row_Gk: Array,
    sizes_e: Array,
) -> Sums:
    """Run all passes and add their sums in float32: one pass always, others if rows are left.

    `sums_of` the first pass's rows is in the branches, since a branch that changes nothing copies
    it. With two devices at most one pass is left, and nothing is in a loop. XLA puts branches into
    a CUDA graph; a loop's condition is read by the host, which waits for the GPU.
    """
    balanced, count = row_Gk.size // jax.lax.axis_size("expert"), jnp.sum(sizes_e)
    width = min(row_Gk.size, balanced + balanced // 16)
    first = local_pass(0, width, row_Gk, sizes_e)

    def add(i: Array | int, total: Sums) -> Sums:
        part = local_pass(width + i * balanced, balanced, row_Gk, sizes_e)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, sums_of(run(part), part))

    def with_others(rows: Rows) -> Sums:
        sums = sums_of(rows, first)
        total = jax.tree.map(in_float32, sums)
        if row_Gk.size <= width + balanced:
            total = add(0, total)
        else:
            total = jax.lax.fori_loop(0, -(-(count - width) // balanced), add, total)
        return jax.tree.map(lambda a, b: a.astype(b.dtype), total, sums)

    return jax.lax.cond(count > width, with_others, lambda rows: sums_of(rows, first), run(first))


def local_pass(first: Array | int, width: int, row_Gk: Array, sizes_e: Array) -> LocalPass:
    """The pass of rows first .. first + width - 1."""
    row_Gk = row_Gk - first
    row_Gk = jnp.where((row_Gk >= 0) & (row_Gk < width), row_Gk, width)
    copy_M = jnp.arange(row_Gk.size, dtype=jnp.int32)
    empty_S = jnp.full(width, row_Gk.size, jnp.int32)
    copy_S = empty_S.at[row_Gk.reshape(-1)].set(copy_M, mode="drop")
    ends_e = jnp.cumsum(sizes_e) - first
    inside = lambda ends: jnp.clip(ends, 0, width)
    return LocalPass(copy_S, row_Gk, inside(ends_e) - inside(ends_e - sizes_e))


def _forward(network: Callable[..., Array], *given: Any) -> tuple[Array, Any]:
    return local_experts(network, *given), given


def _backward(network: Callable[..., Array], given: Any, g_GD: Array) -> Any:
    tokens, row_Gk, sizes_e, *matrices = given
    k = row_Gk.shape[1]

    def run(part: LocalPass) -> Any:
        layer = lambda rows, ups, down: network(*rows, ups, down, part.sizes_e)
        pull = jax.vjp(layer, permuted_tokens(tokens, part), *matrices)[1]
        return pull(kernels.gather_rows(g_GD, part.copy_S // k))

    def sums_of(gradients: Any, part: LocalPass) -> Any:
        (drows_SD, dweights_S1), *dw = gradients
        dx_GD = kernels.sum_rows(drows_SD, part.row_Gk)
        dweights_M1 = kernels.gather_rows(dweights_S1, part.row_Gk.reshape(-1))
        return dx_GD, dweights_M1.reshape(-1, k), dw

    dx_GD, dweights_Gk, dw = for_each_pass(run, sums_of, row_Gk, sizes_e)
    return (dx_GD, dweights_Gk), None, None, *dw


local_experts.defvjp(_forward, _backward)
