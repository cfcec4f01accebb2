"""Kernels of `integers.triton`: matmuls of a few rows with integer codes, in Pallas Triton.

A program handles a tile of columns and a split of the inputs. Each of its warps reads other rows of
codes, and multiplies them as `fragments` describes; the warps' sums are added at the end.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.matmul.integers.triton import fragments

NO_ROW = 2**20


class _Lanes:
    """Rows and columns of each lane (`fragments`), and loads from them."""

    def __init__(self, tile, rows: int, layer, x_ref, codes_ref):
        self.tile, self.layer, self.x_ref, self.codes_ref = tile, layer, x_ref, codes_ref
        shape = (tile.along, 8 * tile.across, 4, tile.width)
        warp, c, q, self.j = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in range(4))
        lane, chunk = (c * 4 + q, warp) if tile.wide else (c, warp * 4 + q)
        self.columns = pl.program_id(0) * tile.columns + lane * tile.width + self.j
        self.begin = pl.program_id(1) * rows + chunk * tile.each
        row = jax.lax.rem(c, 8)  # of x; if wide, a lane's inputs are zero but for one q
        self.row = jnp.where(row // 2 == q, row % 2, NO_ROW) if tile.wide else row
        self.at_once = 2 if tile.wide else 8
        self.steps = rows // tile.rows

    def first(self, step):
        """A lane's first row of codes in a step."""
        return self.begin + step * self.tile.rows

    def of_columns(self, ref, row):
        """Values [..., width] of the lane's columns, in that row of layer `layer`."""
        return ref[self.layer, row, self.columns]

    def load(self, step):
        """Codes of a step's rows; and for each 8 rows of x, the words of x that they need."""
        first = self.first(step)
        codes = [self.of_columns(self.codes_ref, first + i) for i in range(self.tile.each)]
        word = first if self.codes_ref.dtype == jnp.uint8 else jax.lax.div(first, 2)
        count = fragments.words(self.codes_ref.dtype.name, self.tile.each)
        M = self.x_ref.shape[0]

        def words(m, i):
            index = jnp.minimum(m, M - 1), word + i + jax.lax.rem(self.j, count)
            return plgpu.load(self.x_ref.at[index], mask=m < M, other=0)

        indices = range(0, count, self.tile.width)
        sets = range(0, M, self.at_once)
        return codes, [[words(m + self.row, i) for i in indices] for m in sets]

    def zeros(self):
        """Sums of no step: for each 8 rows of x, those of rows 2q and 2q + 1."""
        M, zeros = self.x_ref.shape[0], jnp.zeros(self.j.shape, jnp.float32)
        return [(zeros,) * min(2, M)] * pl.cdiv(M, self.at_once)

    def loop(self, step, carry):
        """Call step(i, codes, x_words, carry) for each step."""
        return jax.lax.fori_loop(
            0, self.steps, lambda i, carry: step(i, *self.load(i), carry), carry
        )

    def store(self, out_ref, sums):
        """Add the warps' sums, and store them."""
        shape = self.j.shape[1:]
        c, q, j = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in range(3))
        lane, row = (c * 4 + q, 0 * q) if self.tile.wide else (c, 2 * q)
        for i, pair in enumerate(sums):
            for p, total in enumerate(pair):
                m = i * self.at_once + row + p
                plgpu.store(
                    out_ref.at[m, lane * self.tile.width + j],
                    total.sum(0).astype(out_ref.dtype),
                    mask=m < self.x_ref.shape[0],
                )


def matmul_int4(lanes, group, refs, dtype: str, interpret: bool):
    """codes uint8 [L, H, N]: two inputs per byte; scales bfloat16, offsets float32 [L, G, N]. A
    lane's rows in a step are in one group."""
    scales_ref, *offsets_ref = refs

    def step(i, codes, x_words, totals):
        g = jax.lax.div(lanes.first(i), jnp.int32(group // 2))
        scales = lanes.of_columns(scales_ref, g).astype(jnp.float32)
        offsets = [lanes.of_columns(ref, g) for ref in offsets_ref]

        def added(words, pair):
            sums = fragments.int4_sums(codes, words, dtype, interpret)
            pair = [total + s * scales for total, s in zip(pair, sums, strict=False)]
            for offset in offsets:
                inputs = fragments.input_sums(words, len(codes), dtype, interpret)
                pair = [total + x * offset for total, x in zip(pair, inputs, strict=False)]
            return tuple(pair)

        return [added(*both) for both in zip(x_words, totals, strict=True)]

    return lanes.loop(step, lanes.zeros())


def matmul_int8(lanes, group, refs, dtype: str, interpret: bool):
    """codes int8 [L, K, N], scales float32 [L, 1, N]."""
    [scales_ref] = refs

    def step(i, codes, x_words, sums):
        return [
            fragments.int8_sums(codes, words, pair, dtype, interpret)
            for words, pair in zip(x_words, sums, strict=True)
        ]

    sums = lanes.loop(step, lanes.zeros())
    scales = lanes.of_columns(scales_ref, 0).astype(jnp.float32)
    return [[total * scales for total in pair] for pair in sums]


KERNELS = {"uint8": matmul_int4, "int8": matmul_int8}


@functools.partial(jax.jit, static_argnums=(0, 1))
def call(tile, interpret: bool, x_MK, codes, *others, layer_1=()):
    """Return the product [M, N]. codes [L, R, N]; others: scales, and offsets if there are any.

    layer_1: (int32 [1],), or () if there is one layer. All calls of a shape share one trace and
    one kernel.
    """
    (M, K), (_, R, N) = x_MK.shape, codes.shape
    group, dtype = K // others[0].shape[1], x_MK.dtype
    x_words = jax.lax.bitcast_convert_type(x_MK.reshape(M, K // 2, 2), jnp.int32)

    def kernel(*refs):
        *inputs, out_ref = refs
        layer = inputs.pop()[0] if layer_1 else 0
        lanes = _Lanes(tile, R // tile.splits, layer, *inputs[:2])
        body = functools.partial(KERNELS[codes.dtype.name], lanes, group, inputs[2:])
        lanes.store(out_ref, body(dtype.name, interpret))

    kernel.__name__ = f"matmul_{'w4a16' if codes.dtype == jnp.uint8 else 'w8a16'}"
    parts_SMN = pl.pallas_call(
        kernel,
        grid=(N // tile.columns, tile.splits),
        out_specs=pl.BlockSpec((None, M, tile.columns), lambda n, s: (s, 0, n)),
        out_shape=jax.ShapeDtypeStruct(
            (tile.splits, M, N), dtype if tile.splits == 1 else jnp.float32
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tile.across * tile.along, num_stages=1),
        interpret=interpret,
    )(x_words, codes, *others, *layer_1)
    return parts_SMN[0] if tile.splits == 1 else parts_SMN.sum(0).astype(dtype)
