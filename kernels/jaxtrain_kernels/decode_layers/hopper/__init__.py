"""All layers of one sequence in one launch whose weights never stop streaming, for Hopper.

One block runs on each multiprocessor. One of its warps loads the weights of all layers, in the
order of use, into a ring of slots in shared memory (`ring`), also during attention and while the
blocks exchange the results of a phase (`exchange`). Its other warps compute (`block`, `attend`).

A layer's phases, with what they wait for: the queries, keys, values and gates, for the layer
before; attention to a split of a head's keys, for the head's; joining the splits of a head;
attention's output, for all heads; the network's two products.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jaxtrain_kernels import hopper
from jaxtrain_kernels.decode_layers.hopper.block import LayersBlock
from jaxtrain_kernels.decode_layers.hopper.order import ROWS, slot_shape, to_stream
from jaxtrain_kernels.decode_layers.hopper.plan import (
    SHARED_BYTES,
    LayersRefs,
    StreamedPlan,
)
from jaxtrain_kernels.decode_layers.packing import LayersShape, StreamedLayers
from jaxtrain_kernels.dispatch import Target

MOST_SPLITS = 12
FLIGHT = 4  # slots that are being loaded
RING_BYTES = 96 * 1024  # at least, in a kernel that serves
MOST_SCORE = 64  # of normed queries and keys: exponentials need no largest score
SPINS = 2**20  # reads of a vector, about a second, before a warp times out


def supports(target: Target, shape: LayersShape, x0_D: Any, pages: Any) -> str | None:
    """Return why this backend cannot serve the call; None = it can."""
    s = shape
    if reason := hopper.unsupported_reason(target):
        return reason
    for what, x in (("", x0_D), ("pages in ", pages[0]), ("pages in ", pages[1])):
        if x.dtype != jnp.bfloat16:
            return f"needs {what}bfloat16, got {x.dtype}"
    if s.head_dim != 128 or s.heads != s.kv_heads:
        return f"needs as many heads of keys as of queries, of 128 channels, got {s.kv_heads}"
    if s.width % 64 or s.hidden % 64 or slot_shape(s).warps < 4:
        return f"needs widths of 64 channels times 4 to 12 warps, got {s.width} and {s.hidden}"
    if s.scale * s.head_dim > MOST_SCORE:
        return f"needs scores up to {MOST_SCORE}, got a scale of {s.scale}"
    if s.width // ROWS < hopper.sm_count():
        return f"needs a width of {ROWS * hopper.sm_count()}, got {s.width}"
    if s.heads * (s.head_dim // 16) > hopper.sm_count():
        return f"needs at most {hopper.sm_count() // 8} heads, got {s.heads}"
    plan = plan_of(s, pages, 1, hopper.sm_count())
    if plan.turns > 1 and plan.slots * plan.slot.bytes < RING_BYTES:
        return f"has no ring of whole turns in a layer of width {s.width} and {s.hidden}"
    return None


def pack_matrices(
    s: LayersShape, matrices: Sequence[Sequence[Array]], scales_L2: Array
) -> StreamedLayers:
    """`decode_layers.pack_matrices` for this kernel."""
    pack = functools.partial(to_stream, slot_shape(s))
    qkv, out, up, down = (jnp.stack([pack(x) for x in one]) for one in matrices)
    return StreamedLayers(qkv, out, up, down, scales_L2)


def plan_of(
    s: LayersShape, pages: Any, table: int, blocks: int, spins: int = SPINS
) -> StreamedPlan:
    """The plan with as many slots as have room and whole turns in each layer, with as few spare
    units as make a ring of RING_BYTES or of a whole layer. table: length of the page table."""
    splits = max(2, min(blocks // s.heads, MOST_SPLITS))
    sizes = pages[0].shape[2], pages[0].shape[1], table
    plans = []
    for spare in range(4):
        plan = StreamedPlan(s, blocks, splits, spare, 0, 0, *sizes, spins)
        most = (SHARED_BYTES - sum(plan.shared_bytes)) // (plan.slot.bytes + 16)
        slots = max(n for n in range(1, most + 1) if plan.slots_of_layer % n == 0)
        plans.append(plan._replace(slots=slots, flight=min(FLIGHT, slots)))
        if slots * plan.slot.bytes >= RING_BYTES or plans[-1].turns == 1:
            return plans[-1]
    return max(plans, key=lambda plan: plan.slots)


def decode_layers(
    shape: LayersShape,
    weights: StreamedLayers,
    x0_D,
    cos_h,
    sin_h,
    values_LC,
    pages,
    table_W,
    start,
    count,
):
    """Backend of the public function."""
    plan = plan_of(shape, pages, len(table_W), hopper.sm_count())
    token = values_LC, *(x.astype(jnp.int32).reshape(1) for x in (start, count)), table_W
    states, timed_out, _, kept = launch(plan, weights, x0_D, cos_h, sin_h, *token, pages)
    return *states, kept, timed_out[0] > 0


@functools.partial(jax.jit, static_argnums=0)
def launch(
    plan: StreamedPlan, weights: StreamedLayers, x0_D, cos_h, sin_h, values_LC, start_1, count_1,
    table_W, pages,
) -> tuple[tuple[Array, Array], Array, Array, tuple[Array, Array]]:  # fmt: skip
    """The residual stream after the last and the middle layer, NaN after a timeout; whether there
    was one [1]; the words that the last layer exchanged; the pages."""
    windows = jnp.array(plan.shape.windows, jnp.int32)
    changed = jnp.zeros(plan.places["end"] // 4, jnp.int32), *pages
    changed = [jax.new_ref(x) for x in changed]
    token = x0_D, cos_h, sin_h, values_LC, start_1, count_1, table_W
    given = *token, windows, weights.scales_L2, *weights[:4], *changed

    def decode_layers(*refs):
        arguments = LayersRefs(*refs[:-1]), refs[-1]
        types = jax.tree.map(lambda _: plgpu.RefType(), arguments)

        def run(_, refs, memory):
            LayersBlock(plan, refs, memory).run()

        plgpu.inline_mgpu(arg_types=types)(run)(*arguments)

    last, middle, timed_out = hopper.pallas_kernel(
        decode_layers,
        out_type=[
            *[jax.ShapeDtypeStruct(x0_D.shape, x0_D.dtype)] * 2,
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        scratch_types=[plgpu.SMEM((sum(plan.shared_bytes) // 4,), jnp.int32)],
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(),
    )(*given)
    words, keys, values = map(jax.freeze, changed)
    return (last, middle), timed_out, words, (keys, values)
