"""Tokens to their experts and back: sorted, exchanged over the mesh axis `expert`, none dropped.

Each device of that axis holds E / ways experts and batch rows of its own, or, along `context`, a
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

from jaxtrain.parallel.axes import in_force, names_in, over_devices, partition_spec, summed

# (rows [M, D], their weights [M, 1], ups, down, sizes_E) -> rows [M, D]: each group of rows through
# its expert, times its weight
Network = Callable[..., Array]
# In these go the rows of an even load, and a sixteenth more.
ROUNDS = 2
# A round of what is beyond them takes so many parts of a list of an even load.
PARTS = 8


def feed_experts(
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
    mesh = in_force()
    if mesh is None:
        return local_experts(
            network, 1, tiles, x_BTD, chosen_BTk, weights_BTk, tuple(ups_EDF), down_EFD
        )
    rows = partition_spec(("batch", "tokens", None), x_BTD.shape, mesh)
    expert, hidden, _ = partition_spec(("experts", "hidden", None), down_EFD.shape, mesh)
    ways = 1 if expert is None else mesh.shape[expert]
    names = names_in(rows[0]) + names_in(rows[1])
    holders = tuple(name for name in names if mesh.shape[name] > 1)

    def local(x, chosen, weights, ups, down):
        y, sizes = local_experts(network, ways, tiles, x, chosen, weights, ups, down)
        y = y if hidden is None else summed(y, hidden)
        return y, jax.lax.psum(sizes, holders) if holders else sizes

    up_spec, down_spec = P(expert, None, hidden), P(expert, hidden, None)
    specs = rows, rows, rows, (up_spec,) * len(ups_EDF), down_spec
    return over_devices(local, specs, (rows, P()))(
        x_BTD, chosen_BTk, weights_BTk, tuple(ups_EDF), down_EFD
    )


def local_experts(
    network: Network,
    ways: int,
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
    run = lambda part: one_tile(network, ways, part, ups, down_EFD)
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


def one_tile(
    network: Network,
    ways: int,
    tokens: tuple[Array, Array, Array],
    ups: tuple[Array, ...],
    down_EFD: Array,
) -> tuple[Array, Array]:
    """`local_experts` of some of the tokens: x_ND, chosen_Nk and weights_Nk."""
    x_ND, chosen_Nk, weights_Nk = tokens
    (N, k), E = chosen_Nk.shape, ways * down_EFD.shape[0]
    expert_M = chosen_Nk.reshape(-1)  # of each copy of each token
    sizes_E = jnp.sum(expert_M[:, None] == jnp.arange(E)[None], axis=0, dtype=jnp.int32)
    order_M = jnp.argsort(expert_M, stable=True)
    if ways > 1:
        sizes_VWe = jax.lax.all_gather(sizes_E.reshape(ways, -1), "expert")
        lists = Lists(order_M, sizes_VWe)
        return by_rounds(network, (x_ND, weights_Nk), lists, ups, down_EFD), sizes_E
    back_M = inverse(order_M)
    copies_MD = jnp.broadcast_to(x_ND[:, None], (N, k, x_ND.shape[-1])).reshape(N * k, -1)
    sorted_MD = permute(copies_MD, order_M, back_M)
    weights_M1 = permute(weights_Nk.reshape(-1, 1), order_M, back_M)
    y_MD = permute(network(sorted_MD, weights_M1, ups, down_EFD, sizes_E), back_M, order_M)
    return of_tokens(y_MD, k), sizes_E


def inverse(order_M: Array) -> Array:
    places_M = jnp.arange(len(order_M), dtype=order_M.dtype)
    return jnp.zeros_like(order_M).at[order_M].set(places_M, unique_indices=True)


def of_tokens(y_MD: Array, k: int) -> Array:
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


class Lists(NamedTuple):
    """What goes where in all rounds together."""

    order_M: Array  # this device's copies of tokens, sorted by expert: a list for each device
    sizes_VWe: Array  # how many of device V's go to each expert of device W


class Round(NamedTuple):
    """What goes where in one round, of so many places from each device to each."""

    copy_S: Array  # that is sent from here in each place; past the last where none is
    place_S: Array  # that each row came in, once rows are sorted by expert; likewise
    row_S: Array  # the inverse of that, anything for a place that none came in
    sizes_e: Array  # rows for each expert here


def round_of(first: Array | int, width: int, lists: Lists) -> Round:
    """The one of `width` places of each list, from place `first`."""
    (M,), (W, _, local) = lists.order_M.shape, lists.sizes_VWe.shape
    me = jax.lax.axis_index("expert")
    each_C, each_S = jnp.arange(width), jnp.arange(W * width)
    counts_W = lists.sizes_VWe[me].sum(1)
    starts_W = jnp.cumsum(counts_W) - counts_W
    left_W1 = (counts_W - first)[:, None]
    at_WC = jnp.minimum((starts_W + first)[:, None] + each_C[None], M - 1)
    copy_WC = jnp.where(each_C[None] < left_W1, lists.order_M[at_WC], M + each_S.reshape(W, -1))
    # What comes from a device is in order of my experts.
    got_Ve = lists.sizes_VWe[:, me]
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
    return Round(copy_WC.reshape(-1), place_S, row_S, (ends_Ve - starts_Ve).sum(0))


def to_experts(rows_KD: Array, row_S: Array, way: Round) -> Array:
    """What row_S names of each device's rows, sorted by expert where those are; zeros behind."""
    came_SD = across(rows_KD.at[row_S].get(mode="clip"))
    return came_SD.at[way.place_S].get(mode="fill", fill_value=0, unique_indices=True)


def to_tokens(into_MD: Array, rows_SD: Array, way: Round) -> Array:
    """The rows back in the places of their copies."""
    came_SD = across(rows_SD.at[way.row_S].get(mode="clip"))
    return into_MD.at[way.copy_S].set(came_SD, mode="drop", unique_indices=True)


def across(rows_SD: Array) -> Array:
    """Places of mine on device W become W's on mine."""
    return jax.lax.all_to_all(rows_SD, "expert", 0, 0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_rounds(
    network: Network,
    tokens: tuple[Array, Array],
    lists: Lists,
    ups: tuple[Array, ...],
    down_EFD: Array,
) -> Array:
    """Each token's copies through their experts on the devices of those, added up: [N, D].

    tokens: x_ND and weights_Nk. The backward pass sends and computes each round once more. Where
    layers are neither recomputed (`model.remat`) nor scanned, XLA sees that it has that from the
    forward pass, and keeps it, but for what went through the loop.
    """
    x_ND, k = tokens[0], tokens[1].shape[1]

    def one(way: Round, y_MD: Array) -> Array:
        y_SD = network(*sent(tokens, way), ups, down_EFD, way.sizes_e)
        return to_tokens(y_MD, y_SD, way)

    return of_tokens(all_rounds(one, lists, empty(len(lists.order_M), x_ND)), k)


def sent(tokens: tuple[Array, Array], way: Round) -> tuple[Array, Array]:
    """Tokens and weights of a round's copies, where their experts are."""
    x_ND, weights_Nk = tokens
    x_SD = to_experts(x_ND, way.copy_S // weights_Nk.shape[1], way)
    return x_SD, to_experts(weights_Nk.reshape(-1, 1), way.copy_S, way)


def all_rounds(one: Callable[[Round, Any], Any], lists: Lists, state: Any) -> Any:
    """Those of an even load are not in a loop, so that what one sends can hide behind what another
    computes."""
    M, W = len(lists.order_M), len(lists.sizes_VWe)
    width, more = -(-(M + M // 16) // (W * ROUNDS)), -(-M // (W * PARTS))
    for r in range(ROUNDS):
        state = one(round_of(r * width, width, lists), state)
    left = jnp.max(lists.sizes_VWe.sum(2)) - ROUNDS * width
    next_one = lambda i, state: one(round_of(ROUNDS * width + i * more, more, lists), state)
    return jax.lax.fori_loop(0, -(-jnp.maximum(left, 0) // more), next_one, state)


def empty(rows: int, like: Array) -> Array:
    """Not zeros: XLA makes those of all layers in one place, where they wait."""
    return jax.lax.empty((rows, like.shape[1]), like.dtype)


def _by_rounds_forward(network: Network, *given: Any) -> tuple[Array, Any]:
    return by_rounds(network, *given), given


def _by_rounds_backward(network: Network, given: Any, g_ND: Array) -> Any:
    tokens, lists, *matrices = given
    (x_ND, weights_Nk), M = tokens, len(lists.order_M)
    k = weights_Nk.shape[1]

    def one(way: Round, sums: Any) -> Any:
        run = lambda rows, ups, down_EFD: network(*rows, ups, down_EFD, way.sizes_e)
        pull = jax.vjp(run, sent(tokens, way), *matrices)[1]
        drows, *dw = pull(to_experts(g_ND, way.copy_S // k, way))
        dcopies = jax.tree.map(lambda a, rows: to_tokens(a, rows, way), sums[0], drows)
        return dcopies, jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums[1], dw)

    wide = lambda w: jnp.zeros(w.shape, jnp.promote_types(jnp.float32, w.dtype))
    copies = empty(M, x_ND), empty(M, weights_Nk[:, :1])
    (dx_MD, dweights_M1), dw = all_rounds(one, lists, (copies, jax.tree.map(wide, matrices)))
    dw = jax.tree.map(lambda total, w: total.astype(w.dtype), dw, matrices)
    return (of_tokens(dx_MD, k), dweights_M1.reshape(-1, k)), None, *dw


by_rounds.defvjp(_by_rounds_forward, _by_rounds_backward)
