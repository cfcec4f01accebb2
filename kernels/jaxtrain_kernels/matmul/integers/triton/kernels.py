"""Kernels of `integers.triton`: matmuls of a few rows with integer codes, in Pallas Triton.

A program handles a tile of columns and a split of the inputs. `fragments_*` (few rows) multiply as
`fragments.py` describes: each of a program's warps reads other codes, and the sums of those with
the same columns are added at the end. The RMS norm of the input multiplies its result by 1 / rms of
the row, so its statistics are summed beside the products. `dot_*` are products of tiles in shared
memory.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxtrain_kernels.matmul.few_rows.kernel import activated, add_rounded
from jaxtrain_kernels.matmul.few_rows.operations import GATED
from jaxtrain_kernels.matmul.integers.fragment_order import COLUMNS, ROWS
from jaxtrain_kernels.matmul.integers.triton import DotTile, fragments

ONE = 0x3F800000  # bits of 1.0 in float32
TO_MANTISSA = 15  # shift of a byte's top bit to the mantissa's top bit


class _Lanes:
    """Rows and columns of each lane (`fragments`), and loads from them."""

    def __init__(self, plan, rows: int, layer, refs):
        self.plan, self.tile, self.layer, self.refs = plan, plan.tile, layer, refs
        self.shape = (plan.tile.warps, *fragments.LANES, 4)
        warp, self.c, self.q, self.j = self.indices(self.shape)
        self.panel = pl.program_id(0)
        self.columns = self.panel * COLUMNS + self.c * 4 + self.j
        self.begin = pl.program_id(1) * (rows // ROWS) + warp * plan.tile.loads
        self.steps = rows // plan.tile.rows
        self.M, self.how = refs.x_MK.shape[0], (plan.dtype, plan.interpret)

    @staticmethod
    def indices(shape):
        return (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in range(len(shape)))

    def first(self, step):
        """A lane's first block of codes in a step."""
        return self.begin + step * (self.tile.warps * self.tile.loads)

    def of_columns(self, ref, row):
        """Values [..., 4] of the lane's columns, in that row of layer `layer`."""
        return ref[self.layer, row, self.columns]

    def load(self, step, per_block: int):
        """Words of a step's codes; and of the lane's row of x, the words that they need, of which a
        lane has `per_block` for a block: 4 (int4) or 2 (int8). They have the gains of a norm."""
        first, lane_word = self.first(step), (self.c * 4 + self.q) * 4 + self.j
        loads = range(self.tile.loads)
        codes = [self.refs.codes[self.layer, self.panel, first + i, lane_word] for i in loads]
        count = self.tile.loads * per_block

        def position(i):
            """Index of word i, of a lane's `count`, in a row of x."""
            i = jax.lax.rem(i, jnp.int32(count))
            block, word = jax.lax.div(i, jnp.int32(per_block)), jax.lax.rem(i, jnp.int32(per_block))
            return ((first + block) * 4 + self.q) * per_block + word

        def words(i):
            index = jnp.minimum(self.c, self.M - 1), position(i + self.j)
            return plgpu.load(self.refs.x_MK.at[index], mask=self.c < self.M, other=0)

        def gain(i):
            return self.refs.gain_K[position(i + self.j)]

        firsts = range(0, count, 4)
        gains = [gain(i) for i in firsts] if self.refs.gain_K is not None else []
        return codes, [words(i) for i in firsts], gains

    def zeros(self):
        """Sums of no step: two or, for one row of x, one; and `gram_sums` for a norm."""
        zeros = jnp.zeros(self.shape, jnp.float32)
        return (zeros,) * min(2, self.M), zeros if self.plan.eps is not None else ()

    def loop(self, step, per_block):
        """Call step(i, codes, x_words, sums) for each step. Returns sums and `gram_sums`."""

        def one(i, carry):
            sums, squares = carry
            codes, x_words, gains = self.load(i, per_block)
            if self.plan.eps is not None:
                once = x_words if self.tile.loads * per_block >= 4 else [x_words[0] * (self.j < 2)]
                squares = fragments.gram_sums(once, squares, [*codes, *gains], *self.how)
            if gains:
                pairs = zip(x_words, gains, strict=True)
                x_words = [fragments.scale_inputs(*pair, *self.how) for pair in pairs]
            return step(i, codes, x_words, sums), squares

        return jax.lax.fori_loop(0, self.steps, one, self.zeros())

    def store(self, out_refs, sums, squares):
        """Add the warps' sums, and store them after the operations of the plan."""
        dtype = out_refs[0].dtype
        for p, total in enumerate(sums):
            y = total.sum(0)
            if self.plan.eps is not None:
                y *= self.inverse_rms(squares, p)
            y = y.astype(dtype)
            if self.plan.activation in GATED:
                pairs = y.reshape(*fragments.LANES, 2, 2)
                y = activated(self.plan.activation, *jnp.unstack(pairs, axis=-1))
            elif self.plan.activation is not None:
                y = activated(self.plan.activation, y)
            c, q, j = self.indices(y.shape)
            width = fragments.LANES[0] * y.shape[-1]
            m, column = 2 * q + p, c * y.shape[-1] + j
            if self.refs.residual_MN is not None:
                index = jnp.minimum(m, self.M - 1), self.panel * width + column
                y = add_rounded(self.refs.residual_MN[index], y)
            ends = [0, *(end // width for end in itertools.accumulate(self.plan.sizes))]
            for (begin, end), out_ref in zip(itertools.pairwise(ends), out_refs, strict=True):
                index = pl.program_id(1), m, (self.panel - begin) * width + column
                put = functools.partial(plgpu.store, out_ref.at[index], y, mask=m < self.M)
                if len(out_refs) == 1:
                    put()
                else:
                    pl.when((begin <= self.panel) & (self.panel < end))(put)

    def inverse_rms(self, squares, p: int):
        """1 / rms of row 2q + p of x, [1, 4, 1]."""
        c, q, j = self.indices(self.shape[1:])
        diagonal = jnp.where((c == 2 * q + p) & (j == p), squares.sum(0), 0)
        mean = diagonal.sum(0).sum(-1) / (2 * self.refs.x_MK.shape[1])
        return jax.lax.rsqrt(mean + self.plan.eps)[None, :, None]


def fragments_int4(plan, rows, group, layer, refs, out_refs):
    """codes in fragments, two inputs per byte; scales bfloat16, offsets float32 [L, G, N].

    x: two inputs a word, int32 [M, H]. A warp's rows in a step are in one group.
    """
    lanes = _Lanes(plan, rows, layer, refs)

    def step(i, codes, words, totals):
        g = jax.lax.div(lanes.first(i), jnp.int32(group // 2 // ROWS))
        scales = lanes.of_columns(refs.scales, g).astype(jnp.float32)
        sums = fragments.int4_sums(codes, words, *lanes.how)
        totals = [total + s * scales for total, s in zip(totals, sums, strict=False)]
        if refs.offsets is not None:
            offset, inputs = (
                lanes.of_columns(refs.offsets, g),
                fragments.input_sums(words, *lanes.how),
            )
            totals = [total + x * offset for total, x in zip(totals, inputs, strict=False)]
        return tuple(totals)

    lanes.store(out_refs, *lanes.loop(step, 4))


def fragments_int8(plan, rows, group, layer, refs, out_refs):
    """codes in fragments, scales float32 [L, 1, N]; x: two inputs a word."""
    lanes = _Lanes(plan, rows, layer, refs)
    step = lambda i, codes, words, sums: fragments.int8_sums(codes, words, sums, *lanes.how)
    sums, squares = lanes.loop(step, 2)
    scales = lanes.of_columns(refs.scales, 0).astype(jnp.float32)
    lanes.store(out_refs, [total * scales for total in sums], squares)


def _split(tile, rows: int):
    """First row of the split, number of its steps, and slice of columns."""
    begin = pl.program_id(1) * rows
    return begin, rows // tile.rows, pl.ds(pl.program_id(0) * tile.columns, tile.columns)


def _float32(bits):
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def dot_int4(plan, rows, group, layer, refs, out_refs):
    """codes uint8 [L, H, N], scales and offsets as in `fragments_int4`; a step is in one group.
    Values round to x's dtype."""
    tile, x_ref = plan.tile, refs.x_MK
    begin, steps, columns = _split(tile, rows)
    padded = out_refs[0].shape[0]
    m = jnp.minimum(jnp.arange(padded), x_ref.shape[0] - 1)

    def step(i, total):
        first = begin + i * tile.rows
        g = jax.lax.div(first, jnp.int32(group // 2))
        codes = refs.codes[layer, pl.ds(first, tile.rows), columns].astype(jnp.int32)
        x = x_ref[m, pl.ds(2 * first, 2 * tile.rows)].reshape(padded, tile.rows, 2)
        even, odd = jnp.unstack(x, axis=-1)
        scales = refs.scales[layer, g, columns].astype(jnp.float32)[None]
        for inputs, bits in ((even, (codes & 15) << 4), (odd, codes & 0xF0)):
            values = _float32((bits << TO_MANTISSA) | ONE) * (scales * 16) - scales * 24
            total += jnp.dot(
                inputs, values.astype(inputs.dtype), preferred_element_type=jnp.float32
            )
        if refs.offsets is not None:
            inputs = (even.astype(jnp.float32) + odd.astype(jnp.float32)).sum(1)
            total += inputs[:, None] * refs.offsets[layer, g, columns][None]
        return total

    zeros = jnp.zeros((padded, tile.columns), jnp.float32)
    _store(out_refs[0], jax.lax.fori_loop(0, steps, step, zeros), x_ref.shape[0])


def dot_int8(plan, rows, group, layer, refs, out_refs):
    """codes int8 [L, K, N], scales as in `fragments_int8`."""
    tile, x_ref = plan.tile, refs.x_MK
    begin, steps, columns = _split(tile, rows)
    padded = out_refs[0].shape[0]
    m = jnp.minimum(jnp.arange(padded), x_ref.shape[0] - 1)

    def step(i, total):
        first = begin + i * tile.rows
        codes = refs.codes[layer, pl.ds(first, tile.rows), columns]
        x = x_ref[m, pl.ds(first, tile.rows)]
        return total + jnp.dot(x, codes.astype(x.dtype), preferred_element_type=jnp.float32)

    zeros = jnp.zeros((padded, tile.columns), jnp.float32)
    total = jax.lax.fori_loop(0, steps, step, zeros)
    scales = refs.scales[layer, 0, columns].astype(jnp.float32)
    _store(out_refs[0], total * scales[None], x_ref.shape[0])


def _store(out_ref, total, M: int):
    inside = (jnp.arange(total.shape[0]) < M)[:, None]
    plgpu.store(out_ref, total.astype(out_ref.dtype), mask=inside)


BODIES = {("int4", False): dot_int4, ("int8", False): dot_int8,
          ("int4", True): fragments_int4, ("int8", True): fragments_int8}  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def call(plan, operands):
    """Return the results [M, _], whose columns are the plan's sizes. All calls of a shape share one
    trace and one kernel."""
    (M, K), tile, dtype = operands.x_MK.shape, plan.tile, operands.x_MK.dtype
    group, splits = K // operands.scales.shape[1], tile.splits
    R, stages = K if plan.form == "int8" else K // 2, 1
    out_specs = [pl.BlockSpec()] * len(plan.sizes)
    body = BODIES[plan.form, not isinstance(tile, DotTile)]
    if isinstance(tile, DotTile):
        block = None, 16 if M <= 16 else 32, tile.columns
        out_specs, stages = [pl.BlockSpec(block, lambda n, s: (s, 0, n))], tile.stages
    else:
        pairs = lambda x: jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.int32)
        operands = operands._replace(x_MK=pairs(operands.x_MK))
        if operands.gain_K is not None:
            operands = operands._replace(gain_K=pairs(operands.gain_K.astype(dtype)))
    arrays, tree = jax.tree.flatten(operands)

    def kernel(*all_refs):
        refs, out_refs = tree.unflatten(all_refs[: len(arrays)]), all_refs[len(arrays) :]
        layer = 0 if refs.layer_1 is None else refs.layer_1[0]
        body(plan, R // splits, group, layer, refs, out_refs)

    kernel.__name__ = f"matmul_{'w4a16' if plan.form == 'int4' else 'w8a16'}"
    parts = pl.pallas_call(
        kernel,
        grid=(operands.scales.shape[-1] // tile.columns, splits),
        out_specs=out_specs,
        out_shape=[
            jax.ShapeDtypeStruct((splits, M, N), dtype if splits == 1 else jnp.float32)
            for N in plan.sizes
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=stages),
        interpret=plan.interpret,
    )(*arrays)
    return [part[0] if splits == 1 else part.sum(0).astype(dtype) for part in parts]
