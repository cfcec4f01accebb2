"""Consecutive products of a few rows in one kernel, whose codes never stop streaming, for Hopper.

One block runs on each multiprocessor. Some of its warps load codes into a ring of slots in shared
memory (`ring`), also while the blocks exchange the results of one product, which are the inputs of
the next. Most of its warps multiply (`block`): each has different inputs. The others add their sums
(`finish`), and write results where all blocks find them (`exchange`). A product's columns are in
panels (`order`), of which a block has adjacent ones.

A load takes about 1,000 ns and a multiprocessor reads 32 bytes a ns, so 32 KB in flight suffice.
With all of a ring of 192 KB in flight the stores and reads of an exchange took 4,000 ns, as they
queue behind; the ring is large because it takes what arrives during an exchange.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target, mesh_devices
from jaxtrain_kernels.hopper.emit import address
from jaxtrain_kernels.matmul.streamed.block import StreamBlock, StreamRefs
from jaxtrain_kernels.matmul.streamed.order import HALVES_INPUTS
from jaxtrain_kernels.matmul.streamed.plan import (
    FINISHERS,
    LOADERS,
    Arrays,
    Memory,
    PhaseRefs,
    StreamPhase,
    StreamPlan,
)  # fmt: skip

MOST_ROWS = 8
SHARED_BYTES = 224 * 1024  # of a block, for slots and sums
# Copies of 8 KB that a loader has in flight during an exchange, and else. With 5 and more rows the
# inputs, which each multiprocessor reads, queue behind codes all the time.
FLIGHT = 2, 4
FLIGHT_OF_MANY_ROWS = {"int8": (2, 3), "int4": (2, 2)}


def supports(on: Target, x: Any, phases: Sequence[StreamPhase]) -> str | None:
    """Return why the kernel cannot run; None = it can."""
    if reason := hopper.unsupported_reason(on):
        return reason
    if (devices := mesh_devices()) > 1:
        return f"has no partitioning rule, and the mesh has {devices} devices"
    if len(x) > MOST_ROWS or x.dtype != jnp.bfloat16:
        return f"needs up to {MOST_ROWS} rows in bfloat16, got {len(x)} in {x.dtype}"
    for p in phases:
        if p.K % HALVES_INPUTS or p.N % p.panel_columns:
            return (
                f"needs inputs in multiples of {HALVES_INPUTS} and columns in multiples of"
                f" {p.panel_columns}, got {p.K} and {p.N}"
            )
        if p.turns > 1 and p.normed:
            return f"norms 2,048 or 4,096 inputs, got {p.K}"
    return None


def plan_of(
    form: str, rows: int, phases: tuple[StreamPhase, ...], blocks: int, eps: float
) -> StreamPlan:
    """The plan with as many slots as shared memory has room for."""
    plan = StreamPlan(form, rows, phases, blocks, 0, (0, 0), eps)
    plan = plan._replace(flight=FLIGHT if rows <= 4 else FLIGHT_OF_MANY_ROWS[form])
    slots = (SHARED_BYTES - plan.shared_offsets[-1]) // (plan.warps * plan.slot_bytes)
    return plan._replace(slots=slots)


def streamed_products(
    form: str,
    x: jax.Array,
    stream: jax.Array,
    phases: tuple[StreamPhase, ...],
    arrays: Sequence[Arrays],
    eps: float,
) -> list[jax.Array]:
    """Backend of the public function. arrays: codes, scales and gain of each phase."""
    plan = plan_of(form, len(x), phases, hopper.sm_count(), eps)
    exchanged = jnp.full((plan.exchange_words,), -1, jnp.int32)
    cast = lambda gain: None if gain is None else gain.astype(x.dtype)
    given = [(codes, scales, cast(gain)) for codes, scales, gain in arrays]
    return call_streamed(plan, x, stream, exchanged, given)


@functools.partial(jax.jit, static_argnums=0)
def call_streamed(
    plan: StreamPlan,
    x: jax.Array,
    stream: jax.Array,
    exchanged: jax.Array,
    arrays: list[Arrays],
) -> list[jax.Array]:
    """Results [M, _] of all phases in order. All calls of a plan share one trace and one kernel."""
    flat, tree = jax.tree.flatten(arrays)
    count, sizes = len(flat), [N for p in plan.phases for N in p.outputs]

    def streamed_products(x_ref, stream_ref, exchanged_ref, *refs):
        given, rest = [], list(refs[count:-1])
        for phase, triple in zip(plan.phases, tree.unflatten(refs[:count]), strict=True):
            codes, scales, gain = triple
            given.append(PhaseRefs(codes, scales, gain, [rest.pop(0) for _ in phase.outputs]))
        arguments = x_ref, stream_ref, exchanged_ref, given, refs[-1]
        types = jax.tree.map(lambda _: plgpu.RefType(), arguments)

        def run(_, x_ref, stream_ref, exchanged_ref, given, memory):
            operands = StreamRefs(x_ref, x.shape[-1], stream_ref, exchanged_ref, given)
            parts = [address(memory) + at for at in plan.shared_offsets[:-1]]
            StreamBlock(plan, operands, Memory(*parts)).run()

        plgpu.inline_mgpu(arg_types=types)(run)(*arguments)

    return hopper.pallas_kernel(
        streamed_products,
        out_type=[jax.ShapeDtypeStruct((plan.rows, N), x.dtype) for N in sizes],
        scratch_types=[plgpu.SMEM((plan.shared_offsets[-1] // 4,), jnp.int32)],
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=(plan.warps + LOADERS + FINISHERS) // 4,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
    )(x, stream, exchanged, *flat)
