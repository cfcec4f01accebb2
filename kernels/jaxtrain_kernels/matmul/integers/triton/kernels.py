"""Kernels of `integers.triton`: matmuls of a few rows with integer codes, in Pallas Triton.

`vector_*` multiply and add: each thread reads 16 columns of a row of codes and keeps its own sums,
which are added at the end. `dot_*` use tensor cores. A program handles a tile of columns and a
split of the inputs.

An integer becomes a float32 without a conversion: its bits become the upper mantissa bits of a
float in [1, 2). So 1 + code / 2^n is multiplied, and the ones are subtracted from the sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ONE = 0x3F800000  # bits of 1.0 in float32
TO_MANTISSA = 15  # shift of a byte's top bit to the mantissa's top bit
UNROLLED = 8  # loads of codes; with more, ptxas delays the later ones to save registers


def _float32(bits):
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _place(tile, rows: int):
    """First row of the split, number of its steps, and slice of columns."""
    begin = pl.program_id(1) * rows
    columns = pl.ds(pl.program_id(0) * tile.columns, tile.columns)
    return begin, rows // (tile.rows * tile.each), columns


def _loop(tile, steps: int, step, carry):
    """Loop over the steps; few steps are unrolled, so that all loads are in flight at once."""
    if steps * tile.each > UNROLLED:
        return jax.lax.fori_loop(0, steps, step, carry)
    for i in range(steps):
        carry = step(i, carry)
    return carry


def _inputs(x_ref, m: int, k):
    """Inputs k of row m in float32, broadcastable over the columns."""
    return x_ref[m, k].astype(jnp.float32)[:, None]


def vector_int4(tile, rows, group, layer, refs, out_ref):
    """codes uint8 [L, H, N]: two inputs per byte; scales bfloat16, offsets float32 [L, G, N].

    A byte times the even input counts the odd code 16 times; the odd input's product subtracts it.
    """
    x_ref, codes_ref, scales_ref, *offsets_ref = refs
    begin, steps, columns = _place(tile, rows)
    M = x_ref.shape[0]

    def step(i, totals):
        first = begin + i * (tile.rows * tile.each) + jnp.arange(tile.rows) * tile.each
        g = jax.lax.div(first, jnp.int32(group // 2))
        # Load all first, so that all loads are in flight at once.
        loaded = [codes_ref[layer, first + j, columns] for j in range(tile.each)]
        scales = scales_ref[layer, g, columns].astype(jnp.float32)
        offsets = [ref[layer, g, columns] for ref in offsets_ref]
        sums = [jnp.zeros((tile.rows, tile.columns), jnp.float32) for _ in range(M)]
        evens, odds = ([jnp.zeros((tile.rows, 1), jnp.float32)] * M for _ in range(2))
        for j, codes in enumerate(loaded):
            both = (codes.astype(jnp.int32) << TO_MANTISSA) | ONE
            high = _float32(both & (ONE | 0xF0 << TO_MANTISSA))
            both = _float32(both)
            for m in range(M):
                even = _inputs(x_ref, m, 2 * (first + j))
                odd = _inputs(x_ref, m, 2 * (first + j) + 1)
                sums[m] += even * both
                sums[m] += (odd / 16 - even) * high
                evens[m] += even
                odds[m] += odd
        results = []
        for m in range(M):
            ones = odds[m] * 16 + (evens[m] + odds[m]) * 8
            total = totals[m] + (sums[m] * 256 - ones) * scales
            results.append(sum(((evens[m] + odds[m]) * o for o in offsets), total))
        return tuple(results)

    zeros = tuple(jnp.zeros((tile.rows, tile.columns), jnp.float32) for _ in range(M))
    for m, total in enumerate(_loop(tile, steps, step, zeros)):
        out_ref[m, :] = total.sum(0).astype(out_ref.dtype)


def vector_int8(tile, rows, group, layer, refs, out_ref):
    """codes int8 [L, K, N], scales float32 [L, 1, N]."""
    x_ref, codes_ref, scales_ref = refs
    begin, steps, columns = _place(tile, rows)
    M = x_ref.shape[0]

    def step(i, carry):
        sums, inputs = map(list, carry)
        first = begin + i * (tile.rows * tile.each) + jnp.arange(tile.rows) * tile.each
        loaded = [codes_ref[layer, first + j, columns] for j in range(tile.each)]
        for j, codes in enumerate(loaded):
            values = _float32((codes.astype(jnp.int32) << TO_MANTISSA) + (ONE | 1 << 22))
            for m in range(M):
                x = _inputs(x_ref, m, first + j)
                sums[m] += x * values
                inputs[m] += x
        return tuple(sums), tuple(inputs)

    zeros = lambda columns: tuple(jnp.zeros((tile.rows, columns), jnp.float32) for _ in range(M))
    sums, inputs = _loop(tile, steps, step, (zeros(tile.columns), zeros(1)))
    scales = scales_ref[layer, 0, columns].astype(jnp.float32)
    for m in range(M):
        total = (sums[m] * 256 - inputs[m] * 384).sum(0)
        out_ref[m, :] = (total * scales).astype(out_ref.dtype)


def dot_int4(tile, rows, group, layer, refs, out_ref):
    """Tensor-core version of `vector_int4`; a step is in one group. Values round to x's dtype."""
    x_ref, codes_ref, scales_ref, *offsets_ref = refs
    begin, steps, columns = _place(tile, rows)
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
    """Tensor-core version of `vector_int8`."""
    x_ref, codes_ref, scales_ref = refs
    begin, steps, columns = _place(tile, rows)
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


KERNELS = {
    ("vector", "uint8"): vector_int4,
    ("vector", "int8"): vector_int8,
    ("dot", "uint8"): dot_int4,
    ("dot", "int8"): dot_int8,
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def call(tile, interpret: bool, x_MK, codes, *others, layer_1=()):
    """Return the product [M, N]. codes [L, R, N]; others: scales, and offsets if there are any.

    layer_1: (int32 [1],), or () if there is one layer. All calls of a shape share one trace and
    one kernel.
    """
    (M, K), (_, R, N) = x_MK.shape, codes.shape
    group = K // others[0].shape[1]
    body = KERNELS["dot" if tile.dot else "vector", codes.dtype.name]

    def kernel(*refs):
        *inputs, out_ref = refs
        layer = inputs.pop()[0] if layer_1 else 0
        body(tile, R // tile.splits, group, layer, inputs, out_ref)

    kernel.__name__ = f"matmul_{'w4a16' if codes.dtype == jnp.uint8 else 'w8a16'}"
    padded = (16 if M <= 16 else 32) if tile.dot else M
    parts_SMN = pl.pallas_call(
        kernel,
        grid=(N // tile.columns, tile.splits),
        out_specs=pl.BlockSpec((None, padded, tile.columns), lambda n, s: (s, 0, n)),
        out_shape=jax.ShapeDtypeStruct(
            (tile.splits, M, N), x_MK.dtype if tile.splits == 1 else jnp.float32
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(x_MK, codes, *others, *layer_1)
    return parts_SMN[0] if tile.splits == 1 else parts_SMN.sum(0).astype(x_MK.dtype)
