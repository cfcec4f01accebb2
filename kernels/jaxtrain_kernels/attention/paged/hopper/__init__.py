"""Attention of one new token per sequence over KV pages, whose loads never stop, for Hopper.

One block runs on each multiprocessor. The tiles of all sequences, some tokens with all KV heads
each, are in one list, of which each block has an equal part: the end of one sequence, whole ones,
and the start of another (flash-decoding). One warp loads keys and values, alternately, into a ring
of slots in shared memory. Each other warp has one KV head (`block`).

A block that has only a part of a sequence writes its unnormalized sum to device memory. The blocks
of a sequence then wait for each other by a counter, and each joins the parts of some heads.
Counters are zeros before and after a call.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.decode import Quantized
from jaxtrain_kernels.attention.paged.hopper.block import PageBlock
from jaxtrain_kernels.attention.paged.hopper.plan import HEAD, PageMemory, PageRefs, PageStreamPlan
from jaxtrain_kernels.attention.paged.xla import Pages
from jaxtrain_kernels.dispatch import Target, mesh_devices

MOST_QUERIES = 8  # of a KV head: columns of a matmul
MOST_HEADS = 16
MOST_SEQUENCES = 1024
MOST_OF_TWO = 7  # heads: 8 warps with the one that loads, of 128 registers a thread
SHARED_BYTES = 220 * 1024
Shaped = jax.Array | jax.ShapeDtypeStruct
LOG2E = math.log2(math.e)
# Bytes of a full cache from which on it was measured to be faster than Triton's kernel.
LEAST_BYTES = {"bfloat16": 10**9, "int8": 3 * 10**7}
MEASURED_HEADS = 6, 8


def slower(values_PpKH: Shaped, capacity: int) -> str | None:
    """Why Triton's kernel is the better choice; None = it is not. values_PpKH: keys of the pages.
    capacity: tokens of all sequences in the page table.

    A call takes about 10 us beside its loads, while the blocks find their tiles and join.
    """
    K, dtype = values_PpKH.shape[2], values_PpKH.dtype
    size, least = 2 * capacity * K * HEAD * dtype.itemsize, LEAST_BYTES[dtype.name]
    low, high = MEASURED_HEADS
    if size < least or not low <= K <= high:
        return (
            f"is faster from {least:,} bytes of keys and values on, with {low} to {high} heads, got"
            f" {size:,} and {K}"
        )
    return None


def supports(on: Target, q_BTNH: Shaped, values_PpKH: Shaped, softcap: float | None) -> str | None:
    """Why this backend cannot serve the call; None = it can. values_PpKH: keys of the pages."""
    if reason := hopper.unsupported_reason(on):
        return reason
    if (devices := mesh_devices()) > 1:
        return f"has no partitioning rule, and the mesh has {devices} devices"
    (B, T, N, H), (_, size, K, _) = q_BTNH.shape, values_PpKH.shape
    if q_BTNH.dtype != jnp.bfloat16 or values_PpKH.dtype not in (jnp.bfloat16, jnp.int8):
        return f"needs bfloat16, and pages in it or int8, got {q_BTNH.dtype}, {values_PpKH.dtype}"
    if T != 1 or H != HEAD or softcap is not None:
        return f"needs one token, heads of {HEAD} and no softcap, got {T} and {H}"
    if N // K > MOST_QUERIES or K > MOST_HEADS or B > MOST_SEQUENCES or size % 16:
        return (
            f"needs up to {MOST_QUERIES} queries of up to {MOST_HEADS} heads, up to"
            f" {MOST_SEQUENCES} sequences and pages in multiples of 16 tokens, got"
            f" {N // K}, {K}, {B} and {size}"
        )
    return None


def blocks_each(values_PpKH: Shaped) -> int:
    """Blocks of each multiprocessor: two in int8, which is bound by the warps' latencies, if
    registers of both fit, as blocks wait for each other."""
    return 2 if values_PpKH.dtype == jnp.int8 and values_PpKH.shape[2] <= MOST_OF_TWO else 1


def plan_of(
    q_BTNH: Shaped, values_PpKH: Shaped, window: int | None, scale: float, per: int
) -> PageStreamPlan:
    """The plan with as many slots as shared memory has room for. per: blocks of each
    multiprocessor."""
    (B, _, N, _), (_, size, K, _) = q_BTNH.shape, values_PpKH.shape
    quantized = values_PpKH.dtype == jnp.int8
    tokens = 32 if quantized and size % 32 == 0 and per == 1 else 16
    blocks = hopper.sm_count() * per
    plan = PageStreamPlan(B, K, N // K, size, tokens, quantized, blocks, 0, window, scale * LOG2E)
    ring = SHARED_BYTES // per - 1024 * (per - 1) - sum(plan.shared_bytes)
    return plan._replace(slots=ring // plan.slot_bytes)


def paged_attention(
    q_BTNH: jax.Array, k_PpKH: Pages, v_PpKH: Pages, table_BW: jax.Array, starts_B: jax.Array,
    counts_B: jax.Array, *, window: int | None, softcap: float | None, scale: float,
) -> jax.Array:  # fmt: skip
    """Backend of the public function. softcap: None, see `supports`."""
    values = k_PpKH.values_BSKH if isinstance(k_PpKH, Quantized) else k_PpKH
    plan = plan_of(q_BTNH, values, window, scale, blocks_each(values))
    counters = jnp.zeros((len(q_BTNH),), jnp.int32)
    numbers = (x.astype(jnp.int32) for x in (table_BW, starts_B, counts_B))
    return call_paged(plan, q_BTNH, k_PpKH, v_PpKH, *numbers, counters)


@functools.partial(jax.jit, static_argnums=0)
def call_paged(
    plan: PageStreamPlan, q_BTNH: jax.Array, k_PpKH: Pages, v_PpKH: Pages, table_BW: jax.Array,
    starts_B: jax.Array, counts_B: jax.Array, counters_B: jax.Array,
) -> jax.Array:  # fmt: skip
    """All calls of a plan share one trace and one kernel."""
    pages = jax.tree.leaves((k_PpKH, v_PpKH))
    W, N = table_BW.shape[1], plan.K * plan.G

    def paged_attention(*refs, **memory):
        def run(_, refs, memory):
            q, *rest = refs
            kv, rest = rest[: len(pages)], rest[len(pages) :]
            k, k_scale, v, v_scale = kv if plan.quantized else (kv[0], None, kv[1], None)
            table, starts, counts, counters, out, sums, stats = rest
            operands = PageRefs(
                q, k, k_scale, v, v_scale, table, starts, counts, counters, out, sums, stats, W
            )
            PageBlock(plan, operands, memory).run()

        arguments = refs, PageMemory(**memory)
        types = jax.tree.map(lambda _: plgpu.RefType(), arguments)
        plgpu.inline_mgpu(arg_types=types)(run)(*arguments)

    sizes = plan.shared_bytes
    scratch = {
        name: plgpu.SMEM((size // 4,), jnp.int32)
        for name, size in zip(PageMemory._fields, sizes, strict=True)
    }
    each = 2 * plan.blocks, N
    out, *_ = hopper.pallas_kernel(
        paged_attention,
        out_type=[
            jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype),
            jax.ShapeDtypeStruct((*each, HEAD), jnp.float32),
            jax.ShapeDtypeStruct((*each, 2), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
    )(q_BTNH, *pages, table_BW, starts_B, counts_B, counters_B)
    return out
