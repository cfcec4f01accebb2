"""Transpose of a float8 matrix for Hopper, in Pallas Mosaic GPU: one read, one write.

A float8 matmul contracts the last dims of both operands (K-major), so the logits' gradient is
needed in both layouts. A block of 128 threads transposes a tile between TMA copies. The hardware
(ldmatrix) transposes pairs of bytes; the two bytes of a pair then go to two rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxtrain_kernels import hopper

SIDE = 128  # of a tile
PAIRS = SIDE // 2


@hopper.jit_kernel("interpret")
def fp8_transpose(x_MK: Float[Array, "M K"], *, interpret: hopper.Interpret = False) -> Any:
    """Return x_KM, the transpose of a float8 matrix whose sides are multiples of 128.

    interpret: plgpu.InterpretGPUParams, to run on a CPU.
    """
    M, K = x_MK.shape
    pairs_MP = lax.bitcast_convert_type(x_MK.reshape(M, K // 2, 2), jnp.uint16)

    def fp8_transpose(pairs_MP, turned_P2M, tile, turned, arrived):
        row, column = lax.axis_index("row"), lax.axis_index("column")
        rows, columns = pl.ds(row * SIDE, SIDE), pl.ds(column * PAIRS, PAIRS)
        plgpu.copy_gmem_to_smem(pairs_MP.at[rows, columns], tile, arrived)
        plgpu.barrier_wait(arrived)
        pairs = plgpu.load(tile.T, layout=hopper.MATRIX)
        for which, byte in enumerate((pairs & 255, pairs >> 8)):
            turned.at[which][...] = byte.astype(jnp.uint8)
        plgpu.commit_smem()
        for which in range(2):
            plgpu.copy_smem_to_gmem(turned.at[which], turned_P2M.at[columns, which, rows])
        plgpu.wait_smem_to_gmem(0)

    turned_P2M = hopper.pallas_kernel(
        fp8_transpose,
        out_type=jax.ShapeDtypeStruct((K // 2, 2, M), jnp.uint8),
        scratch_types=dict(
            tile=hopper.tiles((SIDE, PAIRS), jnp.uint16),
            turned=hopper.tiles((2, PAIRS, SIDE), jnp.uint8),
            arrived=plgpu.Barrier(),
        ),
        grid=(M // SIDE, K // SIDE),
        grid_names=("row", "column"),
        compiler_params=hopper.compiler_params(),
        interpret=interpret,
    )(pairs_MP)
    return lax.bitcast_convert_type(turned_P2M.reshape(K, M), x_MK.dtype)
