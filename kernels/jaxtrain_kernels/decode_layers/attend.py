"""Attention phases of the kernel `decode_layers`: attend to splits of the keys, and join them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.decode_layers.kernel import (
    FLOOR,
    LOG2E,
    THREADS,
    Context,
    high,
    join_words,
    poll,
    rounded,
    word_of,
    words_of,
)

JOINED = 32  # channels of a head that a program joins


class TokenRefs(NamedTuple):
    """Arrays that attention reads and writes. start_count: the new token's position in its
    sequence, and whether there is a new token. keys, values_kept: pages of all layers,
    flattened."""

    turns: Any  # [2, H/2]: cosines and sines
    values: Any  # [L, K * H]
    table: Any  # [W]
    start_count: Any  # [2]
    keys: Any
    values_kept: Any


class KeyRange(NamedTuple):
    """A program's split of the keys: positions begin .. end of KV head k."""

    k: Any
    split: Any
    begin: Any
    end: Any


class NewToken(NamedTuple):
    """Queries of the heads of one KV head, key, value; each in halves of its channels, [H/2]."""

    queries: list[tuple[Any, ...]]
    key: tuple[Any, ...]
    value: tuple[Any, ...]


def key_range_of(c: Context, refs: TokenRefs, window) -> KeyRange:
    splits = c.plan.splits
    start = refs.start_count[0]
    first = jnp.maximum(start - window, 0)
    each = jax.lax.div(start - first + (splits - 1), splits)
    split = jax.lax.rem(c.program, splits)
    begin = first + split * each
    return KeyRange(jax.lax.div(c.program, splits), split, begin, jnp.minimum(begin + each, start))


def places_of(c: Context, layer, page, slot, k):
    """Offset of a token's head in the flattened pages."""
    plan, s = c.plan, c.plan.shape
    token = (layer * plan.pages + page) * plan.page + slot
    return token * (s.kv_heads * s.head_dim) + k * s.head_dim


def load_keys(c: Context, refs: TokenRefs, layer, part: KeyRange, step):
    """Load the halves of the keys and of the values of a step, each [S, H/2]."""
    plan, half = c.plan, c.plan.shape.head_dim // 2
    s_S = part.begin + step * plan.tokens + jnp.arange(plan.tokens)
    inside_S = s_S < part.end
    index_S = jnp.minimum(jax.lax.div(s_S, plan.page), plan.table - 1)
    page_S = plgpu.load(refs.table.at[index_S], mask=inside_S, other=0)
    at_S = places_of(c, layer, page_S, jax.lax.rem(s_S, plan.page), part.k)
    at_Sh = at_S[:, None] + jnp.arange(half)[None]
    return tuple(
        plgpu.load(ref.at[at_Sh + side], mask=inside_S[:, None], other=0.0)
        for ref in (refs.keys, refs.values_kept)
        for side in (0, half)
    )


def wait_token(c: Context, left, begin, part: KeyRange):
    """Wait for the new token's queries, key, value and gate; return `left` (see `poll`)."""
    s = c.plan.shape
    half, H, G, k = s.head_dim // 2, s.head_dim, s.heads // s.kv_heads, part.k
    R = max(pl.next_power_of_2(G + 3), THREADS // half)
    r_R, h_1h = jnp.arange(R), jnp.arange(half)[None]
    head_R = jnp.where(r_R < G, k * G + r_R, s.heads + (r_R - G) * s.kv_heads + k)
    row_at_R = jnp.where(r_R < G + 2, head_R * H, gate_place(c, k))
    at_Rh = (begin + row_at_R)[:, None] + h_1h
    # Row G + 2 is the gate, one value. The rows after it are unused.
    is_head_R1 = (r_R < G + 2)[:, None]
    needed_Rh = is_head_R1 | ((r_R == G + 2)[:, None] & (h_1h == 0))

    def read():
        halves = [
            plgpu.load(c.slots.at[at_Rh + side], mask=needed, other=1, volatile=True)
            for side, needed in ((0, needed_Rh), (half, is_head_R1 & (h_1h < half)))
        ]
        # A bitwise and checks the marks of both halves with one sum instead of two.
        return (), [halves[0] & halves[1]]

    return poll(left, read, ())[1]


def gate_place(c: Context, k):
    """Place of a KV head's gate in the outputs of the first matmul."""
    return (c.plan.shape.heads + 2 * c.plan.shape.kv_heads) * c.plan.shape.head_dim + k


def new_token(c: Context, left, layer, base, refs: TokenRefs, part: KeyRange):
    """Return the new token's queries, key and value, and `left` (see `poll`).

    After the wait each warp reads the words for itself: a vector of a head has fewer words than a
    program threads, and one read by each warp takes less than the exchanges between warps that
    would bring the words of one array to all.
    """
    s = c.plan.shape
    half, H, G, k = s.head_dim // 2, s.head_dim, s.heads // s.kv_heads, part.k
    h_h = jnp.arange(half)
    # Read before the wait: the values come from memory.
    cos_h, sin_h = refs.turns[0, h_h], refs.turns[1, h_h]
    own = [refs.values[layer, k * H + i * half + h_h].astype(jnp.float32) for i in range(2)]
    begin = base + c.plan.places["qkv"]
    left = wait_token(c, left, begin, part)

    def read(head):
        at = begin + head * H + h_h
        return [high(plgpu.load(c.slots.at[at + side], volatile=True)) for side in (0, half)]

    def turned(a_h, b_h):
        factor = jax.lax.rsqrt((a_h * a_h + b_h * b_h).sum(0) / H + s.eps)
        return (
            rounded((a_h * cos_h - b_h * sin_h) * factor),
            rounded((b_h * cos_h + a_h * sin_h) * factor),
        )

    gate_word = high(plgpu.load(c.slots.at[begin + gate_place(c, k)], volatile=True))
    value_word, key = read(s.heads + s.kv_heads + k), read(s.heads + k)
    queries = [read(k * G + g) for g in range(G)]
    gate = rounded(3 * rounded(1 / (1 + jnp.exp(-gate_word))))
    value = tuple(rounded(x_h + rounded(gate * v_h)) for x_h, v_h in zip(value_word, own))
    return NewToken([turned(*query) for query in queries], turned(*key), value), left


def append(c: Context, layer, refs: TokenRefs, part: KeyRange, new: NewToken) -> None:
    """Write the new token's key and value to their page."""
    plan, half = c.plan, c.plan.shape.head_dim // 2
    start, h_h = refs.start_count[0], jnp.arange(half)
    page = refs.table[jnp.minimum(jax.lax.div(start, plan.page), plan.table - 1)]
    at_h = places_of(c, layer, page, jax.lax.rem(start, plan.page), part.k) + h_h
    is_kept = (part.split == 0) & (refs.start_count[1] > 0) & (h_h < half)
    for ref, x in ((refs.keys, new.key), (refs.values_kept, new.value)):
        for i, x_h in enumerate(x):
            plgpu.store(ref.at[at_h + i * half], x_h.astype(ref.dtype), mask=is_kept)


def attend(c: Context, left, layer, base, refs: TokenRefs, window):
    """Attend in one program per KV head and split of its keys; return `left` (see `poll`)."""
    plan, s = c.plan, c.plan.shape
    half, H, G = s.head_dim // 2, s.head_dim, s.heads // s.kv_heads
    part = key_range_of(c, refs, window)
    ahead = load_keys(c, refs, layer, part, 0)
    new, left = new_token(c, left, layer, base, refs, part)
    append(c, layer, refs, part, new)
    factor = s.scale * LOG2E
    tokens = jnp.maximum(part.end - part.begin, 0)

    def step(i, carry):
        loaded, softmaxes = carry
        more = load_keys(c, refs, layer, part, i + 1)
        inside_S = part.begin + i * plan.tokens + jnp.arange(plan.tokens) < part.end
        k_low, k_high, v_low, v_high = (x.astype(jnp.float32) for x in loaded)
        found = []
        for (q_low, q_high), (peak, total, *sums) in zip(new.queries, softmaxes):
            scores_S = (k_low * q_low[None] + k_high * q_high[None]).sum(1) * factor
            scores_S = jnp.where(inside_S, scores_S, -jnp.inf)
            above = jnp.maximum(peak, scores_S.max(0))
            share, p_S = jnp.exp2(peak - above), jnp.exp2(scores_S - above)
            p_S1 = rounded(p_S)[:, None]
            sums = [x * share + (p_S1 * v).sum(0) for x, v in zip(sums, (v_low, v_high))]
            found.append((above, total * share + p_S.sum(0), *sums))
        return more, tuple(found)

    # The new token is the first key of the first split.
    is_own = part.split == 0
    starts = []
    for q_low, q_high in new.queries:
        score = (q_low * new.key[0] + q_high * new.key[1]).sum(0) * factor
        one = jnp.where(is_own, jnp.float32(1), jnp.float32(0))
        sums = [one * x_h for x_h in new.value]
        starts.append((jnp.where(is_own, score, FLOOR), one, *sums))
    steps = jax.lax.div(tokens + (plan.tokens - 1), plan.tokens)
    _, found = jax.lax.fori_loop(0, steps, step, (ahead, tuple(starts)))
    h_h = jnp.arange(half)
    for g, (peak, total, *sums) in enumerate(found):
        unit = (part.k * G + g) * plan.splits + part.split
        at = base + plan.places["parts"] + unit * (2 * H)
        for i, sum_h in enumerate(sums):
            for side, word_h in zip((0, H), words_of(sum_h)):
                plgpu.store(c.slots.at[at + side + i * half + h_h], word_h)
        at = base + plan.places["stats"] + unit * 4
        for i, word in enumerate((*words_of(peak), *words_of(total))):
            c.slots[at + i] = word
    return left


def joins(c: Context) -> int:
    """Number of programs that join splits, each for JOINED channels of a head."""
    return c.plan.shape.heads * (c.plan.shape.head_dim // JOINED)


def join(c: Context, left, base):
    """Join the splits of a head to its output, for some channels; return `left` (see `poll`)."""
    plan, H = c.plan, c.plan.shape.head_dim
    blocks = H // JOINED
    n, block = jax.lax.div(c.program, blocks), jax.lax.rem(c.program, blocks)
    I = max(plan.padded_splits, THREADS // JOINED)
    i_I, h_1J = jnp.arange(I), jnp.arange(JOINED)[None]
    unit_I = n * plan.splits + i_I
    at_I1 = (base + plan.places["parts"] + unit_I * (2 * H) + block * JOINED)[:, None]
    stat_I1 = (base + plan.places["stats"] + unit_I * 4)[:, None]
    needed_I = i_I < plan.splits
    needed_IJ = needed_I[:, None] & (h_1J < JOINED)

    def read():
        places = [(at_I1, needed_IJ), (at_I1 + H, needed_IJ), (stat_I1, needed_IJ & (h_1J < 4))]
        words = [
            plgpu.load(c.slots.at[at + h_1J], mask=needed, other=1, volatile=True)
            for at, needed in places
        ]
        return words, [words[0] & words[1] & words[2]]

    (above, below, stats_IJ), left = poll(left, read, ((I, JOINED),) * 3)
    stats = [jnp.where(h_1J == i, stats_IJ, 0).sum(1) for i in range(4)]
    peak_I = jnp.where(needed_I, join_words(stats[0], stats[1]), FLOOR)
    share_I = jnp.where(needed_I, jnp.exp2(peak_I - peak_I.max(0)), 0.0)
    total = (share_I * join_words(stats[2], stats[3])).sum(0)
    y_J = (share_I[:, None] * join_words(above, below)).sum(0) / total
    at = base + plan.places["heads"] + n * H + block * JOINED
    plgpu.store(c.slots.at[at + jnp.arange(JOINED)], word_of(y_J))
    return left
