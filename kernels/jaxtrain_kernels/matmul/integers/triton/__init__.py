"""Products of 1 to 32 rows with integer codes in Triton, through jax-triton: Ampere and newer.

Each program reads a tile of columns of a part of the inputs (a split) once, and the partial sums
are added in float32, always in one order. One row is multiplied and added, more rows go through
tensor cores. The scales multiply sums of a group, so that values are not rounded to x's dtype.
The kernels are in `kernels.py`, imported by the first call: this module needs no Triton.

It is the default where it was measured to be faster than XLA (an H200, shapes of llama_8b): one
row, and up to 8 rows of int4. XLA's figure at 8 rows is not known: Triton's 8 rows took 14 to 39 us
where XLA's 32 rows take 30 to 94. More rows, and 2 to 32 of int8, were not measured: a caller may
ask for them by name.
"""

import importlib.metadata
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import Target, mesh_devices, target
from jaxtrain_kernels.matmul.integers import dot

INSTALL = "pip install jax-triton==0.3.1 triton==3.6.0"
MOST_ROWS = 32
DEFAULT_INT4_ROWS = 8
PROCESSORS = 132  # of a Hopper
SMALL_BYTES = 2**24  # of codes


class Tile(NamedTuple):
    """A program's step: rows of codes x columns, of `splits` parts of the inputs.

    each: rows of codes that a thread reads one below the other (one row of x alone).
    """

    rows: int
    columns: int
    each: int
    splits: int
    warps: int = 4
    stages: int = 1


def supports(target: Target, x_MK, codes, scales) -> str | None:
    """The reason why a call cannot be served; None = it can."""
    cc = target.compute_capability
    if target.platform != "cuda":
        return f"needs an NVIDIA GPU, this is {target.platform}"
    if cc is None or cc < (8, 0):
        return f"needs compute capability 8.0 (Ampere), this is {cc}"
    if (devices := mesh_devices()) > 1:
        return f"has no partitioning rule, and the mesh has {devices} devices"
    M, K = x_MK.shape
    if M > MOST_ROWS:
        return f"needs at most {MOST_ROWS} rows, got {M}"
    if x_MK.dtype not in (jnp.bfloat16, jnp.float16) and (M > 1 or x_MK.dtype != jnp.float32):
        return f"needs bfloat16 or float16, or one row of float32, got {M} of {x_MK.dtype}"
    if codes.shape[-1] % 16:
        return f"needs a multiple of 16 columns, got {codes.shape[-1]}"
    if codes.dtype == jnp.uint8:
        group = K // scales.shape[-2]
        if scales.dtype != jnp.bfloat16:
            return f"needs scales in bfloat16, got {scales.dtype}"
        if M > 1 and group % 32:
            return f"needs groups of a multiple of 32 inputs for {M} rows, got {group}"
    try:
        version = importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:
        return f"needs jax-triton 0.3: {INSTALL}"
    if not version.startswith("0.3."):
        return f"needs jax-triton 0.3, this is {version}: {INSTALL}"
    return None


def not_the_default(x_MK, codes) -> str | None:
    """Why a call that `supports` allows goes to XLA unless it asks for this backend by name."""
    most = DEFAULT_INT4_ROWS if codes.dtype == jnp.uint8 else 1
    if len(x_MK) <= most:
        return None
    return f"not measured for more than {most} row{'s' * (most > 1)} of {codes.dtype} codes"


def w8a16_matmul(x_MK, codes_KN, scales_N, layer=None, tile: Tile | None = None):
    """As the public function."""
    R, N = codes_KN.shape[-2:]
    tile = tile or tile_of(len(x_MK), R, N, None)
    return _product(dot.w8a16_matmul, tile, x_MK, codes_KN, scales_N, layer)


def w4a16_matmul(x_MK, codes_HN, scales_GN, layer=None, tile: Tile | None = None):
    """As the public function."""
    group = x_MK.shape[1] // scales_GN.shape[-2]
    R, N = codes_HN.shape[-2:]
    tile = tile or tile_of(len(x_MK), R, N, group)
    return _product(dot.w4a16_matmul, tile, x_MK, codes_HN, scales_GN, layer)


def tile_of(M: int, R: int, N: int, group: int | None) -> Tile:
    """The tile for M rows and codes [R, N]; group: of int4.

    Four programs a processor, each of two steps at least; codes of up to SMALL_BYTES give too few
    steps of four rows a thread. For every shape that was measured this is within 5% of the best
    (5 to 32 tiles each: benchmarks/results/matmul-integers-nvidia_h200.json). 9 to 32 rows and
    several rows of int8 were not measured.
    """
    if M == 1:
        each = 2 if R * N <= SMALL_BYTES else 4
        tile = Tile(16, 128, each if group is None else math.gcd(each, group // 2), 1)
    else:
        tile = Tile(64 if group is None else min(64, group // 2 & -(group // 2)), 64, 1, 1, 4, 4)
    programs = math.ceil(N / tile.columns)
    steps = math.ceil(R / (tile.rows * tile.each))
    return tile._replace(splits=max(1, min(steps // 2, round(4 * PROCESSORS / programs))))


def splits_of(tile: Tile, R: int) -> tuple[int, int]:
    """Rows of codes in a split, whole steps, and how many splits that makes."""
    step = tile.rows * tile.each
    split = math.ceil(R / (step * tile.splits)) * step
    return split, math.ceil(R / split)


def _product(formula, tile: Tile, x_MK, codes, scales, layer):
    """formula: the same in XLA, for the gradient. layer: static, or traced as in a scan."""
    static = layer is None or isinstance(layer, int)

    def formula_of_layer(x_MK, codes, scales, *traced):
        at = traced[0] if traced else layer
        return formula(x_MK, *((codes, scales) if at is None else (codes[at], scales[at])))

    @jax.custom_vjp
    def product(x_MK, codes, scales, *traced):
        def call(x_MK, codes, scales, *traced):
            return _call(tile, x_MK, codes, scales, traced[0] if traced else layer)

        return jax.custom_batching.sequential_vmap(call)(x_MK, codes, scales, *traced)

    def backward(inputs, dy_MN):
        return jax.vjp(formula_of_layer, *inputs)[1](dy_MN)

    product.defvjp(lambda *inputs: (product(*inputs), inputs), backward)
    return product(x_MK, codes, scales, *(() if static else (jnp.asarray(layer, jnp.int32),)))


def _call(tile: Tile, x_MK, codes, scales, layer):
    import jax_triton

    from jaxtrain_kernels.matmul.integers.triton import kernels

    (M, K), (R, N), int4 = x_MK.shape, codes.shape[-2:], codes.dtype == jnp.uint8
    split, splits = splits_of(tile, R)
    traced = not (layer is None or isinstance(layer, int))
    dims: dict[str, Any] = {"N": N, "STAGES": tile.stages, "TRACED": traced}
    dims |= {"H": R, "GROUP": K // scales.shape[-2]} if int4 else {"K": R}
    if M == 1:
        dims |= {"TH": tile.rows, "EACH": tile.each, "WORDS": tile.columns // 4}
    else:
        dims |= {"M": M, "MP": 16 if M <= 16 else 32, "TN": tile.columns}
        dims |= {"TH" if int4 else "TK": tile.rows}
    major, minor = target().compute_capability or (9, 0)
    (sums,) = jax_triton.triton_call(
        x_MK,
        codes,
        *([scales] if int4 else []),
        layer if traced else scales,
        0 if traced or layer is None else -layer,  # not 1, which would be compiled by itself
        split,
        kernel=getattr(kernels, f"{'row' if M == 1 else 'rows'}_{'int4' if int4 else 'int8'}"),
        out_shape=[jax.ShapeDtypeStruct((splits, M, N), jnp.float32)],
        grid=(math.ceil(N / tile.columns), splits),
        name=f"matmul_{'w4a16' if int4 else 'w8a16'}",
        num_warps=tile.warps,
        compute_capability=10 * major + minor,
        **dims,
    )
    out_MN = sums.sum(0)
    if not int4:
        of_layer = scales if layer is None else scales[layer]
        out_MN *= of_layer.astype(jnp.float32)[None]
    return out_MN.astype(x_MK.dtype)
