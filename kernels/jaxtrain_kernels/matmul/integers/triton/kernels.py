"""Products of a few rows with integer codes, in Triton: `triton` calls them.

A program sums a part of the inputs (a split) for a tile of columns, and stores float32 partial
sums [splits, rows, N] that the caller adds. Codes are read as 32-bit words of four columns,
16 bytes a thread.

For one row an integer becomes a float without a conversion instruction: a float32 below 2^-126 has
no exponent, so that masked bits are code * 2^(their place - 149) as they stand. Inputs are scaled
by SCALE against that, and sums back by what is left.
"""

import inspect

import triton
import triton.language as tl

SCALE = tl.constexpr(2.0**100)
BACK = tl.constexpr(2.0**49)  # SCALE * BACK * 2^-149 = 1


def kernel(function):
    """`triton.jit` of the function itself, also where an import hook has wrapped it."""
    return triton.jit(inspect.unwrap(function))


@kernel
def _float32(bits):
    return bits.to(tl.float32, bitcast=True)


@kernel
def _layer(layer, layer_ptr, TRACED: tl.constexpr):
    """layer: its index with a minus sign, or 0 where it is in memory."""
    if TRACED:
        return tl.load(layer_ptr).to(tl.int64)
    else:
        return tl.cast(-layer, tl.int64)


@kernel
def row_int4(
    x_ptr, codes_ptr, scales_ptr, layer_ptr, layer, split, out_ptr,
    H: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr,
    TH: tl.constexpr, EACH: tl.constexpr, WORDS: tl.constexpr,
    TRACED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row. codes uint8 [L, H, N]: two inputs a byte; scales bfloat16 [L, 2 H / GROUP, N].

    TH rows of threads read EACH bytes one below the other, all of one group, and sum them before
    the scale multiplies. split: rows of codes of a program. Grid (column tiles, splits).
    """
    at = _layer(layer, layer_ptr, TRACED)
    codes_ptr = (codes_ptr + at * (H * N)).to(tl.pointer_type(tl.int32), bitcast=True)
    scales_ptr = (scales_ptr + at * (2 * H // GROUP * N)).to(
        tl.pointer_type(tl.int64), bitcast=True
    )
    W: tl.constexpr = N // 4
    w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)[None, :]
    begin = tl.program_id(1) * split
    rows = tl.arange(0, TH)[:, None] * EACH
    total0 = tl.zeros([TH, WORDS], tl.float32)
    total1 = tl.zeros([TH, WORDS], tl.float32)
    total2 = tl.zeros([TH, WORDS], tl.float32)
    total3 = tl.zeros([TH, WORDS], tl.float32)
    for step in tl.range(0, split, TH * EACH, num_stages=STAGES):
        first = begin + step + rows
        inside = first + 0 * w < H
        if W % WORDS != 0:
            inside = inside & (w < W)
        sum0 = tl.zeros([TH, WORDS], tl.float32)
        sum1 = tl.zeros([TH, WORDS], tl.float32)
        sum2 = tl.zeros([TH, WORDS], tl.float32)
        sum3 = tl.zeros([TH, WORDS], tl.float32)
        inputs = tl.zeros([TH, 1], tl.float32)
        steps = tl.load(scales_ptr + first * 2 // GROUP * W + w, inside, 0)
        # All first, so that all are on their way at once.
        loaded = (tl.load(codes_ptr + first * W + w, inside, 0),)
        for i in tl.static_range(1, EACH):
            loaded += (tl.load(codes_ptr + (first + i) * W + w, inside, 0),)
        for i in tl.static_range(EACH):
            h, words = first + i, loaded[i]
            even = tl.load(x_ptr + 2 * h, h < H, 0.0).to(tl.float32)
            odd = tl.load(x_ptr + 2 * h + 1, h < H, 0.0).to(tl.float32)
            inputs += even + odd
            even *= SCALE
            odd *= SCALE / 16  # its bits are four places further up
            right = words >> 12
            sum0 += even * _float32(words & 0x0000000F)
            sum1 += even * _float32(words & 0x00000F00)
            sum2 += even * _float32(right & 0x000000F0)
            sum3 += even * _float32(right & 0x0000F000)
            sum0 += odd * _float32(words & 0x000000F0)
            sum1 += odd * _float32(words & 0x0000F000)
            sum2 += odd * _float32(right & 0x00000F00)
            sum3 += odd * _float32(right & 0x000F0000)
        inputs *= 8.0
        low, high = steps.to(tl.int32), (steps >> 32).to(tl.int32)
        total0 += (sum0 * BACK - inputs) * _float32(low << 16)
        total1 += (sum1 * (BACK / 256) - inputs) * _float32(low & -65536)
        total2 += (sum2 * (BACK / 16) - inputs) * _float32(high << 16)
        total3 += (sum3 * (BACK / 4096) - inputs) * _float32(high & -65536)
    _store_row(out_ptr, total0, 0, N, WORDS)
    _store_row(out_ptr, total1, 1, N, WORDS)
    _store_row(out_ptr, total2, 2, N, WORDS)
    _store_row(out_ptr, total3, 3, N, WORDS)


@kernel
def _store_row(out_ptr, total, COLUMN: tl.constexpr, N: tl.constexpr, WORDS: tl.constexpr):
    n = (tl.program_id(0) * WORDS + tl.arange(0, WORDS)) * 4 + COLUMN
    tl.store(out_ptr + tl.program_id(1) * N + n, tl.sum(total, 0), n < N)


@kernel
def _words(codes_ptr, k, w, K: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr):
    """Words w of rows k, 0 outside."""
    inside = k + 0 * w < K
    if W % WORDS != 0:
        inside = inside & (w < W)
    return tl.load(codes_ptr + k * W + w, inside, 0)


@kernel
def row_int8(
    x_ptr, codes_ptr, layer_ptr, layer, split, out_ptr,
    K: tl.constexpr, N: tl.constexpr,
    TH: tl.constexpr, EACH: tl.constexpr, WORDS: tl.constexpr,
    TRACED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row. codes int8 [L, K, N]; the scales of columns are the caller's. As `row_int4`."""
    at = _layer(layer, layer_ptr, TRACED)
    codes_ptr = (codes_ptr + at * (K * N)).to(tl.pointer_type(tl.int32), bitcast=True)
    W: tl.constexpr = N // 4
    w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)[None, :]
    begin = tl.program_id(1) * split
    rows = tl.arange(0, TH)[:, None] * EACH
    sum0 = tl.zeros([TH, WORDS], tl.float32)
    sum1 = tl.zeros([TH, WORDS], tl.float32)
    sum2 = tl.zeros([TH, WORDS], tl.float32)
    sum3 = tl.zeros([TH, WORDS], tl.float32)
    inputs = tl.zeros([TH, 1], tl.float32)
    for step in tl.range(0, split, TH * EACH, num_stages=STAGES):
        first = begin + step + rows
        loaded = (_words(codes_ptr, first, w, K, W, WORDS),)
        for i in tl.static_range(1, EACH):
            loaded += (_words(codes_ptr, first + i, w, K, W, WORDS),)
        for i in tl.static_range(EACH):
            k, words = first + i, loaded[i] ^ -2139062144  # each byte + 128
            x = tl.load(x_ptr + k, k < K, 0.0).to(tl.float32)
            inputs += x
            x *= SCALE
            right = words >> 16
            sum0 += x * _float32(words & 0x000000FF)
            sum1 += x * _float32(words & 0x0000FF00)
            sum2 += x * _float32(right & 0x000000FF)
            sum3 += x * _float32(right & 0x0000FF00)
    inputs *= 128.0
    _store_row(out_ptr, sum0 * BACK - inputs, 0, N, WORDS)
    _store_row(out_ptr, sum1 * (BACK / 256) - inputs, 1, N, WORDS)
    _store_row(out_ptr, sum2 * BACK - inputs, 2, N, WORDS)
    _store_row(out_ptr, sum3 * (BACK / 256) - inputs, 3, N, WORDS)


@kernel
def rows_int4(
    x_ptr, codes_ptr, scales_ptr, layer_ptr, layer, split, out_ptr,
    M: tl.constexpr, H: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr,
    MP: tl.constexpr, TH: tl.constexpr, TN: tl.constexpr,
    TRACED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Up to MP rows of 16 bits by tensor cores; the TH rows of codes of a step are of one group.
    Else as `row_int4`."""
    at = _layer(layer, layer_ptr, TRACED)
    codes_ptr += at * (H * N)
    scales_ptr += at * (2 * H // GROUP * N)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_pairs = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    m = tl.arange(0, MP)[:, None]
    n = tl.program_id(0) * TN + tl.arange(0, TN)[None, :]
    begin = tl.program_id(1) * split
    total = tl.zeros([MP, TN], tl.float32)
    for step in tl.range(0, split, TH, num_stages=STAGES):
        first = begin + step
        h = first + tl.arange(0, TH)
        inside = first + 0 * n < H
        if N % TN != 0:
            inside = inside & (n < N)
        codes = tl.load(codes_ptr + h[:, None] * N + n, inside, 0)
        pairs = tl.load(x_pairs + m * H + h[None, :], (m < M) & (h[None, :] < H), 0)
        even, odd = _half(pairs, dtype), _half(pairs >> 16, dtype)
        scales = tl.load(scales_ptr + first * 2 // GROUP * N + n, inside, 0.0)
        part = tl.dot(even, _code(codes & 15, dtype))
        part = tl.dot(odd, _code(codes >> 4, dtype), part)
        inputs = tl.sum(even.to(tl.float32) + odd.to(tl.float32), 1)[:, None]
        if dtype == tl.bfloat16:
            inputs *= 128.0 + 8.0
        else:
            inputs *= 1024.0 + 8.0
        total += (part - inputs) * scales.to(tl.float32)
    _store_rows(out_ptr, total, m, n, M, N)


@kernel
def _half(pairs, dtype: tl.constexpr):
    """The lower 16 bits of each word as a float."""
    return pairs.to(tl.int16).to(dtype, bitcast=True)


@kernel
def _code(codes, dtype: tl.constexpr):
    """128 + the code in bfloat16, 1024 + the code in float16."""
    if dtype == tl.bfloat16:
        return (codes.to(tl.int16) | 0x4300).to(dtype, bitcast=True)
    else:
        return (codes.to(tl.int16) | 0x6400).to(dtype, bitcast=True)


@kernel
def _store_rows(out_ptr, total, m, n, M: tl.constexpr, N: tl.constexpr):
    out_ptr += tl.program_id(1) * (M * N)
    tl.store(out_ptr + m * N + n, total, (m < M) & (n < N))


@kernel
def rows_int8(
    x_ptr, codes_ptr, layer_ptr, layer, split, out_ptr,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    MP: tl.constexpr, TK: tl.constexpr, TN: tl.constexpr,
    TRACED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Up to MP rows by tensor cores; codes and the caller's scales as in `row_int8`."""
    at = _layer(layer, layer_ptr, TRACED)
    codes_ptr += at * (K * N)
    m = tl.arange(0, MP)[:, None]
    n = tl.program_id(0) * TN + tl.arange(0, TN)[None, :]
    begin = tl.program_id(1) * split
    total = tl.zeros([MP, TN], tl.float32)
    for step in tl.range(0, split, TK, num_stages=STAGES):
        k = begin + step + tl.arange(0, TK)
        inside = k[:, None] + 0 * n < K
        if N % TN != 0:
            inside = inside & (n < N)
        codes = tl.load(codes_ptr + k[:, None] * N + n, inside, 0)
        x = tl.load(x_ptr + m * K + k[None, :], (m < M) & (k[None, :] < K), 0.0)
        total = tl.dot(x, codes.to(x.dtype), total)
    _store_rows(out_ptr, total, m, n, M, N)
