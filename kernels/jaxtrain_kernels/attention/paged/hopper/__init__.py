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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.decode import Quantized
from jaxtrain_kernels.attention.paged.hopper.block import PageBlock, PageRefs
from jaxtrain_kernels.attention.paged.hopper.plan import HEAD, Memory, PagePlan
from jaxtrain_kernels.dispatch import Target, mesh_devices

MOST_QUERIES = 8  # of a KV head: columns of a matmul
MOST_HEADS = 16
MOST_SEQUENCES = 1024
SHARED_BYTES = 220 * 1024
LOG2E = math.log2(math.e)


def supports(on: Target, q_BTNH: Any, values_PpKH: Any, softcap: float | None) -> str | None:
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


def plan_of(q_BTNH: Any, values_PpKH: Any, window: int | None, scale: float, per: int) -> PagePlan:
    """The plan with as many slots as shared memory has room for. per: blocks of each SM."""
    (B, _, N, _), (_, size, K, _) = q_BTNH.shape, values_PpKH.shape
    quantized = values_PpKH.dtype == jnp.int8
    tokens = 32 if quantized and size % 32 == 0 and per == 1 else 16
    blocks = hopper.sm_count() * per
    plan = PagePlan(B, K, N // K, size, tokens, quantized, blocks, 0, window, scale * LOG2E)
    rest = sum(plan.shared_bytes)
    return plan._replace(slots=(SHARED_BYTES // per - rest - 1024 * (per - 1)) // plan.slot_bytes)


def paged_attention(
    q_BTNH: Any, k_PpKH: Any, v_PpKH: Any, table_BW: Any, starts_B: Any, counts_B: Any,
    *, window: int | None, softcap: float | None, scale: float, per: int = 1,
) -> Any:  # fmt: skip
    """Backend of the public function."""
    assert softcap is None
    values = k_PpKH.values_BSKH if isinstance(k_PpKH, Quantized) else k_PpKH
    plan = plan_of(q_BTNH, values, window, scale, per)
    counters = jnp.zeros((len(q_BTNH),), jnp.int32)
    numbers = (x.astype(jnp.int32) for x in (table_BW, starts_B, counts_B))
    return call_paged(plan, q_BTNH, k_PpKH, v_PpKH, *numbers, counters)


@functools.partial(jax.jit, static_argnums=0)
def call_paged(
    plan: PagePlan, q_BTNH: Any, k_PpKH: Any, v_PpKH: Any, table_BW: Any, starts_B: Any,
    counts_B: Any, counters_B: Any,
) -> Any:  # fmt: skip
    """All calls of a plan share one trace and one kernel."""
    pages = jax.tree.leaves((k_PpKH, v_PpKH))
    W, N = table_BW.shape[1], plan.K * plan.G

    def paged_attention(*refs, **memory):
        def run(_, refs, memory):
            q, *rest = refs
            kv = rest[: len(pages)] if plan.quantized else [rest[0], None, rest[1], None]
            operands = PageRefs(q, *kv, *rest[len(pages) :], W)
            PageBlock(plan, operands, memory).run()

        arguments = refs, Memory(**memory)
        types = jax.tree.map(lambda _: plgpu.RefType(), arguments)
        plgpu.inline_mgpu(arg_types=types)(run)(*arguments)

    sizes = plan.shared_bytes
    scratch = {
        name: plgpu.SMEM((size // 4,), jnp.int32)
        for name, size in zip(Memory._fields, sizes, strict=True)
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
