"""Kernels of `integers.triton`: matmuls of a few rows with integer codes, in Pallas Triton.

A program handles a tile of columns and a split of the inputs. `fragments_*` (few rows) multiply as
`fragments.py` describes: each of a program's warps reads other codes, and the sums of those with
the same columns are added at the end. `dot_*` are products of tiles in shared memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.matmul.integers.fragment_order import COLUMNS, ROWS
from jaxtrain_kernels.matmul.integers.triton import DotTile, fragments

ONE = 0x3F800000  # bits of 1.0 in float32
TO_MANTISSA = 15  # shift of a byte's top bit to the mantissa's top bit


class _Lanes:
    """Rows and columns of each lane (`fragments`), and loads from them."""

    def __init__(self, tile, rows: int, layer, x_ref, codes_ref):
        self.tile, self.layer, self.x_ref, self.codes_ref = tile, layer, x_ref, codes_ref
        shape = (tile.warps, *fragments.LANES, 4)
        warp, self.c, self.q, self.j = (
            jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in range(4)
        )
        self.panel = pl.program_id(0)
        self.columns = self.panel * COLUMNS + self.c * 4 + self.j
        self.begin = pl.program_id(1) * (rows // ROWS) + warp * tile.loads
        self.steps = rows // tile.rows

    def first(self, step):
        """A lane's first block of codes in a step."""
        return self.begin + step * (self.tile.warps * self.tile.loads)

    def of_columns(self, ref, row):
        """Values [..., 4] of the lane's columns, in that row of layer `layer`."""
        return ref[self.layer, row, self.columns]

    def load(self, step, per_block: int):
        """Words of a step's codes; and for each 8 rows of x, the words that they need, of which a
        lane has `per_block` for a block: 4 (int4) or 2 (int8)."""
        first, lane_word = self.first(step), (self.c * 4 + self.q) * 4 + self.j
        loads = range(self.tile.loads)
        codes = [self.codes_ref[self.layer, self.panel, first + i, lane_word] for i in loads]
        M, count = self.x_ref.shape[0], self.tile.loads * per_block

        def words(m, i):
            i = jax.lax.rem(i + self.j, jnp.int32(count))
            block, word = jax.lax.div(i, jnp.int32(per_block)), jax.lax.rem(i, jnp.int32(per_block))
            index = jnp.minimum(m, M - 1), ((first + block) * 4 + self.q) * per_block + word
            return plgpu.load(self.x_ref.at[index], mask=m < M, other=0)

        return codes, [[words(m + self.c, i) for i in range(0, count, 4)] for m in range(0, M, 8)]

    def zeros(self):
        """Sums of no step: two for each 8 rows of x."""
        M, zeros = self.x_ref.shape[0], jnp.zeros(self.j.shape, jnp.float32)
        return [(zeros,) * min(2, M)] * pl.cdiv(M, 8)

    def loop(self, step, per_block, carry):
        """Call step(i, codes, x_words, carry) for each step."""
        return jax.lax.fori_loop(
            0, self.steps, lambda i, carry: step(i, *self.load(i, per_block), carry), carry
        )

    def store(self, out_ref, sums):
        """Add the warps' sums, and store them."""
        shape = self.j.shape[1:]
        c, q, j = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in range(3))
        for i, pair in enumerate(sums):
            for p, total in enumerate(pair):
                m = i * 8 + 2 * q + p
                plgpu.store(
                    out_ref.at[m, c * 4 + j],
                    total.sum(0).astype(out_ref.dtype),
                    mask=m < self.x_ref.shape[0],
                )


def fragments_int4(interpret, dtype: str, tile, rows, group, layer, refs, out_ref):
    """codes in fragments, two inputs per byte; scales bfloat16, offsets float32 [L, G, N].

    x_ref: two inputs a word, int32 [M, H]. A warp's rows in a step are in one group.
    """
    x_ref, codes_ref, scales_ref, *offsets_ref = refs
    lanes = _Lanes(tile, rows, layer, x_ref, codes_ref)

    def step(i, codes, x_words, totals):
        g = jax.lax.div(lanes.first(i), jnp.int32(group // 2 // ROWS))
        scales = lanes.of_columns(scales_ref, g).astype(jnp.float32)
        offsets = [lanes.of_columns(ref, g) for ref in offsets_ref]

        def added(words, pair):
            sums = fragments.int4_sums(codes, words, dtype, interpret)
            pair = [total + s * scales for total, s in zip(pair, sums, strict=False)]
            for offset in offsets:
                inputs = fragments.input_sums(words, dtype, interpret)
                pair = [total + x * offset for total, x in zip(pair, inputs, strict=False)]
            return tuple(pair)

        return [added(*both) for both in zip(x_words, totals, strict=True)]

    lanes.store(out_ref, lanes.loop(step, 4, lanes.zeros()))


def fragments_int8(interpret, dtype: str, tile, rows, group, layer, refs, out_ref):
    """codes in fragments, scales float32 [L, 1, N]; x_ref: two inputs a word."""
    x_ref, codes_ref, scales_ref = refs
    lanes = _Lanes(tile, rows, layer, x_ref, codes_ref)

    def step(i, codes, x_words, sums):
        return [
            fragments.int8_sums(codes, words, pair, dtype, interpret)
            for words, pair in zip(x_words, sums, strict=True)
        ]

    sums = lanes.loop(step, 2, lanes.zeros())
    scales = lanes.of_columns(scales_ref, 0).astype(jnp.float32)
    lanes.store(out_ref, [[total * scales for total in pair] for pair in sums])


def _split(tile, rows: int):
    """First row of the split, number of its steps, and slice of columns."""
    begin = pl.program_id(1) * rows
    return begin, rows // tile.rows, pl.ds(pl.program_id(0) * tile.columns, tile.columns)


def _float32(bits):
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def dot_int4(tile, rows, group, layer, refs, out_ref):
    """codes uint8 [L, H, N], scales and offsets as in `fragments_int4`; a step is in one group.
    Values round to x's dtype."""
    x_ref, codes_ref, scales_ref, *offsets_ref = refs
    begin, steps, columns = _split(tile, rows)
    padded = out_ref.shape[0]
    m = jnp.minimum(jnp.arange(padded), x_ref.shape[0] - 1)

    def step(i, total):
        first = begin + i * tile.rows
        g = jax.lax.div(first, jnp.int32(group // 2))
        codes = codes_ref[layer, pl.ds(first, tile.rows), columns].astype(jnp.int32)
        x = x_ref[m, pl.ds(2 * first, 2 * tile.rows)].reshape(padded, tile.rows, 2)
        even, odd = jnp.unstack(x, axis=-1)
        scales = scales_ref[layer, g, columns].astype(jnp.float32)[None]
        for inputs, bits in ((even, (codes & 15) << 4), (odd, codes & 0xF0)):
            values = _float32((bits << TO_MANTISSA) | ONE) * (scales * 16) - scales * 24
            total += jnp.dot(
                inputs, values.astype(inputs.dtype), preferred_element_type=jnp.float32
            )
        for ref in offsets_ref:
            inputs = (even.astype(jnp.float32) + odd.astype(jnp.float32)).sum(1)
            total += inputs[:, None] * ref[layer, g, columns][None]
        return total

    zeros = jnp.zeros((padded, tile.columns), jnp.float32)
    _store(out_ref, jax.lax.fori_loop(0, steps, step, zeros), x_ref.shape[0])


def dot_int8(tile, rows, group, layer, refs, out_ref):
    """codes int8 [L, K, N], scales as in `fragments_int8`."""
    x_ref, codes_ref, scales_ref = refs
    begin, steps, columns = _split(tile, rows)
    padded = out_ref.shape[0]
    m = jnp.minimum(jnp.arange(padded), x_ref.shape[0] - 1)

    def step(i, total):
        first = begin + i * tile.rows
        codes = codes_ref[layer, pl.ds(first, tile.rows), columns]
        x = x_ref[m, pl.ds(first, tile.rows)]
        return total + jnp.dot(x, codes.astype(x.dtype), preferred_element_type=jnp.float32)

    zeros = jnp.zeros((padded, tile.columns), jnp.float32)
    total = jax.lax.fori_loop(0, steps, step, zeros)
    scales = scales_ref[layer, 0, columns].astype(jnp.float32)
    _store(out_ref, total * scales[None], x_ref.shape[0])


def _store(out_ref, total, M: int):
    inside = (jnp.arange(total.shape[0]) < M)[:, None]
    plgpu.store(out_ref, total.astype(out_ref.dtype), mask=inside)


BODIES = {("int4", False): dot_int4, ("int8", False): dot_int8,
          ("int4", True): fragments_int4, ("int8", True): fragments_int8}  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def call(form: str, tile, interpret: bool, x_MK, codes, *others, layer_1=()):
    """Return the product [M, N]. form: int4 or int8. codes [L, R, N], or in fragments; others:
    scales, and offsets if there are any.

    layer_1: (int32 [1],), or () if there is one layer. All calls of a shape share one trace and
    one kernel.
    """
    (M, K), N = x_MK.shape, others[0].shape[-1]
    group, dtype, in_fragments = K // others[0].shape[1], x_MK.dtype, not isinstance(tile, DotTile)
    R, body = K if form == "int8" else K // 2, BODIES[form, in_fragments]
    rows, warps, stages = M, tile.warps, 1
    if in_fragments:
        body = functools.partial(body, interpret, dtype.name)
        x_MK = jax.lax.bitcast_convert_type(x_MK.reshape(M, K // 2, 2), jnp.int32)
    else:
        rows, stages = 16 if M <= 16 else 32, tile.stages

    def kernel(*refs):
        *inputs, out_ref = refs
        layer = inputs.pop()[0] if layer_1 else 0
        body(tile, R // tile.splits, group, layer, inputs, out_ref)

    kernel.__name__ = f"matmul_{'w4a16' if form == 'int4' else 'w8a16'}"
    parts_SMN = pl.pallas_call(
        kernel,
        grid=(N // tile.columns, tile.splits),
        out_specs=pl.BlockSpec((None, rows, tile.columns), lambda n, s: (s, 0, n)),
        out_shape=jax.ShapeDtypeStruct(
            (tile.splits, M, N), dtype if tile.splits == 1 else jnp.float32
        ),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(x_MK, codes, *others, *layer_1)
    return parts_SMN[0] if tile.splits == 1 else parts_SMN.sum(0).astype(dtype)
