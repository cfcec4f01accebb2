"""Consecutive products of a few rows in one kernel, whose codes never stop streaming, for Hopper.

One block runs on each multiprocessor. Each of its warps has a ring of slots in shared memory, and
asks for another slot's codes as soon as it has used a slot (`ring`). So while the blocks exchange
the results of one product, which are the inputs of the next, the codes of the next arrive.

A product's columns are in panels (`order`); a block has adjacent panels, and its warps have
different inputs, which they keep in registers (`block`). The exchange: all blocks write their
columns to device memory, then increment a counter of the product, and wait until it has all
increments. Counters are zeros before and after a call: the last block to end resets them.

A load of 4 KB takes about 1,000 ns and a multiprocessor reads 32 bytes a ns, so 32 KB in flight
suffice; the rest of a ring of 192 KB is what arrives during 5,000 ns of an exchange.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target, mesh_devices
from jaxtrain_kernels.matmul.streamed.block import Block, Operands
from jaxtrain_kernels.matmul.streamed.order import SLOT_INPUTS
from jaxtrain_kernels.matmul.streamed.plan import (
    COUNTERS, WARPS, Memory, Phase, PhaseRefs, StreamPlan,
)  # fmt: skip

MOST_ROWS = 8
SHARED_BYTES = 220 * 1024  # of a block, for slots and sums
MOST_SLOTS = 12


def supports(on: Target, form: str, x: Any, phases: Sequence[Phase]) -> str | None:
    """Return why the kernel cannot run; None = it can."""
    if reason := hopper.unsupported_reason(on):
        return reason
    if (devices := mesh_devices()) > 1:
        return f"has no partitioning rule, and the mesh has {devices} devices"
    if len(x) > MOST_ROWS or x.dtype != jnp.bfloat16:
        return f"needs up to {MOST_ROWS} rows in bfloat16, got {len(x)} in {x.dtype}"
    for p in phases:
        if p.K % (SLOT_INPUTS * WARPS) or p.N % p.panel_columns:
            return (
                f"needs inputs in multiples of {SLOT_INPUTS * WARPS} and columns in multiples of"
                f" {p.panel_columns}, got {p.K} and {p.N}"
            )
        if p.across > 1 and p.normed:
            return f"norms up to 4,096 inputs, got {p.K}"
    if len(phases) > COUNTERS:
        return f"has {COUNTERS} counters, and there are {len(phases)} products"
    return None


def slots_of(plan: StreamPlan) -> int:
    """Most slots of a warp that shared memory has room for."""
    sums = max(map(plan.most_slots, plan.phases)) * WARPS * plan.sums_bytes
    return min(MOST_SLOTS, (SHARED_BYTES - sums) // (WARPS * plan.slot_bytes))


def streamed_products(
    form: str,
    x: jax.Array,
    stream: jax.Array,
    phases: tuple[Phase, ...],
    arrays: Sequence[tuple[jax.Array | None, ...]],
    eps: float,
    following: tuple[jax.Array, ...],
) -> list[jax.Array]:
    """Backend of the public function. arrays: codes, scales and gain of each phase."""
    plan = StreamPlan(form, len(x), phases, hopper.sm_count(), 0, eps)
    plan = plan._replace(slots=slots_of(plan))
    plan = plan._replace(ahead=plan.slots if following else 0)
    counters = jnp.zeros((COUNTERS, 32), jnp.int32)
    cast = lambda gain: None if gain is None else gain.astype(x.dtype)
    given = [(codes, scales, cast(gain)) for codes, scales, gain in arrays]
    return call(plan, x, stream, counters, given, following)


@functools.partial(jax.jit, static_argnums=0)
def call(
    plan: StreamPlan,
    x: jax.Array,
    stream: jax.Array,
    counters: jax.Array,
    arrays: list[tuple[jax.Array | None, ...]],
    following: tuple[jax.Array, ...],
) -> list[jax.Array]:
    """Results [M, outputs] of each phase. All calls of a plan share one trace and one kernel."""
    flat, tree = jax.tree.flatten((arrays, following))
    count = len(flat)

    def streamed_products(x_ref, stream_ref, counters_ref, *refs, **memory):
        of_phases, next_codes = tree.unflatten(refs[:count])
        given = [PhaseRefs(*each, out) for each, out in zip(of_phases, refs[count:], strict=True)]
        arguments = x_ref, stream_ref, counters_ref, given, next_codes, Memory(**memory)
        types = jax.tree.map(lambda _: plgpu.RefType(), arguments)

        def run(_, x_ref, stream_ref, counters_ref, given, next_codes, memory):
            operands = Operands(
                x_ref, x.shape[-1], stream_ref, counters_ref, given, next_codes
            )
            Block(plan, operands, memory).run()

        plgpu.inline_mgpu(arg_types=types)(run)(*arguments)

    scratch = {
        name: plgpu.SMEM((size // 4,), jnp.int32)
        for name, size in zip(Memory._fields, plan.shared_bytes, strict=True)
    }
    return hopper.pallas_kernel(
        streamed_products,
        out_type=[jax.ShapeDtypeStruct((plan.rows, p.outputs), x.dtype) for p in plan.phases],
        scratch_types=scratch,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
    )(x, stream, counters, *flat)
