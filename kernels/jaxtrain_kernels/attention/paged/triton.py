"""Attention over KV pages, read in place, in Pallas Triton: Ampere and newer.

A program reads one split of a sequence's keys and values of one KV head, each once, from the pages
in the page table. The queries of all new tokens, and of all heads that share the KV head, are the
rows of its matmuls. Each split has its own softmax; a second kernel joins the splits by their
log-sum-exp (flash-decoding). The splits divide the tokens that a sequence has, not the capacity of
its page table: a short sequence has short splits.

XLA compiles Pallas kernels like its own, so they can be part of a CUDA graph; jax-triton's kernels
cannot. Launches take most of the time of a small model's decoding. JAX plans to remove this backend
of Pallas.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.attention.decode import FLOOR, Quantized
from jaxtrain_kernels.attention.triton import chip
from jaxtrain_kernels.dispatch import Target, target, triton_unsupported

Ref = Any  # a kernel's reference to memory, for which Pallas has no public type
MOST_QUERIES = 64  # per KV head, in one program
PROCESSORS = 132  # multiprocessors (SMs) of a Hopper GPU
JOINED = 64  # splits that the join kernel reads per step
MANY_RESULTS = 2**13
LOG2E = math.log2(math.e)
# Four int8 become float16: x + 128 in the low mantissa bits of 1024, minus 1152.
FOUR_BYTES = """{
.reg .b32 bytes, high, more;
xor.b32 bytes, $2, 0x80808080;
mov.b32 high, 0x64646464;
mov.b32 more, 0x64806480;
prmt.b32 $0, bytes, high, 0x4140;
prmt.b32 $1, bytes, high, 0x4342;
sub.f16x2 $0, $0, more;
sub.f16x2 $1, $1, more;
}"""


class PageTile(NamedTuple):
    """Tokens that a program reads per step, and programs that share a sequence's KV head.

    warps and (software pipeline) stages: of the kernel that reads the keys.
    """

    tokens: int
    splits: int
    warps: int = 4
    stages: int = 6


class PagePlan(NamedTuple):
    """Compile-time constants of one call's kernels. rows: of a matmul, queries and padding."""

    tile: PageTile
    queries: int  # T * G; query t of head g is row t * G + g
    rows: int
    G: int
    columns: int  # channels of a head, and padding
    quantized: bool
    interpret: bool
    window: int | None
    factor: float  # from q k^T to a score in base 2; with a softcap, to its tanh's exponent
    softcap: float | None


def supports(on: Target, q_BTNH: Any, values_PpKH: Any) -> str | None:
    """Why this backend cannot serve the call; None = it can. values_PpKH: keys of the pages."""
    cc = on.compute_capability
    if reason := triton_unsupported(on):
        return reason
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {q_BTNH.dtype}"
    if values_PpKH.dtype == jnp.float8_e4m3fn and (cc is None or cc < (8, 9)):
        return f"needs compute capability 8.9 (Ada) for float8, this is {cc}"
    (N, H), K = q_BTNH.shape[2:], values_PpKH.shape[2]
    if N // K > MOST_QUERIES:
        return f"takes at most {MOST_QUERIES} heads of queries for one of keys, got {N // K}"
    if H > 256:
        return f"takes heads of at most 256, got {H}"
    size = values_PpKH.size
    if values_PpKH.dtype.itemsize == 1 and 2**31 < size <= 2**32:
        return f"Pallas has no right index of 8 bits for 2^31 to 2^32 of them, got {size}"
    return None


def tile_of(programs: int, tokens: int, bytes_each: int, results: int, kind: str) -> PageTile:
    """Choose the tile. programs: sequences * KV heads. tokens: most of a sequence. bytes_each: of a
    token's key. results: output size of the matmul with the values; a large one needs twice the
    registers. kind: size class of the chip's shared memory (`chip`).

    A step reads 32 KiB of keys and values, while the loads of two more steps are in flight. Two
    programs fit on a multiprocessor: the splits make one such wave, of at least two steps each.
    More sequences make more waves: then three programs with one step more in flight each read
    16-bit keys of 128 channels faster (64 x 4,096 by 19%), and 8-bit ones slower.

    So an H200 reads bf16 at 79% (2 x 16,384 tokens) to 96% (64 x 4,096) of a copy's rate, int8 at
    44% to 54%. No other step, number of warps or splits was faster (LOG.md).
    """
    many = results > MANY_RESULTS
    step = min(128, max(32, 2 ** round(math.log2(2**14 / bytes_each)))) // (1 + many)
    splits = min(max(1, tokens // (2 * step)), max(1, 2 * PROCESSORS // programs))
    waves = programs * splits > 2 * PROCESSORS and bytes_each >= 256 and not many
    # Because the page index is loaded first, Triton has (stages - 2) / 2 steps in flight.
    stages = 4 if kind == "small" or waves else 6
    return PageTile(step, splits, warps=8 if many else 4, stages=stages)


def paged_attention(
    q_BTNH: Any, k_PpKH: Any, v_PpKH: Any, table_BW: Any, starts_B: Any, counts_B: Any,
    *, window: int | None, softcap: float | None, scale: float, tile: PageTile | None = None,
    splits: int | None = None, interpret: bool = False,
) -> Any:  # fmt: skip
    """Backend of the public function. splits: override those of `tile_of`. interpret: on a CPU.

    If a sequence has more queries than a program takes, each block of them becomes a sequence.
    """
    (B, T, N, H), values = q_BTNH.shape, jax.tree.leaves(k_PpKH)[0]
    if T * N // values.shape[2] > MOST_QUERIES:
        t = max(1, MOST_QUERIES // (N // values.shape[2]))
        blocks = -(-T // t)
        q_BTNH = jnp.pad(q_BTNH, ((0, 0), (0, blocks * t - T), (0, 0), (0, 0)))
        before_1k = t * jnp.arange(blocks, dtype=starts_B.dtype)[None]
        counts_Bk = jnp.clip(counts_B[:, None] - before_1k, 0, t)
        y_btNH = paged_attention(
            q_BTNH.reshape(-1, t, N, H), k_PpKH, v_PpKH, jnp.repeat(table_BW, blocks, axis=0),
            (starts_B[:, None] + before_1k).reshape(-1), counts_Bk.reshape(-1), window=window,
            softcap=softcap, scale=scale, tile=tile, splits=splits, interpret=interpret,
        )  # fmt: skip
        return y_btNH.reshape(B, blocks * t, N, H)[:, :T]
    size, K = values.shape[1:3]
    queries, G = T * N // K, N // K
    rows, columns = (max(16, pl.next_power_of_2(x)) for x in (queries, H))
    if tile is None:
        tokens = table_BW.shape[1] * size
        if window is not None:
            tokens = min(tokens, window + T)
        kind = chip(target().compute_capability or (9, 0))
        tile = tile_of(B * K, tokens, H * values.dtype.itemsize, rows * columns, kind)
    if splits is not None:
        tile = tile._replace(splits=splits)
    factor = scale * LOG2E if softcap is None else 2 * scale * LOG2E / softcap
    quantized = isinstance(k_PpKH, Quantized)
    plan = PagePlan(tile, queries, rows, G, columns, quantized, interpret, window, factor, softcap)
    out = jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype)
    if tile.splits == 1:
        partial = out
    else:
        each = (B, K, tile.splits, queries)
        partial = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*each, H), each)]
    arrays = [q_BTNH, *jax.tree.leaves((k_PpKH, v_PpKH)), table_BW, starts_B, counts_B]
    partial = pl.pallas_call(
        functools.partial(paged_attention_split, plan),
        out_shape=partial,
        grid=(K, tile.splits, B),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="paged_attention",
    )(*arrays)
    if tile.splits == 1:
        return partial
    return pl.pallas_call(
        functools.partial(paged_attention_join, plan),
        out_shape=out,
        grid=(K, queries, B),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="paged_attention_join",
    )(*partial)


def decode_attention(
    q_BNH: Any, k_BSKH: Any, v_BSKH: Any, lengths_B: Any,
    *, window: int | None, softcap: float | None, scale: float, splits: int | None,
    interpret: bool = False,
) -> Any:  # fmt: skip
    """Backend of the public `decode_attention`: each sequence's cache is one page."""
    table_B1 = jnp.arange(len(q_BNH), dtype=jnp.int32)[:, None]
    counts_B = jnp.minimum(lengths_B, 1)
    return paged_attention(
        q_BNH[:, None], k_BSKH, v_BSKH, table_B1, lengths_B - counts_B, counts_B, window=window,
        softcap=softcap, scale=scale, splits=splits, interpret=interpret,
    )[:, 0]  # fmt: skip


class PageRow(NamedTuple):
    """A program's sequence, and the query and channel of each row and column of its tile."""

    b: jax.Array
    k: jax.Array
    start: jax.Array
    count: jax.Array
    end: jax.Array  # one past its last key
    t_R: jax.Array
    n_R: jax.Array
    h_C: jax.Array


def paged_attention_split(plan: PagePlan, q_ref: Ref, *refs: Ref) -> None:
    """Kernel with one program per KV head, split and sequence."""
    arrays = 4 if plan.quantized else 2
    kv_refs, (table_ref, starts_ref, counts_ref, *out_refs) = refs[:arrays], refs[arrays:]
    k, split, b = (pl.program_id(i) for i in range(3))
    r_R, h_C = jnp.arange(plan.rows), jnp.arange(plan.columns)
    t_R, n_R = jax.lax.div(r_R, plan.G), k * plan.G + jax.lax.rem(r_R, plan.G)
    start, count = starts_ref[b], counts_ref[b]
    capacity = table_ref.shape[1] * kv_refs[0].shape[1]
    end = jnp.where(count > 0, jnp.minimum(start + count, capacity), 0)
    row = PageRow(b, k, start, count, end, t_R, n_R, h_C)
    H = q_ref.shape[-1]
    real_RC = (r_R < plan.queries)[:, None] & (h_C < H)[None]
    q_RC = plgpu.load(q_ref.at[b, t_R[:, None], n_R[:, None], h_C[None]], mask=real_RC, other=0.0)
    factor_R1 = plan.factor
    if plan.quantized and q_RC.dtype != jnp.float32:
        q_RC, factor_R1 = _as_float16(plan, q_RC)
    step = functools.partial(_step, plan, row, q_RC, factor_R1, kv_refs, table_ref)
    first, last = _steps(plan, row, split)
    nothing = (
        jnp.full([plan.rows], FLOOR, jnp.float32),
        jnp.zeros([plan.rows], jnp.float32),
        jnp.zeros([plan.rows, plan.columns], jnp.float32),
    )
    peak_R, total_R, sum_RC = jax.lax.fori_loop(first, last, step, nothing)
    out_RC = sum_RC / jnp.where(total_R == 0, 1, total_R)[:, None]
    if plan.tile.splits == 1:
        (out_ref,) = out_refs
        out_at = out_ref.at[b, t_R[:, None], n_R[:, None], h_C[None]]
        plgpu.store(out_at, out_RC.astype(out_ref.dtype), mask=real_RC)
        return
    out_ref, lse_ref = out_refs
    plgpu.store(out_ref.at[b, k, split, r_R[:, None], h_C[None]], out_RC, mask=real_RC)
    lse_R = jnp.where(total_R == 0, FLOOR, peak_R + jnp.log2(total_R))
    plgpu.store(lse_ref.at[b, k, split, r_R], lse_R, mask=r_R < plan.queries)


def _steps(plan: PagePlan, row: PageRow, split: jax.Array) -> tuple[Any, Any]:
    """First step of the split, and one past its last step."""
    size = plan.tile.tokens
    last = jax.lax.div(row.end + (size - 1), size)
    first = 0
    if plan.window is not None:
        first = jax.lax.div(jnp.maximum(row.start - plan.window, 0), size)
    each = jax.lax.div(jnp.maximum(last - first, 0) + (plan.tile.splits - 1), plan.tile.splits)
    first += split * each
    return first, jnp.minimum(first + each, last)


def _as_float16(plan: PagePlan, q_RC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries in float16, scaled to at most 1, and the factor from their products to scores."""
    wide_RC = q_RC.astype(jnp.float32)
    largest_R1 = jnp.abs(wide_RC).max(1)[:, None]
    q_RC = wide_RC / jnp.where(largest_R1 == 0, 1, largest_R1)
    return q_RC.astype(jnp.float16), plan.factor * largest_R1


def _step(
    plan: PagePlan,
    row: PageRow,
    q_RC: jax.Array,
    factor_R1: jax.Array | float,
    kv_refs: tuple[Ref, ...],
    table_ref: Ref,
    i: jax.Array | int,
    carry: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add the keys and values of one step's tokens to the online softmax."""
    k_ref, v_ref = kv_refs[:: 2 if plan.quantized else 1]
    size, H = k_ref.shape[1], k_ref.shape[-1]
    s_S = i * plan.tile.tokens + jnp.arange(plan.tile.tokens)
    inside_S = s_S < row.end
    page_S = plgpu.load(table_ref.at[row.b, jax.lax.div(s_S, size)], mask=inside_S, other=0)
    slot_S = jax.lax.rem(s_S, size)
    inside_SC = inside_S[:, None] & (row.h_C < H)[None]

    def read(ref: Ref) -> jax.Array:
        values_at = ref.at[page_S[:, None], slot_S[:, None], row.k, row.h_C[None]]
        zero = jnp.zeros((), ref.dtype)
        x_SC = plgpu.load(values_at, mask=inside_SC, other=zero)
        if x_SC.dtype == jnp.int8 and not plan.interpret:
            return _bytes_to_float16(x_SC)
        return x_SC.astype(q_RC.dtype)

    def scales(ref: Ref) -> jax.Array:
        return plgpu.load(ref.at[page_S, slot_S, row.k], mask=inside_S, other=0.0)[None]

    peak_R, total_R, sum_RC = carry
    s_RS = _dot(q_RC, read(k_ref), 1) * factor_R1
    if plan.quantized:
        s_RS *= scales(kv_refs[1])
    if plan.softcap is not None:
        tanh_RS = 1 - 2 / (1 + jnp.exp2(s_RS))
        s_RS = tanh_RS * (plan.softcap * LOG2E)
    place_R1 = (row.start + row.t_R)[:, None]
    visible_RS = (s_S[None] <= place_R1) & (row.t_R < row.count)[:, None]
    if plan.window is not None:
        visible_RS &= s_S[None] >= place_R1 - plan.window
    s_RS = jnp.where(visible_RS, s_RS, -jnp.inf)
    new_peak_R = jnp.maximum(peak_R, s_RS.max(1))
    p_RS = jnp.exp2(s_RS - new_peak_R[:, None])
    share_R = jnp.exp2(peak_R - new_peak_R)
    total_R = total_R * share_R + p_RS.sum(1)
    v_SC, largest = read(v_ref), 1.0
    if plan.quantized:
        v_SC = _in_rows(v_SC)
        scale_1S = scales(kv_refs[3])
        largest = scale_1S.max()
        p_RS *= scale_1S / jnp.where(largest == 0, 1, largest)
    sum_RC = sum_RC * share_R[:, None] + _dot(p_RS.astype(q_RC.dtype), v_SC, 0) * largest
    return new_peak_R, total_R, sum_RC


def _in_rows(x_SC: jax.Array) -> jax.Array:
    """Identity that splits and joins pairs of columns, which keeps a thread's bytes contiguous.

    Without it Triton reads bytes from shared memory one by one, in the order of the matmul's
    registers, before it converts them.
    """
    S, C = x_SC.shape
    pair = jax.lax.split(x_SC.reshape(S, C // 2, 2), (1, 1), axis=2)
    return jax.lax.concatenate(pair, 2).reshape(S, C)


def _bytes_to_float16(x_SC: jax.Array) -> jax.Array:
    """Convert int8 in 1.25 instructions per value; Triton's conversion takes 2.5."""
    (out_SC,) = plgpu.elementwise_inline_asm(
        FOUR_BYTES, args=[x_SC], constraints="=r,=r,r", pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x_SC.shape, jnp.float16)],
    )  # fmt: skip
    return out_SC


def _dot(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Matmul with float32 accumulation; float32 inputs are multiplied without TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())), precision, preferred_element_type=jnp.float32
    )


def paged_attention_join(plan: PagePlan, parts_ref: Ref, lse_ref: Ref, out_ref: Ref) -> None:
    """Kernel with one program per KV head, query and sequence."""
    k, r, b = (pl.program_id(i) for i in range(3))
    splits, H = plan.tile.splits, out_ref.shape[-1]
    every_I, i_I = (jnp.arange(pl.next_power_of_2(n)) for n in (splits, min(splits, JOINED)))
    h_C = jnp.arange(plan.columns)

    def lse(i_I: jax.Array) -> jax.Array:
        return plgpu.load(lse_ref.at[b, k, i_I, r], mask=i_I < splits, other=-jnp.inf)

    peak = lse(every_I).max(0)

    def step(i: jax.Array | int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, sum_C = carry
        of_I = i * JOINED + i_I
        share_I = jnp.exp2(lse(of_I) - peak)
        parts_IC = plgpu.load(
            parts_ref.at[b, k, of_I[:, None], r, h_C[None]],
            mask=(of_I < splits)[:, None] & (h_C < H)[None],
            other=0.0,
        )
        return total + share_I.sum(0), sum_C + (parts_IC * share_I[:, None]).sum(0)

    start = jnp.float32(0), jnp.zeros([plan.columns], jnp.float32)
    total, sum_C = jax.lax.fori_loop(0, -(-splits // JOINED), step, start)
    out_C = sum_C / total
    out_at = out_ref.at[b, jax.lax.div(r, plan.G), k * plan.G + jax.lax.rem(r, plan.G), h_C]
    plgpu.store(out_at, out_C.astype(out_ref.dtype), mask=h_C < H)
