"""Expert parallelism over few devices: each gathers all tokens and runs its own experts.

With top_k experts a token, an all-to-all of copies (`experts.py`) sends as many bytes as an
all-gather of tokens over top_k devices. Up to that number the all-gather is cheaper: copies are
neither sorted before they are sent, nor again where they arrive (Megatron-LM's `allgather` token
dispatcher). Partial sums return by all-to-all, and their device adds them in float32.

Many tokens run in chunks: the exchange of one chunk overlaps with the experts of another, and in
the backward pass with the gradients of matrices. Barriers tell XLA's scheduler so.

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

CHUNKS = 2
MIN_CHUNK = 4096  # tokens of a device

# (rows [M, D], their weights [M, 1], ups, down, sizes_e) -> rows [M, D]
Network = Callable[..., Array]


class Chunk(NamedTuple):
    """Where the copies of a chunk's tokens, of all devices of `expert`, are on this device."""

    weights_Gk: Array
    row_Gk: Array  # row of each copy, sorted by expert; -1 for copies of other devices
    sizes_e: Array  # number of rows of each expert of this device


class LocalPass(NamedTuple):
    """Copies of one pass, in rows sorted by expert."""

    copy_S: Array  # copy (token x k + choice) of each row; out of range for an empty row
    row_Gk: Array  # row of each copy; out of range for copies that are not in the pass
    sizes_e: Array  # number of rows of each expert of this device


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered_experts(
    network: Network,
    x_ND: Float[Array, "N D"],
    chosen_Nk: Int[Array, "N k"],
    weights_Nk: Float[Array, "N k"],
    ups_eDF: Sequence[Float[Array, "e D F"]],
    down_eFD: Float[Array, "e F D"],
) -> Float[Array, "N D"]:
    """Sum over a token's experts, on whatever device of `expert` they are, of weight x network."""
    return _forward(network, x_ND, chosen_Nk, weights_Nk, ups_eDF, down_eFD)[0]


def _forward(network: Network, x_ND: Array, chosen_Nk: Array, *given: Any) -> tuple[Array, Any]:
    weights_Nk, *matrices = given
    xs, chunks = gather_chunks(x_ND, chosen_Nk, weights_Nk, len(matrices[1]))

    def local_sums(chunk: Chunk, x_GD: Array) -> Array:
        run = lambda part: network(*permuted_tokens(x_GD, chunk, part), *matrices, part.sizes_e)
        sums_of = lambda y_SD, part: kernels.sum_rows(y_SD, part.row_Gk)
        return sum_of_passes([run], sums_of, [run(first_pass(chunk))], [chunk])

    runs = [functools.partial(local_sums, chunk) for chunk in chunks]
    xs, y_nMD = in_turn(runs, xs, sum_partials)
    return jnp.concatenate(y_nMD), (xs, chunks, matrices)


def _backward(network: Network, given: Any, g_ND: Array) -> Any:
    """Gradients of tokens, weights and matrices. It repeats the forward computation; XLA instead
    keeps what the forward pass computed, except in further passes."""
    xs, chunks, matrices = given

    def pull(chunk: Chunk, x_GD: Array, g_GD: Array, part: LocalPass) -> Any:
        layer = lambda rows, *matrices: network(*rows, *matrices, part.sizes_e)
        pull = jax.vjp(layer, permuted_tokens(x_GD, chunk, part), *matrices)[1]
        return pull(kernels.gather_rows(g_GD, part.copy_S // chunk.row_Gk.shape[1]))

    def sums_of(drows: tuple[Array, Array], part: LocalPass) -> tuple[Array, Array]:
        drows_SD, dweights_S1 = drows
        dweights_Gk = kernels.gather_rows(dweights_S1, part.row_Gk.reshape(-1))
        return kernels.sum_rows(drows_SD, part.row_Gk), dweights_Gk.reshape(part.row_Gk.shape)

    dw_of, dw_firsts = [], []

    def local_sums(chunk: Chunk, x_GD: Array, g_GD: Array) -> tuple[Array, Array]:
        run = functools.partial(pull, chunk, x_GD, g_GD)
        drows, *dw = run(first_pass(chunk))
        dw_of.append(lambda part: run(part)[1:])
        dw_firsts.append(tuple(dw))
        return sum_of_passes([lambda part: run(part)[0]], sums_of, [drows], [chunk])

    came = [gather_tokens(g_MD) for g_MD in jnp.split(g_ND, len(chunks))]
    runs = [functools.partial(local_sums, *given) for given in zip(chunks, xs, strict=True)]
    _, sums = in_turn(runs, came, lambda sums: (sum_partials(sums[0]), sums[1]))
    # Gradients of matrices hide the last exchange of tokens. Only then, weights': they are small.
    sums, dw_firsts = jax.lax.optimization_barrier((sums, dw_firsts))
    dx, dweights = zip(*sums, strict=True)
    devices, k = jax.lax.axis_size("expert"), chunks[0].row_Gk.shape[1]
    dweights_WNk = jnp.concatenate([d.reshape(devices, -1, k) for d in dweights], axis=1)
    dweights_Nk = sum_partials(dweights_WNk.reshape(-1, k))
    dw = sum_of_passes(dw_of, lambda dw, _: dw, dw_firsts, chunks)
    return jnp.concatenate(dx), None, dweights_Nk, *dw


gathered_experts.defvjp(_forward, _backward)


def gather_chunks(
    x_ND: Array, chosen_Nk: Array, weights_Nk: Array, local: int
) -> tuple[list[Array], list[Chunk]]:
    """The tokens x_GD of each chunk, and the chunks. The first tokens are gathered while the router
    computes."""
    devices = jax.lax.axis_size("expert")
    number = CHUNKS if len(x_ND) % CHUNKS == 0 and len(x_ND) >= CHUNKS * MIN_CHUNK else 1
    first, *others = map(gather_tokens, jnp.split(x_ND, number))
    first, *router = jax.lax.optimization_barrier((first, chosen_Nk, weights_Nk))
    chosen, weights = (
        jnp.split(gather_tokens(a_Nk).reshape(devices, len(x_ND), -1), number, 1) for a_Nk in router
    )
    flat = lambda a: a.reshape(-1, a.shape[-1])
    return [first, *others], [
        Chunk(flat(weights), *rows_of_device(flat(chosen), local))
        for chosen, weights in zip(chosen, weights, strict=True)
    ]


def in_turn[Sums, Sent](
    runs: Sequence[Callable[[Array], Sums]],
    came: Sequence[Array],
    send: Callable[[Sums], Sent],
) -> tuple[list[Array], list[Sent]]:
    """Call each function with what came from other devices for it, and send its result; return what
    came and what was sent.

    Barriers make XLA run one function after the other: while one runs, what the next one takes
    comes, and what the one before returned is sent.
    """
    came, sent = list(came), []
    sums = runs[0](came[0])
    for i, run in enumerate(runs[1:], 1):
        came[i], sums = jax.lax.optimization_barrier((came[i], sums))
        sent.append(send(sums))
        sent[-1], sums = jax.lax.optimization_barrier((sent[-1], run(came[i])))
    return came, [*sent, send(sums)]


def rows_of_device(chosen_Gk: Array, local: int) -> tuple[Array, Array]:
    """`Chunk.row_Gk` and `Chunk.sizes_e`."""
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


def permuted_tokens(x_GD: Array, chunk: Chunk, part: LocalPass) -> tuple[Array, Array]:
    """Tokens and weights of a pass's rows; zeros in empty ones."""
    k = chunk.weights_Gk.shape[1]
    rows_SD = kernels.gather_rows(x_GD, part.copy_S // k)
    return rows_SD, kernels.gather_rows(chunk.weights_Gk.reshape(-1, 1), part.copy_S)


def in_float32(x: Array) -> Array:
    """16-bit arrays in float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def first_pass(chunk: Chunk) -> LocalPass:
    """Room for a balanced load and a sixteenth more."""
    balanced = chunk.row_Gk.size // jax.lax.axis_size("expert")
    return local_pass(0, min(chunk.row_Gk.size, balanced + balanced // 16), chunk)


def sum_of_passes[Rows, Sums](
    runs: Sequence[Callable[[LocalPass], Rows]],
    sums_of: Callable[[Rows, LocalPass], Sums],
    firsts: Sequence[Rows],
    chunks: Sequence[Chunk],
) -> Sums:
    """Sums of all chunks' passes, in float32: of the first passes, and of others if rows are left.

    runs: a chunk's function of a pass. firsts: its result of the first pass. `sums_of` these is in
    the branches, since a branch that changes nothing copies it. With two devices at most one pass
    is left, and nothing is in a loop. XLA puts branches into a CUDA graph; a loop's condition is
    read by the host, which waits for the GPU.
    """
    parts = [first_pass(chunk) for chunk in chunks]
    width, copies = len(parts[0].copy_S), chunks[0].row_Gk.size
    balanced = copies // jax.lax.axis_size("expert")
    counts = [jnp.sum(chunk.sizes_e) for chunk in chunks]
    add = lambda total, sums: jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, sums)

    def first_sums(firsts: Sequence[Rows]) -> tuple[Sums, Sums]:
        """In float32, and in the dtype of the result."""
        sums = [sums_of(first, part) for first, part in zip(firsts, parts, strict=True)]
        if len(sums) == 1:
            return jax.tree.map(in_float32, sums[0]), sums[0]
        total = functools.reduce(add, sums[1:], jax.tree.map(in_float32, sums[0]))
        return total, jax.tree.map(lambda a, b: a.astype(b.dtype), total, sums[0])

    def with_others(firsts: Sequence[Rows]) -> Sums:
        total, narrow = first_sums(firsts)
        for run, chunk, count in zip(runs, chunks, counts, strict=True):

            def one(i: Array | int, total: Sums, run: Any = run, chunk: Chunk = chunk) -> Sums:
                other = local_pass(width + i * balanced, balanced, chunk)
                return add(total, sums_of(run(other), other))

            if copies <= width + balanced:
                total = one(0, total)
            else:
                total = jax.lax.fori_loop(0, -(-(count - width) // balanced), one, total)
        return jax.tree.map(lambda a, b: a.astype(b.dtype), total, narrow)

    is_left = jnp.max(jnp.stack(counts)) > width
    return jax.lax.cond(is_left, with_others, lambda firsts: first_sums(firsts)[1], firsts)


def local_pass(first: Array | int, width: int, chunk: Chunk) -> LocalPass:
    """The pass of rows first .. first + width - 1."""
    row_Gk = chunk.row_Gk - first
    row_Gk = jnp.where((row_Gk >= 0) & (row_Gk < width), row_Gk, width)
    copy_M = jnp.arange(row_Gk.size, dtype=jnp.int32)
    empty_S = jnp.full(width, row_Gk.size, jnp.int32)
    copy_S = empty_S.at[row_Gk.reshape(-1)].set(copy_M, mode="drop")
    ends_e = jnp.cumsum(chunk.sizes_e) - first
    inside = lambda ends: jnp.clip(ends, 0, width)
    return LocalPass(copy_S, row_Gk, inside(ends_e) - inside(ends_e - chunk.sizes_e))
