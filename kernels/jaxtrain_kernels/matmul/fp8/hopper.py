"""Cast to float8 with a transpose for Hopper, in Pallas Mosaic GPU: one read, two writes.

A block of 128 threads processes a tile: TMA loads it and stores both results, and several blocks
per multiprocessor hide each other's latency. The cast value may be a function of the arrays, which
is then never written in 16 bits. XLA's own kernel also reads each array once, but is slower.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxtrain_kernels import hopper
from jaxtrain_kernels.dispatch import Target

ROWS, COLUMNS = 64, 128  # of a tile
_TRANSFORMS: Any = plgpu.TilingTransform, plgpu.SwizzleTransform


def supports(target: Target, *arrays) -> str | None:
    if reason := hopper.unsupported_reason(target, *arrays):
        return reason
    M, K = arrays[0].shape
    if M % ROWS or K % COLUMNS:
        return f"needs rows in multiples of {ROWS} and columns of {COLUMNS}, got {(M, K)}"
    return None


def bytes_tile(rows: int, columns: int, dtype: DTypeLike) -> pl.MemoryRef:
    """Shared memory for a matrix of one-byte elements that TMA stores."""
    tiling, swizzle = _TRANSFORMS
    transforms = (tiling((8, columns)), swizzle(columns))
    return plgpu.SMEM((rows, columns), dtype, transforms=transforms)


def cast(
    arrays, multiplier, dtype, function, *, saturate: bool, interpret: hopper.Interpret = False
):
    """function(*arrays) * multiplier in dtype, and its transpose; the hardware always saturates.

    interpret: plgpu.InterpretGPUParams, to run on a CPU.
    """
    return _cast(arrays, multiplier, dtype, function, saturate, False, interpret)


def cast_measured(arrays, multiplier, dtype, function, *, interpret: hopper.Interpret = False):
    """Saturating `cast`, and the amax of the function's values in each block."""
    return tuple(_cast(arrays, multiplier, dtype, function, True, True, interpret))


@hopper.jit_kernel("dtype", "function", "saturate", "measure", "interpret")
def _cast(arrays, multiplier, dtype, function, saturate, measure, interpret):
    """Return (q_MK, q_KM), and with `measure` the amax of each tile."""
    M, K = arrays[0].shape
    largest = float(jnp.finfo(dtype).max)

    def fp8_cast(*refs, tiles, q_tile, qt_tile, arrived):
        inputs, (multiplier, out_MK, out_KM, *most_RC) = refs[: len(tiles)], refs[len(tiles) :]
        row, column = lax.axis_index("row"), lax.axis_index("column")
        rows, columns = pl.ds(row * ROWS, ROWS), pl.ds(column * COLUMNS, COLUMNS)
        for x, tile in zip(inputs, tiles):
            plgpu.copy_gmem_to_smem(x.at[rows, columns], tile, arrived)
        factor = multiplier[0]
        plgpu.barrier_wait(arrived)

        def values_of(sources: list[Any]) -> Any:
            return function(*(plgpu.load(source, layout=hopper.MATRIX) for source in sources))

        for transposed, result in ((False, q_tile), (True, qt_tile)):
            values = values_of([tile.T if transposed else tile for tile in tiles])
            if measure and not transposed:
                most = jnp.max(jnp.abs(values), 1).astype(jnp.float32)
                most_RC[0][row, column] = jnp.max(most, 0)
            values = values.astype(jnp.float32) * factor
            if saturate and interpret:  # on the device the cast saturates
                values = jnp.minimum(jnp.maximum(values, -largest), largest)
            result[...] = values.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, out_MK.at[rows, columns])
        plgpu.copy_smem_to_gmem(qt_tile, out_KM.at[columns, rows])
        plgpu.wait_smem_to_gmem(0)

    grid = M // ROWS, K // COLUMNS
    out_type = [jax.ShapeDtypeStruct((M, K), dtype), jax.ShapeDtypeStruct((K, M), dtype)]
    if measure:
        out_type.append(jax.ShapeDtypeStruct(grid, jnp.float32))
    return hopper.pallas_kernel(
        fp8_cast,
        out_type=out_type,
        scratch_types=dict(
            tiles=[hopper.tiles((ROWS, COLUMNS), x.dtype) for x in arrays],
            q_tile=bytes_tile(ROWS, COLUMNS, dtype),
            qt_tile=bytes_tile(COLUMNS, ROWS, dtype),
            arrived=plgpu.Barrier(num_arrivals=len(arrays)),
        ),
        grid=grid,
        grid_names=("row", "column"),
        compiler_params=hopper.compiler_params(approx_math=False, scratch_bytes=64 * measure),
        interpret=interpret,
    )(*arrays, multiplier.reshape(1))
