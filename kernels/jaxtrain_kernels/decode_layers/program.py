"""Complete kernel of `decode_layers`: the loop over the layers, and the launch."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.decode_layers.attend import TokenRefs, attend, join, joins
from jaxtrain_kernels.decode_layers.kernel import (
    COLUMNS,
    THREADS,
    WARPS,
    Context,
    LayersPlan,
    Product,
    add_inputs,
    load_ahead,
    multiply,
    norm_inputs,
    parts_of,
    prefetch,
    read_vector,
    rounded,
    tile_places,
)
from jaxtrain_kernels.decode_layers.packing import ROWS, PackedLayers

RELU2 = lambda y: jnp.where(rounded(y) > 0, rounded(y) * rounded(y), 0.0)
SAME = lambda y: y


def run_layers_kernel(plan: LayersPlan, *refs: Any) -> None:
    """Kernel body: one program per multiprocessor."""
    s, L = plan.shape, plan.shape.depth
    x0_ref, turns_ref, values_ref, place_ref, table_ref, windows_ref, scales_ref = refs[:7]
    matrices, (states_ref, status_ref, slots_ref, *pages) = refs[7:11], refs[14:]
    program = pl.program_id(0)
    c = Context(plan, slots_ref, program)
    token = TokenRefs(turns_ref, values_ref, table_ref, place_ref, *pages)
    qkv, out, up, down = products_of(plan, matrices)
    offsets, half = plan.places, s.width // 2
    at_halves = [
        [(side + first * COLUMNS) + tile_places(size) for first, size in parts_of(half)]
        for side in (0, half)
    ]
    load_x0 = lambda: tuple(tuple(plgpu.load(x0_ref.at[at]) for at in side) for side in at_halves)

    def keep(x, layer):
        """Store the residual stream after attention of the middle and last layer, in program 0."""
        begin = jnp.where(layer == s.middle, jnp.int32(s.width), jnp.int32(0))

        def write():
            for side, at_side in zip(x, at_halves):
                for part, at in zip(side, at_side):
                    plgpu.store(states_ref.at[begin + at], part)

        pl.when((program == 0) & ((layer == s.middle) | (layer == L - 1)))(write)

    def only(programs, index, run, left):
        """Call run(context, left) in the programs whose index is below `programs`."""
        return jax.lax.cond(
            index < programs, lambda: run(c._replace(program=index), left), lambda: left
        )

    def total(left, layer, x):
        """Return the residual stream after a layer, with the layer's branch added."""
        begin = layer * offsets["end"] + offsets["down"]
        inputs, left = read_vector(c, left, begin, s.width)
        return add_inputs(x, inputs), left

    def layer_step(layer, carry):
        left, x, ahead, touched = carry
        base = layer * offsets["end"]
        more = load_ahead(c, out, layer)
        # What the phase needs beside its input is read before the wait.
        window, x0 = windows_ref[layer], load_x0()
        a, b = scales_ref[layer, 0], scales_ref[layer, 1]
        x, left = jax.lax.cond(layer > 0, lambda: total(left, layer - 1, x), lambda: (x, left))
        x = tuple(
            tuple(rounded(a * part + b * first) for part, first in zip(half, firsts))
            for half, firsts in zip(x, x0)
        )
        # Attention reads little, so the memory has time for the matrix after the next.
        prefetch(c, up, layer)
        multiply(c, qkv, layer, ahead[0], norm_inputs(c, x), base + offsets["qkv"], SAME)
        touched = use(touched, ahead[1])
        # 0, read from memory: with a constant, LLVM would move the conditions out of the loop and
        # emit the loop three times, which triples compile time.
        nothing = jnp.minimum(window, 0)
        run = lambda c, left: attend(c, left, layer, base, token, window)
        left = only(s.kv_heads * plan.splits + nothing, program, run, left)
        # Programs without a split of the keys are chosen first.
        run = lambda c, left: join(c, left, base)
        left = only(joins(c) + nothing, plan.programs - 1 - program, run, left)
        prefetch(c, down, layer)
        ahead, more = more, load_ahead(c, up, layer)
        inputs, left = read_vector(c, left, base + offsets["heads"], 2 * out.columns)
        multiply(c, out, layer, ahead[0], inputs, base + offsets["out"], SAME)
        touched = use(touched, ahead[1])
        ahead, more = more, load_ahead(c, down, layer)
        inputs, left = read_vector(c, left, base + offsets["out"], s.width)
        x = add_inputs(x, inputs)
        keep(x, layer)
        pl.when(layer + 1 < L)(lambda: prefetch_attention(layer + 1))
        multiply(c, up, layer, ahead[0], norm_inputs(c, x), base + offsets["up"], RELU2)
        touched = use(touched, ahead[1])
        ahead, more = more, load_ahead(c, qkv, jnp.minimum(layer + 1, L - 1))
        inputs, left = read_vector(c, left, base + offsets["up"], s.hidden)
        multiply(c, down, layer, ahead[0], inputs, base + offsets["down"], SAME)
        return left, x, more, use(touched, ahead[1])

    def prefetch_attention(layer):
        prefetch(c, qkv, layer)
        prefetch(c, out, layer)

    prefetch_attention(0)
    start = jnp.int32(plan.spins), load_x0(), load_ahead(c, qkv, 0), jnp.zeros(THREADS, jnp.int32)
    left, _, _, touched = jax.lax.fori_loop(0, L, layer_step, start)
    status_ref[program, 0] = left
    status_ref[program, 1] = touched.sum(0)


def products_of(plan: LayersPlan, refs: Sequence[Any]) -> list[Product]:
    """Distribute the matrices' tiles evenly over the programs."""
    s = plan.shape
    sizes = (
        (s.qkv_rows, s.width), (s.width, s.heads * s.head_dim), (s.hidden, s.width),
        (s.width, s.hidden),
    )  # fmt: skip
    units = lambda rows: -(-rows // ROWS // plan.programs)
    return [
        Product(ref, rows, inputs // 2, units(rows))
        for ref, (rows, inputs) in zip(refs, sizes, strict=True)
    ]


def use(touched, numbers):
    """Use prefetched words, so that the compiler does not remove their loads."""
    return touched if numbers is None else touched + numbers.sum(0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def call(
    plan: LayersPlan, interpret: bool, weights: PackedLayers, x0_D, turns_2h, values_LC, place_2,
    table_W, slots, pages,
):  # fmt: skip
    """Return the residual stream after attention of the last and the middle layer [2, D], status
    [programs, 2], the slots, the pages. x0_D: float32. status: of each program, 0 if it timed out
    (else > 0), and an unused value that keeps the prefetches."""
    windows = jnp.array(plan.shape.windows, jnp.int32)
    small = x0_D, turns_2h, values_LC, place_2, table_W, windows, weights.scales_L2
    changed = slots, *(x.reshape(-1) for x in pages)
    states = jax.ShapeDtypeStruct((2 * len(x0_D),), jnp.float32)
    status = jax.ShapeDtypeStruct((plan.programs, 2), jnp.int32)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed]
    states, status, slots, *kept = pl.pallas_call(
        functools.partial(run_layers_kernel, plan),
        grid=(plan.programs,),
        out_shape=[states, status, *like],
        input_output_aliases={11 + i: 2 + i for i in range(3)},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="decode_layers",
    )(*small, *(w.reshape(-1) for w in weights[:4]), *changed)
    kept = tuple(x.reshape(page.shape) for x, page in zip(kept, pages))
    return states.reshape(2, -1), status, slots, kept
