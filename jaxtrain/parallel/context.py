"""Context parallelism: each device of the mesh axis `context` holds a shard of every sequence.

Zigzag sharding: the sequence is cut into 2C chunks, and device i of C holds the chunks i and
2C-1-i, an early and a late one. With a causal mask every device then has the same work (Brandon et
al. 2023, Striped Attention; Llama 3 does the same). With C = 4:

    tokens    |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |
    device       0     1     2     3     3     2     1     0

Ring attention (Liu et al. 2023): keys and values are passed around the ring, and the results of
the chunks are merged by their log-sum-exp. In ring step r, device i receives chunks of device
i - r. Its late queries attend to that device's early chunk. In addition, its early queries attend
to that early chunk if it is in their past; otherwise its late queries attend to the late chunk:

    step   device 0 (0, 7)   device 1 (1, 6)   device 2 (2, 5)   device 3 (3, 4)
    own    0->0  7->0 7->7   1->1  6->1 6->6   2->2  5->2 5->5   3->3  4->3 4->4
    r = 1  7->3  7->4        6->0  1->0        5->1  2->1        4->2  3->2
    r = 2  7->2  7->5        6->3  6->4        5->0  2->0        4->1  3->1
    r = 3  7->1  7->6        6->2  6->5        5->3  5->4        4->0  3->0
    (query chunk -> key chunk)

Every such product is a square, either unmasked or causal, so any attention kernel computes it. With
a sliding window a device receives only the chunks that the window reaches.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxtrain.parallel.axes import current_mesh, partition_spec, shard_map
from jaxtrain.settings import UserError

AXIS = "context"
HIDDEN = 1e30  # log-sum-exp of query rows to which a chunk product must contribute nothing


class Options(NamedTuple):
    """Static arguments of a call; `kernel`: further arguments of `jaxtrain_kernels.attention`."""

    shards: int
    window: int | None
    kernel: tuple[tuple[str, Any], ...]


class RingStep(NamedTuple):
    """Chunk products of one ring step: on device i, in slot s, the query half queries[i, s] attends
    to the key chunk keys[i, s]; negative: to nothing.

    Slots are stacked along the batch dim. edge: number of tokens that the window reaches into the
    key chunk, if not all. Then the first `edge` queries attend to the last `edge` keys, each query
    to one key less than the query before.
    """

    queries: np.ndarray
    keys: np.ndarray
    edge: int | None = None


# ---- sharding of the sequence ------------------------------------------------------------------


def context_size() -> int:
    """Number of devices of the current mesh that shard a sequence."""
    mesh = current_mesh()
    return 1 if mesh is None else mesh.shape.get(AXIS, 1)


def check_context_chunks(
    shards: int, what: str, length: int, windows: Iterable[int | None] = ()
) -> None:
    """Raise UserError if a sequence cannot be cut into an early and a late chunk per device, or if
    a window longer than a chunk is not a multiple of the chunk."""
    if shards == 1:
        return
    if length % (2 * shards):
        down = length // (2 * shards) * 2 * shards
        raise UserError(
            f"{what} {length} does not divide over mesh.context={shards}: each device takes an "
            f"early and a late chunk of it, so use a multiple of {2 * shards} (say "
            f"{down or 2 * shards})"
        )
    chunk = length // (2 * shards)
    for window in windows:
        if window is not None and chunk < window < length - 1 and window % chunk:
            down = window // chunk * chunk
            raise UserError(
                f"model.short_window {window}: {what} {length} over mesh.context={shards} is in "
                f"chunks of {chunk} tokens, and a window longer than one must be a multiple of "
                f"that; use {down} or {down + chunk}"
            )


def zigzag_shard[Tree](tree: Tree) -> Tree:
    """Reorder arrays [B, T, ...] into the zigzag order of the devices; None leaves stay."""
    shards = context_size()
    if shards == 1:
        return tree

    def shard(x: Any) -> jax.Array:
        check_context_chunks(shards, "a sequence of", x.shape[1])
        halves = x.reshape(x.shape[0], 2, shards, -1, *x.shape[2:])
        return jnp.stack([halves[:, 0], halves[:, 1, ::-1]], 2).reshape(x.shape)

    return jax.tree.map(shard, tree)


def chunk_of(device: int, half: int, shards: int) -> int:
    return device if half == 0 else 2 * shards - 1 - device


def chunk_owner(number: int, shards: int) -> tuple[int, int]:
    """(device, half) that holds a chunk."""
    return (number, 0) if number < shards else (2 * shards - 1 - number, 1)


def chunk_before(shards: int, chunks: int) -> np.ndarray:
    """For each device's two chunks, the chunk `chunks` before it, [C, 2]; negative: none."""
    return np.array(
        [[chunk_of(i, half, shards) - chunks for half in (0, 1)] for i in range(shards)]
    )


# ---- ring steps -------------------------------------------------------------------------------


def ring_steps(shards: int, window: int | None, length: int) -> list[RingStep]:
    """All ring steps for chunks of `length` tokens, without products of a device's own chunks."""
    device = np.arange(shards)
    if window is None:
        # Late queries attend to the early chunk of the device r before on the ring. Besides, early
        # queries attend to that early chunk if it is in the past, else late ones to the late chunk.
        found = []
        for r in range(1, shards):
            source = (device - r) % shards
            past = source < device
            keys = np.where(past, source, 2 * shards - 1 - source)
            queries = np.where(past, 0, 1)
            late = np.ones_like(device)
            found.append(RingStep(np.stack([late, queries], 1), np.stack([source, keys], 1)))
        return found
    own = np.tile([0, 1], (shards, 1))
    reach = -(-window // length)
    found = [RingStep(own, chunk_before(shards, k)) for k in range(1, reach)]
    found.append(RingStep(own, chunk_before(shards, reach), window - (reach - 1) * length))
    some = [(e.keys >= 0).any(0) for e in found]
    return [RingStep(e.queries[:, s], e.keys[:, s], e.edge) for e, s in zip(found, some)]


def select_by_device(table: np.ndarray, first: jax.Array, second: jax.Array) -> jax.Array:
    """Select `second` on devices where the table [C] is true, `first` elsewhere."""
    if table.all() or not table.any():
        return second if table.all() else first
    return jnp.where(jnp.asarray(table)[jax.lax.axis_index(AXIS)], second, first)


def ppermute_chunks(x_B2: jax.Array, keys: np.ndarray) -> list[jax.Array]:
    """Fetch each device's key chunks from arrays [B, 2, ...]: one [B, ...] a slot, 0 for none."""
    shards = len(keys)
    sent: list[tuple[int, dict[int, int], jax.Array]] = []

    def receive(half: int, wanted: dict[int, int]) -> jax.Array:
        for other, transfers, received in sent:
            if other == half and (keys >= 0).all() and wanted.items() <= transfers.items():
                return received
        pairs = [(source, device) for device, source in wanted.items()]
        sent.append((half, wanted, jax.lax.ppermute(x_B2[:, half], AXIS, pairs)))
        return sent[-1][2]

    slots = []
    for column in keys.T:
        owners = {i: chunk_owner(k, shards) for i, k in enumerate(column.tolist()) if k >= 0}
        parts = []
        for half in (0, 1):
            wanted = {i: source for i, (source, h) in owners.items() if h == half}
            if wanted:
                parts.append(
                    (np.array([i in wanted for i in range(shards)]), receive(half, wanted))
                )
        (_, x), *late = parts
        slots.append(select_by_device(late[0][0], x, late[0][1]) if late else x)
    return slots


def query_chunks(e: RingStep, x_B2: jax.Array, axis: int = 1) -> jax.Array:
    """Rows of an array [B, 2, ...] for the queries of each slot, [S B, ...], tokens at `axis`."""
    x = jnp.concatenate(
        [select_by_device(column == 1, x_B2[:, 0], x_B2[:, 1]) for column in e.queries.T]
    )
    if e.edge is None:
        return x
    # With tokens reversed, the part of the previous chunk inside the window is a causal square.
    return jnp.flip(jax.lax.slice_in_dim(x, 0, e.edge, axis=axis), axis)


def key_chunks(e: RingStep, x_B2: jax.Array) -> jax.Array:
    """Rows of an array [B, 2, ...] for the keys of each slot, from the devices that hold them."""
    if e.edge is None:
        return jnp.concatenate(ppermute_chunks(x_B2, e.keys))
    return jnp.flip(jnp.concatenate(ppermute_chunks(x_B2[:, :, -e.edge :], e.keys)), 1)


# ---- attention -------------------------------------------------------------------------------


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    *,
    window: int | None,
    segments_BT: Int[Array, "B T"] | None = None,
    **kernel: Any,
) -> Float[Array, "B T N H"]:
    """`parallel.attention` for zigzag-sharded sequences, also sharded over batch and heads.

    kernel: further arguments of `jaxtrain_kernels.attention`. Raises UserError if the requested
    backend does not support the call, or for a window that the chunks do not divide
    (`check_context_chunks`).
    """
    mesh = current_mesh()
    assert mesh is not None, "one device has the whole text"
    length = q_BTNH.shape[1] // (2 * mesh.shape[AXIS])
    check_context_chunks(mesh.shape[AXIS], "a sequence of", q_BTNH.shape[1], (window,))
    window = None if window is None or window >= q_BTNH.shape[1] - 1 else window
    options = Options(mesh.shape[AXIS], window, tuple(kernel.items()))
    spec = partition_spec(("batch", "tokens", "kv_heads", None), k_BSKH.shape, mesh)
    specs = spec, spec, spec, None if segments_BT is None else P(*spec[:2])

    def local(q, k, v, ids):
        halves = lambda x: x.reshape(x.shape[0], 2, length, *x.shape[2:])
        try:
            arrays = jax.tree.map(halves, (q, k, v, ids))
            out: jax.Array = _attend(options, *arrays)
        except NotImplementedError as error:
            raise UserError(
                f"model.{error}; model.attention=null chooses a backend that can"
            ) from None
        return out.reshape(q.shape)

    return shard_map(local, specs, spec)(q_BTNH, k_BSKH, v_BSKH, segments_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(o: Options, q_B2, k_B2, v_B2, ids_B2):
    return _forward(o, q_B2, k_B2, v_B2, ids_B2)[0]


def _forward(o: Options, q_B2, k_B2, v_B2, ids_B2):
    """The output in q's dtype, and residuals of the gradient. Arrays: [B, 2 halves, tokens, ...].

    A device's own two halves together are one causal square; with a window each is its own.
    """
    call = functools.partial(kernels.attention, **dict(o.kernel), return_lse=True)
    own = functools.partial(_own, o)
    arrays = own(q_B2), own(k_B2), own(v_B2)
    out, lse = call(*arrays, window=o.window, segment_ids_BT=own(ids_B2))
    out, lse = out.reshape(q_B2.shape).astype(lse.dtype), _own_lse_back(o, lse, q_B2)
    halves = [(out[:, half], lse[:, half]) for half in (0, 1)]
    for e in ring_steps(o.shards, o.window, q_B2.shape[2]):
        part, part_lse = call(*_operands(e, q_B2, k_B2, v_B2), **_masks(e, ids_B2))
        halves = _merge(e, halves, part, part_lse)
    out, lse = (jnp.stack(x, 1) for x in zip(*halves))
    out = out.astype(q_B2.dtype)
    return out, (q_B2, k_B2, v_B2, ids_B2, out, lse)


def _backward(o: Options, residuals, dout_B2):
    """Pass keys and values around the ring again, and send their gradients back to their owners."""
    q_B2, k_B2, v_B2, ids_B2, out_B2, lse_B2 = residuals
    call = functools.partial(kernels.attention_gradients, **dict(o.kernel))
    own = functools.partial(_own, o)
    arrays = own(q_B2), own(k_B2), own(v_B2), own(out_B2), _own_lse(o, lse_B2), own(dout_B2)
    parts = call(*arrays, window=o.window, segment_ids_BT=own(ids_B2))
    totals = [g.reshape(x.shape).astype(lse_B2.dtype) for g, x in zip(parts, (q_B2, k_B2, v_B2))]
    for e in ring_steps(o.shards, o.window, q_B2.shape[2]):
        operands, send_back = jax.vjp(functools.partial(_operands, e), q_B2, k_B2, v_B2)
        rows = query_chunks(e, out_B2), _rows_lse(e, lse_B2), query_chunks(e, dout_B2)
        parts = send_back(call(*operands, *rows, **_masks(e, ids_B2)))
        totals = [total + part.astype(total.dtype) for total, part in zip(totals, parts)]
    return *(t.astype(x.dtype) for t, x in zip(totals, (q_B2, k_B2, v_B2))), None


_attend.defvjp(_forward, _backward)


def _own(o: Options, x_B2):
    """Reshape [B, 2, tokens, ...] to one sequence per row, or with a window to one per half."""
    if x_B2 is None:
        return None
    B, _, length = x_B2.shape[:3]
    shape = (B, 2 * length) if o.window is None else (2 * B, length)
    return x_B2.reshape(*shape, *x_B2.shape[3:])


def _own_lse(o: Options, lse_B2):
    B, _, N, length = lse_B2.shape
    if o.window is None:
        return lse_B2.swapaxes(1, 2).reshape(B, N, 2 * length)
    return lse_B2.reshape(2 * B, N, length)


def _own_lse_back(o: Options, lse, q_B2):
    B, _, length, N = q_B2.shape[:4]
    if o.window is None:
        return lse.reshape(B, N, 2, length).swapaxes(1, 2)
    return lse.reshape(B, 2, N, length)


def _operands(e: RingStep, q_B2, k_B2, v_B2):
    return query_chunks(e, q_B2), key_chunks(e, k_B2), key_chunks(e, v_B2)


def _masks(e: RingStep, ids_B2) -> dict[str, Any]:
    masks: dict[str, Any] = {"causal": e.edge is not None}
    if ids_B2 is not None:
        masks |= {
            "segment_ids_BT": query_chunks(e, ids_B2),
            "key_segment_ids_BS": key_chunks(e, ids_B2),
        }
    return masks


def _rows_lse(e: RingStep, lse_B2):
    """The slots' log-sum-exp [S B, N, tokens]; HIDDEN on devices where a slot has no keys."""
    slots = jnp.split(query_chunks(e, lse_B2, axis=2), e.keys.shape[1])
    hide = lambda keys, x: select_by_device(keys < 0, x, jnp.full_like(x, HIDDEN))
    return jnp.concatenate([hide(keys, x) for keys, x in zip(e.keys.T, slots)])


def _merge(e: RingStep, halves, part, part_lse):
    """Merge the result of a ring step into the outputs (out_BTNH, lse_BNT) of both halves."""
    if e.edge is not None:
        part, part_lse = jnp.flip(part, 1), jnp.flip(part_lse, 2)
    n, halves, slots = part.shape[1], list(halves), e.keys.shape[1]
    for slot, (x, lse) in enumerate(zip(jnp.split(part, slots), jnp.split(part_lse, slots))):
        for half in (0, 1):
            here = (e.queries[:, slot] == half) & (e.keys[:, slot] >= 0)
            if not here.any():
                continue
            old, old_lse = halves[half]
            new_lse = select_by_device(here, jnp.full_like(lse, -jnp.inf), lse)
            total = jnp.logaddexp(old_lse[..., :n], new_lse)
            seen = jnp.where(total == -jnp.inf, 0.0, total)  # query rows without any key stay 0
            share = lambda l, seen=seen: jnp.exp(l - seen).swapaxes(1, 2)[..., None]
            mixed = old[:, :n] * share(old_lse[..., :n]) + x.astype(old.dtype) * share(new_lse)
            out = jnp.concatenate([mixed, old[:, n:]], 1)
            halves[half] = out, jnp.concatenate([total, old_lse[..., n:]], -1)
    return halves


# ---- the previous token ----------------------------------------------------------------------


def previous_token(x_BT: Array, zigzag: bool) -> Array:
    """Shift [B, T, ...] by one token along the sequence; zeros before the first.

    zigzag: whether the sequence is in the order of `zigzag_shard`.
    """
    mesh = current_mesh()
    if mesh is None or mesh.shape[AXIS] == 1 or not zigzag:
        return jnp.pad(x_BT[:, :-1], ((0, 0), (1, 0), *((0, 0) for _ in x_BT.shape[2:])))
    shards = mesh.shape[AXIS]
    spec = partition_spec(("batch", "tokens", *(None for _ in x_BT.shape[2:])), x_BT.shape, mesh)

    def local(x):
        x_B2 = x.reshape(x.shape[0], 2, -1, *x.shape[2:])
        before = jnp.stack(ppermute_chunks(x_B2[:, :, -1:], chunk_before(shards, 1)), 1)
        return jnp.concatenate([before, x_B2[:, :, :-1]], 2).reshape(x.shape)

    return shard_map(local, (spec,), spec)(x_BT)
