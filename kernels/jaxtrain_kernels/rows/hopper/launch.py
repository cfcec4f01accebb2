"""Launch of the Hopper row kernels: small thread blocks that access global memory directly.

They use neither shared memory nor TMA: a warp reads its rows in vectors of 16 bytes into registers,
reduces them by shuffles and writes the result. A block of one warpgroup needs 40 to 80 registers
per thread, so a multiprocessor holds 6 to 12 blocks. Their loads in flight (100 KiB and more) hide
the memory latency, and their phases overlap.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper


def launch(
    body: Callable[..., None],
    out_types: list[jax.ShapeDtypeStruct],
    blocks: int,
    *arrays: jax.Array | hopper.Ref,
    interpret: hopper.Interpret = False,
) -> list[jax.Array]:
    """Run body(block, *input and output refs) in `blocks` blocks of 128 threads; return arrays.

    A reference among the arrays may be written to as well.
    """

    def kernel(*refs):
        body(lax.axis_index("block"), *refs)

    kernel.__name__ = body.__name__
    return hopper.pallas_kernel(
        kernel,
        out_type=out_types,
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=hopper.compiler_params(),
        interpret=interpret,
    )(*arrays)


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def rows_layout(columns: int, vector: int | None = None) -> hopper.RegisterLayout:
    """One row per warp. vector: adjacent values per thread; None: 16 bytes of 16-bit values (8 if
    columns % 256 is not 0)."""
    vector = vector or (8 if columns % 256 == 0 else 4)
    return plgpu.Layout.TILED(plgpu.Tiling(((4, 32 * vector), (vector,))), (-3,), (-2,), -1)


def lanes_layout(columns: int) -> hopper.RegisterLayout:
    """Several short rows per warp: 8 values per thread, columns / 8 threads per row."""
    lanes = columns // 8
    rows = 32 // lanes
    tiling = plgpu.Tiling(((4 * rows, columns), (rows, columns), (8,)))
    return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)


def load(ref: hopper.Ref, layout: hopper.RegisterLayout) -> jax.Array:
    """Load from global memory as float32."""
    return hopper.untyped.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def broadcast_lanes(x_R: jax.Array, like: jax.Array, layout: hopper.RegisterLayout) -> jax.Array:
    """Broadcast one value per row over its columns."""
    return hopper.untyped.layout_cast(lax.broadcast_in_dim(x_R, like.shape, [0]), layout)
