"""Expert parallelism: dropless dispatch and combine over the mesh axis `expert`.

Up to top_k devices gather all tokens instead (`gathered_experts.py`). This page is about more.

Each device of that axis holds E / size experts and its own batch rows (or, along `context`, a shard
of every row's tokens). A token's copies are sent to the devices of its experts. These sort them,
run a grouped matmul and send the results back. Copies are sent in rounds of a fixed size, as many
as the longest list from one device to another needs. So the result never depends on the load
balance, and no buffer is sized for the worst case (all tokens of all devices to one device).
"""

import functools
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxtrain.parallel.axes import (
    current_mesh,
    mesh_axes_in,
    partition_spec,
    psum_replicated_grad,
    shard_map,
)
from jaxtrain.parallel.gathered_experts import gathered_experts

# (rows [M, D], their weights [M, 1], ups, down, sizes_E) -> rows [M, D]: runs each group of rows
# through its expert, times the rows' weights
Network = Callable[..., Array]
# Rounds that always run; together they carry the rows of a balanced load and a sixteenth more.
ROUNDS = 2
# Each further round carries 1 / PARTS of a balanced list.
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
    """Sum over a token's chosen experts of weight x network(token); and each expert's token count.

    A weight is sent with its row, and the network applies it to the hidden layer (as in
    Megatron-LM). So the backward pass does not need the experts' outputs, which are neither saved
    nor recomputed.

    ups_EDF: up-projections, one matrix or two (gated). tiles: a device's tokens run in this many
    tiles, one after another, each recomputed in the backward pass (sequences that do not divide,
    such as prompts, are one tile).
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


def has_whole_experts(shape_EFD: tuple[int, ...]) -> bool:
    """Whether each device has all experts, undivided; shape: of their down-projections."""
    mesh = current_mesh()
    return mesh is None or not any(partition_spec(("experts", "hidden", None), shape_EFD, mesh))


def moe_of_rows(
    network: Network,
    routing: kernels.PermutedRouting,
    ups_EDF: Sequence[Float[Array, "E D F"]],
    down_EFD: Float[Array, "E F D"],
) -> tuple[Float[Array, "B T D"], Int[Array, "E"]]:
    """`moe_dispatch_combine` of tokens that are in the rows of their experts already, on devices
    that have all experts (`has_whole_experts`). The rows are those of a device's own tokens."""
    mesh = current_mesh()

    def local(routing: kernels.PermutedRouting, ups: tuple[Array, ...], down: Array):
        flat = lambda a: a.reshape(-1, a.shape[-1])
        sizes_E = jnp.sum(flat(routing.hits_BbE).astype(jnp.int32), axis=0)
        y_MD = network(flat(routing.rows_BMD), flat(routing.weights_BM1), ups, down, sizes_E)
        y_ND = kernels.moe_unpermute(y_MD, flat(routing.row_BTk))
        return y_ND.reshape(*routing.row_BTk.shape[:2], -1), sizes_E

    given = routing, tuple(ups_EDF), down_EFD
    if mesh is None:
        return local(*given)
    rows = partition_spec(("batch", "tokens", None), routing.row_BTk.shape, mesh)
    names = mesh_axes_in(rows[0]) + mesh_axes_in(rows[1])
    holders = tuple(name for name in names if mesh.shape[name] > 1)

    def of_all(*given):
        y_BTD, sizes_E = local(*given)
        return y_BTD, jax.lax.psum(sizes_E, holders) if holders else sizes_E

    return shard_map(of_all, (P(*rows[:2]), P(), P()), (rows, P()))(*given)


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
    """Run one device's tokens through all experts; the sizes are of all E experts."""
    flat = lambda a: a.reshape(-1, a.shape[-1])
    tokens = flat(x_BTD), flat(chosen_BTk), flat(weights_BTk)
    run = lambda part: moe_tile(network, num_shards, part, ups, down_EFD)
    parts = gcd(tiles, len(tokens[0]))  # fewer tiles for few tokens over many devices
    if parts == 1:
        y_ND, sizes_E = run(tokens)
        return y_ND.reshape(x_BTD.shape), sizes_E
    # The loop already keeps XLA from reusing forward results in the backward pass (CSE).
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
    """`moe_on_device` for one tile of tokens: x_ND, chosen_Nk and weights_Nk."""
    x_ND, chosen_Nk, weights_Nk = tokens
    if 1 < num_shards <= chosen_Nk.shape[1]:
        y_ND = gathered_experts(network, x_ND, chosen_Nk, weights_Nk, ups, down_EFD)
        return y_ND, count_copies(chosen_Nk, num_shards * down_EFD.shape[0])
    if num_shards > 1:
        order_M, sizes_E = sort_by_expert(chosen_Nk, num_shards * down_EFD.shape[0])
        sizes_VWe = jax.lax.all_gather(sizes_E.reshape(num_shards, -1), "expert")
        plan = DispatchPlan(order_M, sizes_VWe)
        return chunked_all_to_all(network, (x_ND, weights_Nk), plan, ups, down_EFD), sizes_E
    row_Nk, sizes_E = kernels.row_id_map(chosen_Nk, down_EFD.shape[0])
    rows_MD, weights_M1 = kernels.moe_permute(x_ND, weights_Nk, row_Nk)
    y_MD = network(rows_MD, weights_M1, ups, down_EFD, sizes_E)
    return kernels.moe_unpermute(y_MD, row_Nk), sizes_E


# ---- between devices ---------------------------------------------------------------------------


def sort_by_expert(chosen_Nk: Array, experts: int) -> tuple[Array, Array]:
    """Return the copies in the order of their experts, and each expert's number of copies."""
    order_M = jnp.argsort(chosen_Nk.reshape(-1), stable=True)
    return order_M, count_copies(chosen_Nk, experts)


def count_copies(chosen_Nk: Array, experts: int) -> Array:
    """Each expert's number of copies."""
    each_E = jnp.arange(experts)
    return jnp.sum(chosen_Nk.reshape(-1)[:, None] == each_E[None], axis=0, dtype=jnp.int32)


class DispatchPlan(NamedTuple):
    """Routing of all rounds together."""

    order_M: Array  # this device's token copies, sorted by expert: one list per target device
    sizes_VWe: Array  # number of device V's copies for each expert of device W


class ExchangeRound(NamedTuple):
    """Routing of one round, with a fixed number of slots from each device to each device."""

    copy_S: Array  # token copy that this device sends in each slot; out of range for an empty slot
    place_S: Array  # slot in which each row sorted by expert was received; likewise
    row_S: Array  # inverse of place_S; arbitrary for an empty slot
    sizes_e: Array  # number of rows for each expert of this device


def exchange_round(first: Array | int, width: int, plan: DispatchPlan) -> ExchangeRound:
    """Routing of the round for entries first .. first + width - 1 of each list."""
    (M,), (W, _, local) = plan.order_M.shape, plan.sizes_VWe.shape
    me = jax.lax.axis_index("expert")
    each_C, each_S = jnp.arange(width), jnp.arange(W * width)
    counts_W = plan.sizes_VWe[me].sum(1)
    starts_W = jnp.cumsum(counts_W) - counts_W
    left_W1 = (counts_W - first)[:, None]
    at_WC = jnp.minimum((starts_W + first)[:, None] + each_C[None], M - 1)
    copy_WC = jnp.where(each_C[None] < left_W1, plan.order_M[at_WC], M + each_S.reshape(W, -1))
    # Rows received from a device are in the order of this device's experts.
    got_Ve = plan.sizes_VWe[:, me]
    ends_Ve = jnp.clip(jnp.cumsum(got_Ve, axis=1) - first, 0, width)
    starts_Ve = jnp.clip(jnp.cumsum(got_Ve, axis=1) - got_Ve - first, 0, width)
    sizes_g = (ends_Ve - starts_Ve).T.reshape(-1)  # a group is an expert's rows from one device
    ends_g = jnp.cumsum(sizes_g)
    places_Ve = starts_Ve + jnp.arange(W)[:, None] * width
    ahead_g = places_Ve.T.reshape(-1) - (ends_g - sizes_g)  # a row's slot minus its sorted position
    group_S = jnp.sum(each_S[:, None] >= ends_g[None], axis=1)
    place_S = each_S + ahead_g[jnp.minimum(group_S, W * local - 1)]
    place_S = jnp.where(each_S < ends_g[-1], place_S, W * width + each_S)
    expert_VC = jnp.sum(each_C[None, :, None] >= ends_Ve[:, None], axis=2)
    ahead_Ve = ahead_g.reshape(local, W).T
    ahead_VC = jnp.take_along_axis(ahead_Ve, jnp.minimum(expert_VC, local - 1), axis=1)
    row_S = each_S - ahead_VC.reshape(-1)
    return ExchangeRound(copy_WC.reshape(-1), place_S, row_S, (ends_Ve - starts_Ve).sum(0))


def dispatch_rows(rows_KD: Array, row_S: Array, exchange: ExchangeRound) -> Array:
    """Send each device's rows `row_S` to their experts' devices, where they are sorted by expert
    and followed by zeros."""
    came_SD = all_to_all(kernels.gather_rows(rows_KD, row_S))
    return kernels.gather_rows(came_SD, exchange.place_S)


def combine_rows(into_MD: Array, rows_SD: Array, exchange: ExchangeRound) -> Array:
    """Send rows back to their source devices, and write them at their copies' positions."""
    came_SD = all_to_all(kernels.gather_rows(rows_SD, exchange.row_S))
    return kernels.scatter_rows(into_MD, came_SD, exchange.copy_S)


def all_to_all(rows_SD: Array) -> Array:
    """Send the slots for device W to W, and receive W's slots for this device."""
    return jax.lax.all_to_all(rows_SD, "expert", 0, 0, tiled=True)


def sum_over_copies(y_MD: Array, k: int) -> Array:
    """Sum over a token's copies. jnp.sum accumulates 16-bit values in float32."""
    return jnp.sum(y_MD.reshape(-1, k, y_MD.shape[1]), axis=1).astype(y_MD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_all_to_all(
    network: Network,
    tokens: tuple[Array, Array],
    plan: DispatchPlan,
    ups: tuple[Array, ...],
    down_EFD: Array,
) -> Array:
    """Run each token's copies through their experts on other devices, and sum them: [N, D].

    tokens: x_ND and weights_Nk. The backward pass repeats the exchange and computation of each
    round. If layers are neither recomputed (`model.remat`) nor scanned, XLA instead saves these
    results from the forward pass, except those of rounds in the loop.
    """
    x_ND, k = tokens[0], tokens[1].shape[1]

    def one(exchange: ExchangeRound, y_MD: Array) -> Array:
        y_SD = network(*dispatch_tokens(tokens, exchange), ups, down_EFD, exchange.sizes_e)
        return combine_rows(y_MD, y_SD, exchange)

    return sum_over_copies(for_each_round(one, plan, uninitialized(len(plan.order_M), x_ND)), k)


def dispatch_tokens(tokens: tuple[Array, Array], exchange: ExchangeRound) -> tuple[Array, Array]:
    """Send a round's copies of tokens, and their weights, to their experts' devices."""
    x_ND, weights_Nk = tokens
    x_SD = dispatch_rows(x_ND, exchange.copy_S // weights_Nk.shape[1], exchange)
    return x_SD, dispatch_rows(weights_Nk.reshape(-1, 1), exchange.copy_S, exchange)


def for_each_round[State](
    one: Callable[[ExchangeRound, State], State], plan: DispatchPlan, state: State
) -> State:
    """Run all rounds. Those of a balanced load are not in a loop, so that one round's communication
    can overlap with another's computation."""
    M, W = len(plan.order_M), len(plan.sizes_VWe)
    width, more = -(-(M + M // 16) // (W * ROUNDS)), -(-M // (W * PARTS))
    for r in range(ROUNDS):
        state = one(exchange_round(r * width, width, plan), state)
    left = jnp.max(plan.sizes_VWe.sum(2)) - ROUNDS * width
    next_one = lambda i, state: one(exchange_round(ROUNDS * width + i * more, more, plan), state)
    return jax.lax.fori_loop(0, -(-jnp.maximum(left, 0) // more), next_one, state)


def uninitialized(rows: int, like: Array) -> Array:
    """An uninitialized array. XLA would create the zeros of all layers at once and hold them."""
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
