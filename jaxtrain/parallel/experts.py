"""Tokens to their experts and back: sorted, exchanged over the mesh axis `expert`, none dropped.

Each device of that axis holds E / size experts and batch rows of its own, or, along `context`, a
part of every row's tokens. A token's copies travel to the devices of its experts, which sort what
they receive, multiply group by group and send the results back. They travel in rounds of a fixed
size, as many as the longest list of a device for another takes: so the result never depends on the
balance, and nothing has room for the worst case (every token of every device to one device).
"""

import functools
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxtrain.parallel.axes import (
    current_mesh,
    mesh_axes_in,
    partition_spec,
    psum_replicated_grad,
    shard_map,
)

# (rows [M, D], their weights [M, 1], ups, down, sizes_E) -> rows [M, D]: each group of rows through
# its expert, times its weight
Network = Callable[..., Array]
# In these go the rows of an even load, and a sixteenth more.
ROUNDS = 2
# A round of what is beyond them takes so many parts of a list of an even load.
PARTS = 8


def moe_dispatch_combine(
    network: Network,
    x_BTD: Float[Array, "B T D"],
    chosen_BTk: Int[Array, "B T k"],
    weights_BTk: Float[Array, "B T k"],
    ups_EDF: Sequence[Float[Array, "E D F"]],
    down_EFD: Float[Array, "E F D"],
    tiles: int = 1,
) -> tuple[Float[Array, "B T D"], Int[Array, "E"]]:
    """Sum over a token's chosen experts of weight x network(token); and the tokens that each got.

    A weight goes with its row, and the network applies it to the hidden layer (as in Megatron-LM):
    so the backward pass does not ask for what an expert made, which is not kept or made again.

    ups_EDF: what reads the token, one matrix or two (gated). tiles: a device's tokens are taken in
    so many parts, one after another, each computed again in the backward pass (rows that do not
    divide, as prompts, are taken whole).
    """
    tiles = 1 if x_BTD.shape[1] % tiles else tiles
    mesh = current_mesh()
    if mesh is None:
        return moe_on_device(
            network, 1, tiles, x_BTD, chosen_BTk, weights_BTk, tuple(ups_EDF), down_EFD
        )
    rows = partition_spec(("batch", "tokens", None), x_BTD.shape, mesh)
    expert, hidden, _ = partition_spec(("experts", "hidden", None), down_EFD.shape, mesh)
    num_shards = 1 if expert is None else mesh.shape[expert]
    names = mesh_axes_in(rows[0]) + mesh_axes_in(rows[1])
    holders = tuple(name for name in names if mesh.shape[name] > 1)

    def local(x, chosen, weights, ups, down):
        y, sizes = moe_on_device(network, num_shards, tiles, x, chosen, weights, ups, down)
        y = y if hidden is None else psum_replicated_grad(y, hidden)
        return y, jax.lax.psum(sizes, holders) if holders else sizes

    up_spec, down_spec = P(expert, None, hidden), P(expert, hidden, None)
    specs = rows, rows, rows, (up_spec,) * len(ups_EDF), down_spec
    return shard_map(local, specs, (rows, P()))(
        x_BTD, chosen_BTk, weights_BTk, tuple(ups_EDF), down_EFD
    )


def moe_on_device(
    network: Network,
    num_shards: int,
    tiles: int,
    x_BTD: Array,
    chosen_BTk: Array,
    weights_BTk: Array,
    ups: tuple[Array, ...],
    down_EFD: Array,
) -> tuple[Array, Array]:
    """One device's tokens through all experts; the sizes are of all E experts."""
    flat = lambda a: a.reshape(-1, a.shape[-1])
    tokens = flat(x_BTD), flat(chosen_BTk), flat(weights_BTk)
    run = lambda part: moe_tile(network, num_shards, part, ups, down_EFD)
    parts = gcd(tiles, len(tokens[0]))  # of few tokens, over many devices, fewer
    if parts == 1:
        y_ND, sizes_E = run(tokens)
        return y_ND.reshape(x_BTD.shape), sizes_E
    # The loop keeps XLA from taking the forward pass's results for the backward pass's.
    again = jax.checkpoint(run, prevent_cse=False)
    y_nMD, sizes_nE = jax.lax.map(
        again, jax.tree.map(lambda a: a.reshape(parts, -1, a.shape[-1]), tokens)
    )
    return y_nMD.reshape(x_BTD.shape), jnp.sum(sizes_nE, axis=0)


def moe_tile(
    network: Network,
    num_shards: int,
    tokens: tuple[Array, Array, Array],
    ups: tuple[Array, ...],
    down_EFD: Array,
) -> tuple[Array, Array]:
    """`moe_on_device` of some of the tokens: x_ND, chosen_Nk and weights_Nk."""
    x_ND, chosen_Nk, weights_Nk = tokens
    (N, k), E = chosen_Nk.shape, num_shards * down_EFD.shape[0]
    expert_M = chosen_Nk.reshape(-1)  # of each copy of each token
    sizes_E = jnp.sum(expert_M[:, None] == jnp.arange(E)[None], axis=0, dtype=jnp.int32)
    order_M = jnp.argsort(expert_M, stable=True)
    if num_shards > 1:
        sizes_VWe = jax.lax.all_gather(sizes_E.reshape(num_shards, -1), "expert")
        plan = DispatchPlan(order_M, sizes_VWe)
        return chunked_all_to_all(network, (x_ND, weights_Nk), plan, ups, down_EFD), sizes_E
    back_M = inverse(order_M)
    copies_MD = jnp.broadcast_to(x_ND[:, None], (N, k, x_ND.shape[-1])).reshape(N * k, -1)
    sorted_MD = permute(copies_MD, order_M, back_M)
    weights_M1 = permute(weights_Nk.reshape(-1, 1), order_M, back_M)
    y_MD = permute(network(sorted_MD, weights_M1, ups, down_EFD, sizes_E), back_M, order_M)
    return sum_over_copies(y_MD, k), sizes_E


def inverse(order_M: Array) -> Array:
    places_M = jnp.arange(len(order_M), dtype=order_M.dtype)
    return jnp.zeros_like(order_M).at[order_M].set(places_M, unique_indices=True)


def sum_over_copies(y_MD: Array, k: int) -> Array:
    """The sum over a token's copies. jnp.sum adds what has 16 bits in float32."""
    return jnp.sum(y_MD.reshape(-1, k, y_MD.shape[1]), axis=1).astype(y_MD.dtype)


@jax.custom_vjp
def permute(x_MD: Array, order_M: Array, back_M: Array) -> Array:
    """x[order]; the gradient is a gather by the inverse permutation, not a scatter."""
    return x_MD[order_M]


permute.defvjp(
    lambda x_MD, order_M, back_M: (x_MD[order_M], (order_M, back_M)),
    lambda saved, g_MD: (g_MD[saved[1]], None, None),
)


# ---- between devices ---------------------------------------------------------------------------


class DispatchPlan(NamedTuple):
    """What goes where in all rounds together."""

    order_M: Array  # this device's copies of tokens, sorted by expert: a list for each device
    sizes_VWe: Array  # how many of device V's go to each expert of device W


class ExchangeRound(NamedTuple):
    """What goes where in one round, of so many places from each device to each."""

    copy_S: Array  # that is sent from here in each place; past the last where none is
    place_S: Array  # that each row came in, once rows are sorted by expert; likewise
    row_S: Array  # the inverse of that, anything for a place that none came in
    sizes_e: Array  # rows for each expert here


def exchange_round(first: Array | int, width: int, plan: DispatchPlan) -> ExchangeRound:
    """The one of `width` places of each list, from place `first`."""
    (M,), (W, _, local) = plan.order_M.shape, plan.sizes_VWe.shape
    me = jax.lax.axis_index("expert")
    each_C, each_S = jnp.arange(width), jnp.arange(W * width)
    counts_W = plan.sizes_VWe[me].sum(1)
    starts_W = jnp.cumsum(counts_W) - counts_W
    left_W1 = (counts_W - first)[:, None]
    at_WC = jnp.minimum((starts_W + first)[:, None] + each_C[None], M - 1)
    copy_WC = jnp.where(each_C[None] < left_W1, plan.order_M[at_WC], M + each_S.reshape(W, -1))
    # What comes from a device is in order of my experts.
    got_Ve = plan.sizes_VWe[:, me]
    ends_Ve = jnp.clip(jnp.cumsum(got_Ve, axis=1) - first, 0, width)
    starts_Ve = jnp.clip(jnp.cumsum(got_Ve, axis=1) - got_Ve - first, 0, width)
    sizes_g = (ends_Ve - starts_Ve).T.reshape(-1)  # a group is an expert's rows from one device
    ends_g = jnp.cumsum(sizes_g)
    places_Ve = starts_Ve + jnp.arange(W)[:, None] * width
    ahead_g = places_Ve.T.reshape(-1) - (ends_g - sizes_g)  # a row's place minus where it is sorted
    group_S = jnp.sum(each_S[:, None] >= ends_g[None], axis=1)
    place_S = each_S + ahead_g[jnp.minimum(group_S, W * local - 1)]
    place_S = jnp.where(each_S < ends_g[-1], place_S, W * width + each_S)
    expert_VC = jnp.sum(each_C[None, :, None] >= ends_Ve[:, None], axis=2)
    ahead_Ve = ahead_g.reshape(local, W).T
    ahead_VC = jnp.take_along_axis(ahead_Ve, jnp.minimum(expert_VC, local - 1), axis=1)
    row_S = each_S - ahead_VC.reshape(-1)
    return ExchangeRound(copy_WC.reshape(-1), place_S, row_S, (ends_Ve - starts_Ve).sum(0))


def dispatch_rows(rows_KD: Array, row_S: Array, exchange: ExchangeRound) -> Array:
    """What row_S names of each device's rows, sorted by expert where those are; zeros behind."""
    came_SD = all_to_all(rows_KD.at[row_S].get(mode="clip"))
    return came_SD.at[exchange.place_S].get(mode="fill", fill_value=0, unique_indices=True)


def combine_rows(into_MD: Array, rows_SD: Array, exchange: ExchangeRound) -> Array:
    """The rows back in the places of their copies."""
    came_SD = all_to_all(rows_SD.at[exchange.row_S].get(mode="clip"))
    return into_MD.at[exchange.copy_S].set(came_SD, mode="drop", unique_indices=True)


def all_to_all(rows_SD: Array) -> Array:
    """Places of mine on device W become W's on mine."""
    return jax.lax.all_to_all(rows_SD, "expert", 0, 0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_all_to_all(
    network: Network,
    tokens: tuple[Array, Array],
    plan: DispatchPlan,
    ups: tuple[Array, ...],
    down_EFD: Array,
) -> Array:
    """Each token's copies through their experts on the devices of those, added up: [N, D].

    tokens: x_ND and weights_Nk. The backward pass sends and computes each round once more. Where
    layers are neither recomputed (`model.remat`) nor scanned, XLA sees that it has that from the
    forward pass, and keeps it, but for what went through the loop.
    """
    x_ND, k = tokens[0], tokens[1].shape[1]

    def one(exchange: ExchangeRound, y_MD: Array) -> Array:
        y_SD = network(*dispatch_tokens(tokens, exchange), ups, down_EFD, exchange.sizes_e)
        return combine_rows(y_MD, y_SD, exchange)

    return sum_over_copies(for_each_round(one, plan, uninitialized(len(plan.order_M), x_ND)), k)


def dispatch_tokens(tokens: tuple[Array, Array], exchange: ExchangeRound) -> tuple[Array, Array]:
    """Tokens and weights of a round's copies, where their experts are."""
    x_ND, weights_Nk = tokens
    x_SD = dispatch_rows(x_ND, exchange.copy_S // weights_Nk.shape[1], exchange)
    return x_SD, dispatch_rows(weights_Nk.reshape(-1, 1), exchange.copy_S, exchange)


def for_each_round[State](
    one: Callable[[ExchangeRound, State], State], plan: DispatchPlan, state: State
) -> State:
    """Those of an even load are not in a loop, so that what one sends can hide behind what another
    computes."""
    M, W = len(plan.order_M), len(plan.sizes_VWe)
    width, more = -(-(M + M // 16) // (W * ROUNDS)), -(-M // (W * PARTS))
    for r in range(ROUNDS):
        state = one(exchange_round(r * width, width, plan), state)
    left = jnp.max(plan.sizes_VWe.sum(2)) - ROUNDS * width
    next_one = lambda i, state: one(exchange_round(ROUNDS * width + i * more, more, plan), state)
    return jax.lax.fori_loop(0, -(-jnp.maximum(left, 0) // more), next_one, state)


def uninitialized(rows: int, like: Array) -> Array:
    """Not zeros: XLA makes those of all layers in one place, where they wait."""
    return jax.lax.empty((rows, like.shape[1]), like.dtype)


def _chunked_forward(network: Network, *given: Any) -> tuple[Array, Any]:
    return chunked_all_to_all(network, *given), given


def _chunked_backward(network: Network, given: Any, g_ND: Array) -> Any:
    tokens, plan, *matrices = given
    (x_ND, weights_Nk), M = tokens, len(plan.order_M)
    k = weights_Nk.shape[1]

    def one(exchange: ExchangeRound, sums: Any) -> Any:
        run = lambda rows, ups, down_EFD: network(*rows, ups, down_EFD, exchange.sizes_e)
        pull = jax.vjp(run, dispatch_tokens(tokens, exchange), *matrices)[1]
        drows, *dw = pull(dispatch_rows(g_ND, exchange.copy_S // k, exchange))
        dcopies = jax.tree.map(lambda a, rows: combine_rows(a, rows, exchange), sums[0], drows)
        return dcopies, jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums[1], dw)

    wide = lambda w: jnp.zeros(w.shape, jnp.promote_types(jnp.float32, w.dtype))
    copies = uninitialized(M, x_ND), uninitialized(M, weights_Nk[:, :1])
    (dx_MD, dweights_M1), dw = for_each_round(one, plan, (copies, jax.tree.map(wide, matrices)))
    dw = jax.tree.map(lambda total, w: total.astype(w.dtype), dw, matrices)
    return (sum_over_copies(dx_MD, k), dweights_M1.reshape(-1, k)), None, *dw


chunked_all_to_all.defvjp(_chunked_forward, _chunked_backward)
