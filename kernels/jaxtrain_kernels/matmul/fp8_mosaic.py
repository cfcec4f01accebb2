"""The cast to float8 with its transpose for Hopper, in Pallas Mosaic GPU: one read, two writes.

A block of 128 threads takes a tile: TMA brings it in and takes both results out, and several
blocks of a multiprocessor hide each other's waits. XLA's own kernel for the cast reads the tensor
once as well and can compute it on the way; this one serves where that kernel is slow.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target

ROWS, COLUMNS = 64, 128  # of a tile
_TRANSFORMS: Any = plgpu.TilingTransform, plgpu.SwizzleTransform


def supports(target: Target, x_MK) -> str | None:
    if reason := hopper.refuses(target, x_MK):
        return reason
    if x_MK.shape[0] % ROWS or x_MK.shape[1] % COLUMNS:
        return f"needs rows in multiples of {ROWS} and columns of {COLUMNS}, got {x_MK.shape}"
    return None


def bytes_tile(rows: int, columns: int, dtype: Any) -> Any:
    """Shared memory for a matrix of one-byte elements that TMA takes out."""
    tiling, swizzle = _TRANSFORMS
    transforms = (tiling((8, columns)), swizzle(columns))
    return plgpu.SMEM((rows, columns), dtype, transforms=transforms)


def cast(x_MK, multiplier, dtype, *, saturate: bool, interpret: Any = False):
    """x * multiplier in dtype, and its transpose; the hardware's cast always saturates.

    interpret: plgpu.InterpretGPUParams, on a CPU.
    """
    return _cast(x_MK, multiplier, dtype, saturate, False, interpret)


def cast_measured(x_MK, multiplier, dtype, *, interpret: Any = False):
    """The same, saturating, and x's largest magnitude."""
    q_MK, q_KM, most_CM = _cast(x_MK, multiplier, dtype, True, True, interpret)
    return q_MK, q_KM, jnp.max(most_CM)


@hopper.kernel("dtype", "saturate", "measure", "interpret")
def _cast(x_MK, multiplier, dtype, saturate, measure, interpret):
    """(q_MK, q_KM), and with `measure` the largest magnitude of each row in each tile."""
    M, K = x_MK.shape
    largest = float(jnp.finfo(dtype).max)

    def fp8_cast(x, multiplier, out_MK, out_KM, *most_CM, x_tile, q_tile, qt_tile, arrived):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
        columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
        plgpu.copy_gmem_to_smem(x.at[rows, columns], x_tile, arrived)
        factor = multiplier[0]
        plgpu.barrier_wait(arrived)
        for source, result in ((x_tile, q_tile), (x_tile.T, qt_tile)):
            values = plgpu.load(source, layout=hopper.MATRIX).astype(jnp.float32)
            if most_CM and source is x_tile:
                here = most_CM[0].at[lax.axis_index("column"), rows]
                here[...] = jnp.max(jnp.maximum(values, -values), 1)
            values *= factor
            if saturate:  # as a rule for the interpreter; the same instruction on the device
                values = jnp.minimum(jnp.maximum(values, -largest), largest)
            result[...] = values.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, out_MK.at[rows, columns])
        plgpu.copy_smem_to_gmem(qt_tile, out_KM.at[columns, rows])
        plgpu.wait_smem_to_gmem(0)

    out_type = [jax.ShapeDtypeStruct((M, K), dtype), jax.ShapeDtypeStruct((K, M), dtype)]
    if measure:
        out_type.append(jax.ShapeDtypeStruct((K // COLUMNS, M), jnp.float32))
    return plgpu.kernel(
        fp8_cast,
        out_type=out_type,
        scratch_types=dict(
            x_tile=hopper.tiles((ROWS, COLUMNS), x_MK.dtype),
            q_tile=bytes_tile(ROWS, COLUMNS, dtype),
            qt_tile=bytes_tile(COLUMNS, ROWS, dtype),
            arrived=plgpu.Barrier(),
        ),
        grid=(M // ROWS, K // COLUMNS),
        grid_names=("row", "column"),
        compiler_params=hopper.compiler_params(approx_math=False),
        interpret=interpret,
    )(x_MK, multiplier.reshape(1))
