"""Tokens to their experts and back: sorted, exchanged over the mesh axis `expert`, none dropped.

Each device of that axis holds E / ways experts and batch rows of its own, or, along `context`, a
part of every row's tokens. A token's copies travel to the devices of its experts, which sort what
they receive, multiply group by group and send the results back. A buffer has room for the worst
case (every token of every device to one device), so that the result never depends on the balance;
what came is computed a chunk at a time, as many chunks as there are tokens for.
"""

import functools
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtrain_kernels.dispatch import target
from jaxtyping import Array, Float, Int

from jaxtrain.parallel.axes import in_force, names_in, over_devices, partition_spec, summed
from jaxtrain.settings import UserError

# (rows [M, D], their weights [M, 1], ups, down, sizes_E) -> rows [M, D]: each group of rows through
# its expert, times its weight
Network = Callable[..., Array]
# Of the rows that a device gets where the load is even, and a sixteenth more.
CHUNKS = 4


def feed_experts(
    network: Network,
    x_BTD: Float[Array, "B T D"],
    chosen_BTk: Int[Array, "B T k"],
    weights_BTk: Float[Array, "B T k"],
    ups_EDF: Sequence[Float[Array, "E D F"]],
    down_EFD: Float[Array, "E F D"],
    exchange: str | None = None,
    tiles: int = 1,
) -> tuple[Float[Array, "B T D"], Int[Array, "E"]]:
    """Sum over a token's chosen experts of weight x network(token); and the tokens that each got.

    A weight goes with its row, and the network applies it to the hidden layer (as in Megatron-LM):
    so the backward pass does not ask for what an expert made, which is not kept or made again.

    ups_EDF: what reads the token, one matrix or two (gated). exchange: `ragged` sends what there is
    (GPU only), `padded` whole buffers; None takes the first that the device can. tiles: a device's
    tokens are taken in so many parts, one after another, each computed again in the backward pass
    (rows that do not divide, as prompts, are taken whole).

    Raises UserError for a ragged exchange between CPUs.
    """
    tiles = 1 if x_BTD.shape[1] % tiles else tiles
    mesh = in_force()
    if mesh is None:
        return local_experts(
            network, None, 1, tiles, x_BTD, chosen_BTk, weights_BTk, tuple(ups_EDF), down_EFD
        )
    rows = partition_spec(("batch", "tokens", None), x_BTD.shape, mesh)
    expert, hidden, _ = partition_spec(("experts", "hidden", None), down_EFD.shape, mesh)
    ways = 1 if expert is None else mesh.shape[expert]
    names = names_in(rows[0]) + names_in(rows[1])
    holders = tuple(name for name in names if mesh.shape[name] > 1)

    def local(x, chosen, weights, ups, down):
        y, sizes = local_experts(network, exchange, ways, tiles, x, chosen, weights, ups, down)
        y = y if hidden is None else summed(y, hidden)
        return y, jax.lax.psum(sizes, holders) if holders else sizes

    up_spec, down_spec = P(expert, None, hidden), P(expert, hidden, None)
    specs = rows, rows, rows, (up_spec,) * len(ups_EDF), down_spec
    return over_devices(local, specs, (rows, P()))(
        x_BTD, chosen_BTk, weights_BTk, tuple(ups_EDF), down_EFD
    )


def choose_exchange(asked: str | None) -> str:
    """XLA has no ragged all-to-all on CPUs. Raises UserError if it was asked for there."""
    platform = target().platform
    if asked == "ragged" and platform == "cpu":
        raise UserError(
            "model.moe.exchange=ragged: a cpu has no such exchange; padded, the default there, "
            "sends whole buffers"
        )
    return asked or ("ragged" if platform == "cuda" else "padded")


def local_experts(
    network: Network,
    exchange: str | None,
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
    run = lambda part: one_tile(network, exchange, ways, part, ups, down_EFD)
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
    exchange: str | None,
    ways: int,
    tokens: tuple[Array, Array, Array],
    ups: tuple[Array, ...],
    down_EFD: Array,
) -> tuple[Array, Array]:
    """`local_experts` of some of the tokens: x_ND, chosen_Nk and weights_Nk."""
    x_ND, chosen_Nk, weights_Nk = tokens
    (N, k), local = chosen_Nk.shape, down_EFD.shape[0]
    expert_M = chosen_Nk.reshape(-1)  # of each copy of each token
    sizes_E = jnp.sum(expert_M[:, None] == jnp.arange(local * ways)[None], axis=0, dtype=jnp.int32)
    order_M, back_M = sorting(expert_M)
    copies_MD = jnp.broadcast_to(x_ND[:, None], (N, k, x_ND.shape[-1])).reshape(N * k, -1)
    sent_MD = permute(copies_MD, order_M, back_M)
    weights_M1 = permute(weights_Nk.reshape(-1, 1), order_M, back_M)
    if ways == 1:
        y_MD = network(sent_MD, weights_M1, ups, down_EFD, sizes_E)
    else:
        how = Exchange(choose_exchange(exchange), N * min(k, local), N * k)
        sizes_We = sizes_E.reshape(ways, local)
        y_MD = exchanged(network, sent_MD, weights_M1, sizes_We, ups, down_EFD, how)
    y_NkD = permute(y_MD, back_M, order_M).reshape(N, k, -1)
    # jnp.sum adds what has 16 bits in float32.
    return jnp.sum(y_NkD, axis=1).astype(x_ND.dtype), sizes_E


def sorting(key_M: Array) -> tuple[Array, Array]:
    """The permutation that sorts by a key, stably, and its inverse."""
    order_M = jnp.argsort(key_M, stable=True)
    places_M = jnp.arange(len(key_M), dtype=order_M.dtype)
    return order_M, jnp.zeros_like(order_M).at[order_M].set(places_M, unique_indices=True)


@jax.custom_vjp
def permute(x_MD: Array, order_M: Array, back_M: Array) -> Array:
    """x[order]; the gradient is a gather by the inverse permutation, not a scatter."""
    return x_MD[order_M]


permute.defvjp(
    lambda x_MD, order_M, back_M: (x_MD[order_M], (order_M, back_M)),
    lambda saved, g_MD: (g_MD[saved[1]], None, None),
)


# ---- between devices ---------------------------------------------------------------------------


class Exchange(NamedTuple):
    """How rows go: `ragged` or `padded`."""

    kind: str
    room: int  # rows that one device may get from another
    rows: int  # that each device has


class Places(NamedTuple):
    """What goes where."""

    counts_W: Array  # rows that go from here to device W
    counts_V: Array  # and come from device V
    starts_VW: Array  # the first of those from V to W among V's rows


def exchanged(
    network: Network,
    sent_MD: Array,
    weights_M1: Array,
    sizes_We: Array,
    ups: tuple[Array, ...],
    down_EFD: Array,
    how: Exchange,
) -> Array:
    """Each row through its expert, on the device of that; the rows come back as they were.

    sent_MD, weights_M1: sorted by expert. sizes_We: how many of them go to each expert of each
    device.
    """
    me = jax.lax.axis_index("expert")
    all_VWe = jax.lax.all_gather(sizes_We, "expert")  # from device V to each expert of device W
    got_Ve = all_VWe[:, me]
    starts_VW = jnp.cumsum(all_VWe.sum(2), axis=1) - all_VWe.sum(2)
    places = Places(sizes_We.sum(1), got_Ve.sum(1), starts_VW)
    got = there(how, sent_MD, places), there(how, weights_M1, places)
    # A sender's rows are in order of my experts: which is each row's?
    place_R = jnp.arange(how.room)
    ends_Ve = jnp.cumsum(got_Ve, axis=1)
    expert_R = (place_R[None, :, None] >= ends_Ve[:, None, :]).sum(2).reshape(-1)
    chunk = -(-(how.rows + how.rows // 16) // CHUNKS)
    # The empty places last, and so many behind them that the last chunk may end there.
    order_P = jnp.pad(jnp.argsort(expert_R, stable=True), (0, chunk))
    y_RD: Array = by_chunks(network, chunk, got, order_P, got_Ve.sum(0), ups, down_EFD)
    return home(how, y_RD, places)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_chunks(
    network: Network,
    chunk: int,
    got: tuple[Array, Array],
    order_P: Array,
    sizes_E: Array,
    ups: tuple[Array, ...],
    down_EFD: Array,
) -> Array:
    """network(*got, ups, down, sizes), of rows and weights that an order sorts by expert.


    A loop over chunks that ends where the rows end: what is empty, most of it where many devices
    share the experts, does not go through them. The backward pass computes each chunk once more,
    so that nothing but what came is kept.
    """

    def one(i: Array, y_RD: Array) -> Array:
        place_C, sizes_c = part(i, chunk, order_P, sizes_E)
        y_CD = network(*taken(got, place_C), ups, down_EFD, sizes_c)
        return put(y_RD, place_C, y_CD)

    return jax.lax.fori_loop(0, chunks(chunk, sizes_E), one, empty_like(got[0]))


def part(i: Array, chunk: int, order_P: Array, sizes_E: Array) -> tuple[Array, Array]:
    """Where the rows of chunk i are, and how many of them are each expert's.

    Behind the last row come places that are none: what an empty one holds may be anything.
    """
    inside = lambda ends_E: jnp.clip(ends_E - i * chunk, 0, chunk)
    ends_E = jnp.cumsum(sizes_E)
    place_C = jax.lax.dynamic_slice_in_dim(order_P, i * chunk, chunk)
    each_C = jnp.arange(chunk)
    place_C = jnp.where(i * chunk + each_C < ends_E[-1], place_C, len(order_P) + each_C)
    return place_C, inside(ends_E) - inside(ends_E - sizes_E)


def taken(rows: Any, place_C: Array) -> Any:
    """Zero where a place is none."""
    take = lambda a: a.at[place_C].get(mode="fill", fill_value=0, unique_indices=True)
    return jax.tree.map(take, rows)


def put(into: Any, place_C: Array, rows: Any) -> Any:
    one = lambda a, new: a.at[place_C].set(new, mode="drop", unique_indices=True)
    return jax.tree.map(one, into, rows)


def empty_like(x: Array) -> Array:
    """Not zeros: XLA makes those of all layers in one place, where they wait."""
    return jax.lax.empty(x.shape, x.dtype)


def chunks(chunk: int, sizes_E: Array) -> Array:
    """How many there is something in."""
    return (jnp.sum(sizes_E) + chunk - 1) // chunk


def _by_chunks_forward(network: Network, chunk: int, *given: Any) -> tuple[Array, Any]:
    return by_chunks(network, chunk, *given), given


def _by_chunks_backward(network: Network, chunk: int, given: Any, g_RD: Array) -> Any:
    got, order_P, sizes_E, *matrices = given

    def one(i: Array, sums: Any) -> Any:
        place_C, sizes_c = part(i, chunk, order_P, sizes_E)
        run = lambda rows, ups, down_EFD: network(*rows, ups, down_EFD, sizes_c)
        drows, *dw = jax.vjp(run, taken(got, place_C), *matrices)[1](taken(g_RD, place_C))
        dgot = put(sums[0], place_C, drows)
        return dgot, jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums[1], dw)

    wide = lambda w: jnp.zeros(w.shape, jnp.promote_types(jnp.float32, w.dtype))
    sums = jax.tree.map(empty_like, got), jax.tree.map(wide, matrices)
    dgot, dw = jax.lax.fori_loop(0, chunks(chunk, sizes_E), one, sums)
    dw = jax.tree.map(lambda total, w: total.astype(w.dtype), dw, matrices)
    return dgot, None, None, *dw


by_chunks.defvjp(_by_chunks_forward, _by_chunks_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def there(how: Exchange, x_MD: Array, places: Places) -> Array:
    """Each device's rows in a slot of `room`, at the device that they go to: [W room, D].

    What is behind a slot's rows may be anything: nobody reads it.
    """
    (counts_W, counts_V, starts_VW), me = places, jax.lax.axis_index("expert")
    W, room = len(counts_W), how.room
    if how.kind == "ragged":
        slots_RD = jax.lax.empty((W * room, x_MD.shape[1]), x_MD.dtype)
        return jax.lax.ragged_all_to_all(
            x_MD, slots_RD, starts_VW[me], counts_W, jnp.full(W, me * room, jnp.int32), counts_V,
            axis_name="expert",
        )  # fmt: skip
    place_WR = starts_VW[me][:, None] + jnp.arange(room)[None]
    slots_WRD = x_MD[jnp.minimum(place_WR, len(x_MD) - 1)]
    return jax.lax.all_to_all(slots_WRD, "expert", 0, 0, tiled=True).reshape(-1, x_MD.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def home(how: Exchange, y_RD: Array, places: Places) -> Array:
    """The slots back, and the rows out of them: [rows, D]. It is the transpose of `there`."""
    (counts_W, counts_V, starts_VW), me = places, jax.lax.axis_index("expert")
    (W, room, rows), D = (len(counts_W), how.room, how.rows), y_RD.shape[1]
    if how.kind == "ragged":
        rows_MD = jax.lax.empty((rows, D), y_RD.dtype)
        return jax.lax.ragged_all_to_all(
            y_RD, rows_MD, jnp.arange(W, dtype=jnp.int32) * room, counts_V, starts_VW[:, me],
            counts_W, axis_name="expert",
        )  # fmt: skip
    slots_RD = jax.lax.all_to_all(y_RD.reshape(W, room, D), "expert", 0, 0, tiled=True)
    device_M = jnp.searchsorted(starts_VW[me] + counts_W, jnp.arange(rows), side="right")
    place_M = jnp.arange(rows) - starts_VW[me][device_M]
    return slots_RD.reshape(-1, D)[device_M * room + place_M]


# JAX's own transposes exchange all offsets first, and add what was picked row by row.
there.defvjp(
    lambda how, x_MD, places: (there(how, x_MD, places), places),
    lambda how, places, g_RD: (home(how, g_RD, places), None),
)
home.defvjp(
    lambda how, y_RD, places: (home(how, y_RD, places), places),
    lambda how, places, g_MD: (there(how, g_MD, places), None),
)
