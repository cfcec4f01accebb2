"""Expert parallelism over few devices: each runs its own experts on the tokens of all devices.

With top_k experts a token, an all-to-all of copies (`experts.py`) sends as many bytes as whole
tokens to all of top_k devices. Up to that number it is cheaper to send tokens: copies are neither
sorted before they are sent, nor again where they arrive (as with Megatron-LM's `allgather` token
dispatcher). Each device runs its own tokens apart, so that exchanges are beside matmuls: forward,
its own hidden layer while others' tokens come, theirs, and its own outputs while their sums go
home; backward, its own tokens while others' gradients come, theirs, and the gradients of matrices
while theirs of tokens go home. Each device adds its tokens' sums in float32.

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


class PlacedTokens(NamedTuple):
    """A device's N tokens: rows first .. first + N - 1 of an array. Only kernels that read them
    where they are take them so: a slice would be a pass over them."""

    array_MD: Array
    first: Array | int
    size: int

    def rows(self, token_S: Array) -> Array:
        """Rows of these tokens; zeros for what is not a token."""
        row_S = jnp.where(token_S < self.size, token_S + self.first, len(self.array_MD))
        return kernels.gather_rows(self.array_MD, row_S)


class Copies(NamedTuple):
    """Where the copies of one device's tokens are on this device."""

    weights_Nk: Array
    row_Nk: Array  # row of each copy, sorted by expert; -1 for copies of other devices
    sizes_e: Array  # number of rows of each expert of this device


class LocalPass(NamedTuple):
    """Copies of one pass, in rows sorted by expert."""

    copy_S: Array  # copy (token x k + choice) of each row; out of range for an empty row
    row_Nk: Array  # row of each copy; out of range for copies that are not in the pass
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
    ups_eDF, down_eFD = matrices
    owners, k = range(jax.lax.axis_size("expert")), chosen_Nk.shape[1]
    # The tokens come first, beside the router; what it chose comes after them, in one array.
    routes_N2k = jnp.concatenate([a.astype(jnp.float32) for a in (chosen_Nk, weights_Nk)], axis=1)
    came = [(from_device(x_ND, i), from_device(routes_N2k, i)) for i in owners]

    def copies_of(routes: PlacedTokens) -> Copies:
        chosen_Nk, weights_of_Nk = jnp.split(slice_of(routes), [k], axis=1)
        rows = rows_of_device(chosen_Nk.astype(jnp.int32), len(down_eFD))
        return Copies(weights_of_Nk.astype(weights_Nk.dtype), *rows)

    xs, all_copies = [received(x_ND, 0)], [copies_of(received(routes_N2k, 0))]

    def run(i: int, down_eFD: Array, part: LocalPass) -> Array:
        rows = permuted_tokens(xs[i], all_copies[i], part)
        return network(*rows, ups_eDF, down_eFD, part.sizes_e)

    def local_sums(i: int, first: Array, down_eFD: Array, *added: Array | int) -> Array:
        sums_of = lambda y_SD, part, *added: kernels.sum_rows(y_SD, part.row_Nk, *added)
        run_part = functools.partial(run, i, down_eFD)
        (sums,) = sums_of_passes(PassSums([run_part], sums_of, [first], [all_copies[i]], added))
        return sums

    # Barriers: the device's own hidden layer, which the backward pass needs, is computed while
    # tokens come, its down-projections while the last sums go.
    part, late_eFD, sent = first_pass(all_copies[0]), down_eFD, []
    pull = pull_of(network, xs[0], all_copies[0], part, matrices)
    for i in owners[1:]:
        came[i], pull = jax.lax.optimization_barrier((came[i], pull))
        x, routes = (received(a, i) for a in came[i])
        xs.append(x)
        all_copies.append(copies_of(routes))
        first = run(i, down_eFD, first_pass(all_copies[i]))
        sums = local_sums(i, first, down_eFD)
        sums, late_eFD = jax.lax.optimization_barrier((sums, late_eFD))
        sent.append(send_back(sums, i))
    first, sent = jax.lax.optimization_barrier((run(0, late_eFD, part), sent))
    added = sum_of_devices([received(a, i) for i, a in enumerate(sent, 1)])
    return local_sums(0, first, late_eFD, *added), (xs, all_copies, matrices, pull)


def pull_of(
    network: Network, x: PlacedTokens, copies: Copies, part: LocalPass, matrices: Sequence[Any]
) -> Callable[[Array], Any]:
    """Function from the gradient of a pass's rows to those of tokens' rows, weights, matrices."""
    layer = lambda rows, *matrices: network(*rows, *matrices, part.sizes_e)
    return jax.vjp(layer, permuted_tokens(x, copies, part), *matrices)[1]


def _backward(network: Network, given: Any, g_ND: Array) -> Any:
    """Gradients of tokens, weights and matrices. It repeats the forward computation of what came
    and of further passes; XLA instead keeps what the forward pass computed of what came."""
    xs, all_copies, matrices, pull_own = given

    def sums_of(drows: tuple[Array, Array], part: LocalPass, *added: Any) -> tuple[Array, Array]:
        drows_SD, dweights_S1 = drows
        dweights_Nk = kernels.gather_rows(dweights_S1, part.row_Nk.reshape(-1))
        dx_ND = kernels.sum_rows(drows_SD, part.row_Nk, *added)
        return dx_ND, dweights_Nk.reshape(part.row_Nk.shape)

    def pull(i: int, g: PlacedTokens, part: LocalPass, pull_first: Any = None) -> tuple[Any, ...]:
        """Gradients of a pass's rows and of the matrices."""
        pull = pull_first or pull_of(network, xs[i], all_copies[i], part, matrices)
        return pull(g.rows(part.copy_S // all_copies[i].row_Nk.shape[1]))

    def to_tokens(
        i: int, g: PlacedTokens, drows: tuple[Array, Array], *added: Array | int
    ) -> PassSums:
        run = lambda part: pull(i, g, part)[0]
        return PassSums([run], sums_of, [drows], [all_copies[i]], added)

    came, gs, sent = [from_device(g_ND, i) for i in range(len(xs))], [], []
    # Barriers as in the forward pass: one device's tokens after another's.
    parts = [first_pass(copies) for copies in all_copies]
    gs = [received(g_ND, 0)]
    drows, *dw = pull(0, gs[0], parts[0], pull_own)
    own, dw_firsts = drows, [tuple(dw)]
    for i in range(1, len(xs)):
        came[i], drows = jax.lax.optimization_barrier((came[i], drows))
        own = drows if i == 1 else own
        gs.append(received(came[i], i))
        drows, *dw = pull(i, gs[i], parts[i])
        dw_firsts.append(tuple(dw))
        ((dx_ND, dweights_Nk),) = sums_of_passes(to_tokens(i, gs[i], drows))
        sent.append((send_back(dx_ND, i), dweights_Nk))
    # Gradients of matrices hide the last exchange of tokens. Only then, weights': they are small.
    sent, dw_firsts = jax.lax.optimization_barrier((sent, dw_firsts))
    tokens = [received(dx, i) for i, (dx, _) in enumerate(sent, 1)]
    back = [received(send_back(d_Nk, i), i) for i, (_, d_Nk) in enumerate(sent, 1)]
    tokens = to_tokens(0, gs[0], own, *sum_of_devices(tokens))
    dw_of = [lambda part, i=i, g=g: pull(i, g, part)[1:] for i, g in enumerate(gs)]
    matrix = PassSums(dw_of, lambda dw, _: dw, dw_firsts, all_copies)
    (dx_ND, dweights_Nk), dw = sums_of_passes(tokens, matrix)
    dweights_Nk = sum(map(slice_of, back), dweights_Nk)
    return dx_ND, None, dweights_Nk, *dw


_gathered.defvjp(_forward, _backward)


def rows_of_device(chosen_Nk: Array, local: int) -> tuple[Array, Array]:
    """`Copies.row_Nk` and `Copies.sizes_e`."""
    experts = jnp.arange(jax.lax.axis_size("expert") * local)
    row_Nk, sizes_E = kernels.row_id_map(chosen_Nk, len(experts))
    mine = jax.lax.axis_index("expert") * local
    before = jnp.sum(jnp.where(experts < mine, sizes_E, 0))
    count = jnp.sum(jnp.where((experts >= mine) & (experts < mine + local), sizes_E, 0))
    row_Nk = jnp.where((row_Nk >= before) & (row_Nk < before + count), row_Nk - before, -1)
    return row_Nk, jax.lax.dynamic_slice(sizes_E, (mine,), (local,))


def from_device(x_ND: Array, i: int) -> Array:
    """What `received` takes from the device i places after this one, around the axis `expert`.

    Between two devices it is an all-gather, which GPUs' copy engines do (`parallel.mesh`): NCCL
    permutes by multiprocessors, which the matmuls beside it then lack.
    """
    size = jax.lax.axis_size("expert")
    if i % size == 0:
        return x_ND
    if size == 2:
        return jax.lax.all_gather(x_ND, "expert")
    pairs = [((to + i) % size, to) for to in range(size)]
    return jax.lax.ppermute(x_ND, "expert", pairs)


def received(came: Array, i: int) -> PlacedTokens:
    """What came by `from_device`. Apart, so that XLA waits for it only where it is needed."""
    size = jax.lax.axis_size("expert")
    if i % size == 0 or size != 2:
        return PlacedTokens(came, 0, len(came))
    _, N, *_ = came.shape
    return PlacedTokens(came.reshape(2 * N, -1), (1 - jax.lax.axis_index("expert")) * N, N)


def slice_of(part: PlacedTokens) -> Array:
    """The tokens by themselves."""
    return jax.lax.dynamic_slice_in_dim(part.array_MD, part.first, part.size)


def send_back(y_ND: Array, i: int) -> Array:
    """Send y to the device i places after this one; `received` takes what came from i before."""
    return from_device(y_ND, -i)


def sum_of_devices(sums: Sequence[PlacedTokens]) -> tuple[Array, Array | int] | tuple[()]:
    """What `sum_rows` adds: an array and its first row. More than one are added in float32."""
    if len(sums) > 1:
        return functools.reduce(jnp.add, (in_float32(slice_of(a)) for a in sums)), 0
    return (sums[0].array_MD, sums[0].first) if sums else ()


def permuted_tokens(x: PlacedTokens, copies: Copies, part: LocalPass) -> tuple[Array, Array]:
    """Tokens and weights of a pass's rows; zeros in empty ones."""
    rows_SD = x.rows(part.copy_S // copies.weights_Nk.shape[1])
    return rows_SD, kernels.gather_rows(copies.weights_Nk.reshape(-1, 1), part.copy_S)


def in_float32(x: Array) -> Array:
    """16-bit arrays in float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def first_pass(copies: Copies) -> LocalPass:
    """Room for a balanced load and a sixteenth more."""
    balanced = copies.row_Nk.size // jax.lax.axis_size("expert")
    return local_pass(0, min(copies.row_Nk.size, balanced + balanced // 16), copies)


class PassSums(NamedTuple):
    """Functions of passes over the copies of some devices' tokens, and how to sum their results.

    runs: of one device's tokens, a function of a pass. firsts: its result of the first pass.
    sums_of: of such a result and its pass; `added` are further arguments of the first one.
    """

    runs: Sequence[Callable[[LocalPass], Any]]
    sums_of: Callable[..., Any]
    firsts: Sequence[Any]
    all_copies: Sequence[Copies]
    added: Sequence[Any] = ()

    @property
    def room(self) -> int:
        """Rows of a first pass."""
        return len(first_pass(self.all_copies[0]).copy_S)

    @property
    def are_left(self) -> Array:
        """Whether the first passes leave rows."""
        counts = jnp.stack([jnp.sum(copies.sizes_e) for copies in self.all_copies])
        return jnp.max(counts) > self.room

    def first_sums(self) -> tuple[Any, Any]:
        """Sums of the first passes in float32, and in the dtype of the result."""
        parts = map(first_pass, self.all_copies)
        sums = [self.sums_of(*one, *self.added) for one in zip(self.firsts, parts, strict=True)]
        if len(sums) == 1:
            return jax.tree.map(in_float32, sums[0]), sums[0]
        total = functools.reduce(add_trees, sums[1:], jax.tree.map(in_float32, sums[0]))
        return total, cast_as(total, sums[0])

    def all_sums(self) -> Any:
        """Sums of all passes. With two devices at most one pass is left, and nothing is in a loop:
        its condition is read by the host, which waits for the GPU."""
        total, narrow = self.first_sums()
        number = self.all_copies[0].row_Nk.size
        width, balanced = self.room, number // jax.lax.axis_size("expert")
        for run, copies in zip(self.runs, self.all_copies, strict=True):

            def one(i: Array | int, total: Any, run: Any = run, copies: Copies = copies) -> Any:
                other = local_pass(width + i * balanced, balanced, copies)
                return add_trees(total, self.sums_of(run(other), other))

            if number <= width + balanced:
                total = one(0, total)
            else:
                left = -(-(jnp.sum(copies.sizes_e) - width) // balanced)
                total = jax.lax.fori_loop(0, left, one, total)
        return cast_as(total, narrow)


def sums_of_passes(*some: PassSums) -> list[Any]:
    """Sums of the first passes, and of others if rows are left.

    One branch for all of them, which XLA puts into a CUDA graph; it takes some 15 us. First sums
    are in the branches, since a branch that changes nothing copies what it returns.
    """
    given = lambda firsts: [one._replace(firsts=f) for one, f in zip(some, firsts, strict=True)]
    return jax.lax.cond(
        jnp.any(jnp.stack([one.are_left for one in some])),
        lambda firsts: [one.all_sums() for one in given(firsts)],
        lambda firsts: [one.first_sums()[1] for one in given(firsts)],
        [one.firsts for one in some],
    )


def add_trees[Tree](total: Tree, tree: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, tree)


def cast_as[Tree](tree: Tree, like: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a.astype(b.dtype), tree, like)


def local_pass(first: Array | int, width: int, copies: Copies) -> LocalPass:
    """The pass of rows first .. first + width - 1."""
    row_Nk = copies.row_Nk - first
    row_Nk = jnp.where((row_Nk >= 0) & (row_Nk < width), row_Nk, width)
    copy_M = jnp.arange(row_Nk.size, dtype=jnp.int32)
    empty_S = jnp.full(width, row_Nk.size, jnp.int32)
    copy_S = empty_S.at[row_Nk.reshape(-1)].set(copy_M, mode="drop")
    ends_e = jnp.cumsum(copies.sizes_e) - first
    inside = lambda ends: jnp.clip(ends, 0, width)
    return LocalPass(copy_S, row_Nk, inside(ends_e) - inside(ends_e - copies.sizes_e))
