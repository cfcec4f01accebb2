"""Float8 copies of stacked weights, layer by layer: one read and two writes of each.

A layer's kernel reads it out of the stack, so XLA copies neither the layer nor its float8 matrices.
XLA's own fusion of a cast and a transpose runs at 1.8 TB/s on an H200, and XLA transposes some
stacks twice. The transpose is that of `rows.fp8.hopper`: the hardware transposes 16-bit elements
(ldmatrix) but not bytes, so an element in shared memory has two bytes, of rows 32 apart.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.fp8 import E4M3, Fp8, fp8_scale
from jaxtrain_kernels.matmul.fp8.xla import fp8_amax
from jaxtrain_kernels.rows.hopper.launch import rows_layout

ROWS = 64  # of a block's tile
PAIRS = ROWS // 2  # rows n and n + PAIRS share 16-bit elements
WIDTHS = 512, 384, 256, 128  # columns of a tile
BLOCKS = 400  # about three for each multiprocessor
COLUMNS = 64  # that a warpgroup transposes at a time
WARPGROUPS = 2  # per block
WARPS = 4  # per warpgroup; each reads a row
PAD = 8  # elements between rows in shared memory, so that ldmatrix has no bank conflicts


def supports(target: Target, *stacks) -> str | None:
    """Return why the kernel cannot cast these stacks; None = it can."""
    if reason := hopper.unsupported_reason(target):
        return reason
    for K, N in (w_LKN.shape[1:] for w_LKN in stacks):
        if K % ROWS or N % WIDTHS[-1]:
            return f"needs rows in multiples of {ROWS} and columns of {WIDTHS[-1]}, got {(K, N)}"
    return None


def quantize_layers(
    *stacks: Float[Array, "L K _"], interpret: hopper.Interpret = False
) -> list[Fp8]:
    """`fp8_quantize` of each layer, with a scale of its own; of several stacks, of their matrices
    concatenated by columns.

    A weight in 16 bits is read as float32. If it is a step's copy of a float32 weight, XLA drops
    the rounding, as it does in its own casts, and the kernel reads the weight itself. interpret:
    plgpu.InterpretGPUParams, to run on a CPU.
    """
    wide = [w_LKN.astype(jnp.float32) for w_LKN in stacks]
    amax_L = functools.reduce(jnp.maximum, (jax.vmap(fp8_amax)(w_LKN) for w_LKN in wide))
    scale_L = fp8_scale(amax_L, E4M3)
    multiplier_L, index = 1 / scale_L, functools.partial(jnp.full, (1,), dtype=jnp.int32)
    layers = []
    for layer in range(len(amax_L)):
        q_KN, q_NK = cast_layer(wide, multiplier_L, index(layer), interpret)
        layers.append(Fp8(q_KN, q_NK, scale_L[layer]))
        if interpret:  # one kernel after the other: the interpreter has too few threads for two
            multiplier_L, _ = lax.optimization_barrier((multiplier_L, q_KN))
    return layers


def tile_width(K: int, columns: list[int]) -> int:
    """The widest that divides all matrices and gives BLOCKS blocks, or else the narrowest."""
    fit = [width for width in WIDTHS if not any(n % width for n in columns)]
    blocks = lambda width: K // ROWS * (sum(columns) // width)
    return next((width for width in fit if blocks(width) >= BLOCKS), fit[-1])


@hopper.jit_kernel("interpret")
def cast_layer(stacks, multiplier_L, layer_1, interpret):
    """Return a layer's concatenated matrices times its multiplier in e4m3, and their transpose."""
    K, columns = stacks[0].shape[1], [w_LKN.shape[2] for w_LKN in stacks]
    N, ends = sum(columns), list(itertools.accumulate(columns))
    width = tile_width(K, columns)
    layout = rows_layout(width, vector=4)

    def fp8_cast_layer(layer_ref, multiplier_ref, *refs, packed, halves):
        *w_refs, q_ref, qt_ref = refs
        warpgroup, layer = lax.axis_index("warpgroup"), layer_ref[0]
        row, column = lax.axis_index("row") * ROWS, lax.axis_index("column") * width
        factor = multiplier_ref[layer]

        def cast_pairs(w_ref: hopper.Ref, start: int, step: jax.Array, _: None) -> None:
            """Cast two times 4 rows of the matrix whose first column is `start`."""
            pair = (step * WARPGROUPS + warpgroup) * WARPS
            rows = [pl.ds(row + half * PAIRS + pair, WARPS) for half in (0, 1)]
            own = pl.ds(column - start, width)
            values = [
                hopper.untyped.load(w_ref.at[layer, here, own], layout=layout, optimized=False)
                for here in rows
            ]
            cast_bytes = []
            for here, w in zip(rows, values):
                q = (w * factor).astype(E4M3)
                q_ref[here, pl.ds(column, width)] = q
                cast_bytes.append(lax.bitcast_convert_type(q, jnp.uint8).astype(jnp.uint16))
            low, high = cast_bytes
            packed[pl.ds(pair, WARPS), pl.ds(0, width)] = low | (high << jnp.uint16(8))

        def transpose_columns(n: jax.Array, _: None) -> None:
            columns = (n * WARPGROUPS + warpgroup) * COLUMNS
            both = plgpu.load(packed.at[:, pl.ds(columns, COLUMNS)].T, layout=hopper.MATRIX)
            for half, byte in enumerate((both & jnp.uint16(0xFF), both >> jnp.uint16(8))):
                tile = halves.at[warpgroup, half]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # of this tile, not of the other
                tile[...] = lax.bitcast_convert_type(byte.astype(jnp.uint8), E4M3)
                plgpu.commit_smem()
                at = pl.ds(column + columns, COLUMNS), pl.ds(row + half * PAIRS, PAIRS)
                plgpu.copy_smem_to_gmem(tile, qt_ref.at[at])

        for w_ref, end, count in zip(w_refs, ends, columns):

            def cast_tile(w_ref=w_ref, start=end - count):
                cast = functools.partial(cast_pairs, w_ref, start)
                lax.fori_loop(0, PAIRS // (WARPS * WARPGROUPS), cast, None)

            pl.when((column >= end - count) & (column < end))(cast_tile)
        hopper.bar_sync(WARPGROUPS + 1, WARPGROUPS)
        lax.fori_loop(0, width // (COLUMNS * WARPGROUPS), transpose_columns, None)
        plgpu.wait_smem_to_gmem(0)

    struct = jax.ShapeDtypeStruct
    return hopper.pallas_kernel(
        fp8_cast_layer,
        out_type=[struct((K, N), E4M3), struct((N, K), E4M3)],
        scratch_types=dict(
            packed=plgpu.SMEM((PAIRS, width + PAD), jnp.uint16),
            halves=hopper.tiles((WARPGROUPS, 2, COLUMNS, PAIRS), E4M3),
        ),
        grid=(K // ROWS, N // width),
        grid_names=("row", "column"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=hopper.compiler_params(approx_math=False),
        interpret=interpret,
    )(layer_1, multiplier_L, *stacks)
