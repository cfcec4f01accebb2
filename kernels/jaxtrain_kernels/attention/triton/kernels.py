"""FlashAttention-2 (arXiv:2307.08691) kernels in Triton, forward and backward.

A program holds one block of queries (forward, dQ) or of keys (dK/dV) and loops over the blocks of
the other that it sees. `ranges` has four int32 per block, (lo, full_lo, full_hi, hi): the program
visits [lo, hi), of which [full_lo, full_hi) need no mask. LEFT and RIGHT: whether any block has a
masked range before or after the unmasked one. x is a score whose exponent in base 2 is
`x * P.factor`. A tile is R queries x C keys, and P is a `TritonPlan`.
"""

import inspect

import triton
import triton.language as tl

# Lower bound of the maxima: a query without keys has p = exp2(-inf - FLOOR) = 0 instead of NaN.
FLOOR = tl.constexpr(-1e30)
LN2 = tl.constexpr(0.6931471805599453)


def kernel(function):
    """Apply `triton.jit` to the original function, even if an import hook has wrapped it."""
    return triton.jit(inspect.unwrap(function))


@kernel
def _row(ptr, b, n, T, HEADS: tl.constexpr, P: tl.constexpr):
    """Pointer to head n of batch row b in an array [B, T, HEADS, H]."""
    return ptr + (b.to(tl.int64) * T * HEADS + n) * P.H


@kernel
def _load(
    ptr, start, T, SIZE: tl.constexpr, HEADS: tl.constexpr, EDGE: tl.constexpr, P: tl.constexpr
):
    """Load [SIZE, HP] of one head from position `start` on; 0 beyond H and (EDGE) beyond T."""
    r = tl.arange(0, SIZE)[:, None]
    h = tl.arange(0, P.HP)[None, :]
    ptrs = ptr + start * tl.cast(HEADS * P.H, tl.int64) + (r * (HEADS * P.H) + h)
    if EDGE:
        if P.HP == P.H:
            return tl.load(ptrs, r < T - start, 0.0)
        else:
            return tl.load(ptrs, (r < T - start) & (h < P.H), 0.0)
    else:
        if P.HP == P.H:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, h < P.H, 0.0)


@kernel
def _store(ptr, start, T, x, SIZE: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr):
    r = tl.arange(0, SIZE)[:, None]
    h = tl.arange(0, P.HP)[None, :]
    ptrs = ptr + start * tl.cast(HEADS * P.H, tl.int64) + (r * (HEADS * P.H) + h)
    tl.store(ptrs, x.to(ptr.dtype.element_ty), (r < T - start) & (h < P.H))


@kernel
def _ids(ids_ptr, b, position, T, P: tl.constexpr):
    if P.segments:
        return tl.load(ids_ptr + b * T + position, position < T, 0)
    else:
        return position


@kernel
def _capped(qk, P: tl.constexpr):
    if P.softcap is None:
        return qk
    else:  # tanh; tanh.approx has a larger error than bfloat16's rounding of p
        return 1.0 - 2.0 / (1.0 + tl.exp2(qk * P.tanh_factor))


@kernel
def _masked(x, t, s, T, ids_t, ids_s, P: tl.constexpr):
    """x, with -inf where query t does not see key s; t and s are given along their axes of x."""
    if P.causal:
        seen = s <= t
        if P.window is not None:
            seen &= s >= t - P.window
    else:
        seen = (s < T) & (t >= 0)
    if P.segments:
        seen &= (ids_t == ids_s) & (ids_s > 0)
    return tl.where(seen, x, float("-inf"))


@kernel
def _range(ranges_ptr, b, i, P: tl.constexpr):
    if P.segments:
        ranges_ptr += b * tl.num_programs(0) * 4
    ranges_ptr += i * 4
    lo, full_lo = tl.load(ranges_ptr), tl.load(ranges_ptr + 1)
    return lo, full_lo, tl.load(ranges_ptr + 2), tl.load(ranges_ptr + 3)


@kernel
def _softmax_add(
    q, k_ptr, v_ptr, ids_ptr, b, j, t, ids_t, T, peak, total, acc,
    C: tl.constexpr, MASKED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Update the online softmax's state with key block j."""
    K: tl.constexpr = P.K
    k = _load(k_ptr, j * C, T, C, K, MASKED, P)
    x = _capped(tl.dot(q, tl.trans(k)), P)
    if MASKED:
        s = j * C + tl.arange(0, C)
        ids_s = _ids(ids_ptr, b, s, T, P)
        x = _masked(x, t[:, None], s[None, :], T, ids_t[:, None], ids_s[None, :], P)
    new_peak = tl.maximum(peak, tl.max(x, 1) * P.factor)
    p = tl.exp2(x * P.factor - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    v = _load(v_ptr, j * C, T, C, K, MASKED, P)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return new_peak, total * shrink + tl.sum(p, 1), acc


@kernel
def forward(
    q_ptr, k_ptr, v_ptr, ids_ptr, ranges_ptr, T, out_ptr, lse_ptr,
    R: tl.constexpr, C: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write out [B, T, N, H] and its log-sum-exp [B, N, T]; grid (query blocks, N, B)."""
    N: tl.constexpr = P.N
    K: tl.constexpr = P.K
    G: tl.constexpr = P.G
    HP: tl.constexpr = P.HP
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask, most work first
    n, b = tl.program_id(1), tl.program_id(2)
    q = _load(_row(q_ptr, b, n, T, N, P), i * R, T, R, N, True, P)
    k_ptr, v_ptr = _row(k_ptr, b, n // G, T, K, P), _row(v_ptr, b, n // G, T, K, P)
    t = i * R + tl.arange(0, R)
    ids_t = _ids(ids_ptr, b, t, T, P)
    lo, full_lo, full_hi, hi = _range(ranges_ptr, b, i, P)
    peak = tl.full([R], FLOOR, tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, HP], tl.float32)
    if LEFT:
        for j in range(lo, full_lo):
            peak, total, acc = _softmax_add(
                q, k_ptr, v_ptr, ids_ptr, b, j, t, ids_t, T, peak, total, acc, C, True, P
            )
    for j in range(full_lo, full_hi):
        peak, total, acc = _softmax_add(
            q, k_ptr, v_ptr, ids_ptr, b, j, t, ids_t, T, peak, total, acc, C, False, P
        )
    if RIGHT:
        for j in range(full_hi, hi):
            peak, total, acc = _softmax_add(
                q, k_ptr, v_ptr, ids_ptr, b, j, t, ids_t, T, peak, total, acc, C, True, P
            )
    lse = tl.where(total > 0, (peak + tl.log2(total)) * LN2, float("-inf"))
    tl.store(lse_ptr + (b * N + n) * T + t, lse, t < T)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    _store(_row(out_ptr, b, n, T, N, P), i * R, T, out, R, N, P)


@kernel
def _dq_add(
    q, dout, lse, delta, k_ptr, v_ptr, ids_ptr, b, j, t, ids_t, T, dq,
    C: tl.constexpr, MASKED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = P.K
    k = _load(k_ptr, j * C, T, C, K, MASKED, P)
    v = _load(v_ptr, j * C, T, C, K, MASKED, P)
    x = _capped(tl.dot(q, tl.trans(k)), P)
    dx = tl.dot(dout, tl.trans(v)) - delta[:, None]
    if P.softcap is not None:
        dx *= 1.0 - x * x
    if MASKED:
        s = j * C + tl.arange(0, C)
        ids_s = _ids(ids_ptr, b, s, T, P)
        x = _masked(x, t[:, None], s[None, :], T, ids_t[:, None], ids_s[None, :], P)
    dx *= tl.exp2(x * P.factor - lse[:, None])
    return tl.dot(dx.to(k.dtype), k, dq)


@kernel
def backward_dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, ids_ptr, ranges_ptr, T, dq_ptr,
    R: tl.constexpr, C: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write dq [B, T, N, H]; lse is in base 2 and finite; grid (query blocks, N, B)."""
    N: tl.constexpr = P.N
    K: tl.constexpr = P.K
    G: tl.constexpr = P.G
    HP: tl.constexpr = P.HP
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    n, b = tl.program_id(1), tl.program_id(2)
    q = _load(_row(q_ptr, b, n, T, N, P), i * R, T, R, N, True, P)
    dout = _load(_row(dout_ptr, b, n, T, N, P), i * R, T, R, N, True, P)
    k_ptr, v_ptr = _row(k_ptr, b, n // G, T, K, P), _row(v_ptr, b, n // G, T, K, P)
    t = i * R + tl.arange(0, R)
    lse = tl.load(lse_ptr + (b * N + n) * T + t, t < T, 0.0)
    delta = tl.load(delta_ptr + (b * N + n) * T + t, t < T, 0.0)
    ids_t = _ids(ids_ptr, b, t, T, P)
    lo, full_lo, full_hi, hi = _range(ranges_ptr, b, i, P)
    dq = tl.zeros([R, HP], tl.float32)
    if LEFT:
        for j in range(lo, full_lo):
            dq = _dq_add(
                q, dout, lse, delta, k_ptr, v_ptr, ids_ptr, b, j, t, ids_t, T, dq, C, True, P
            )
    for j in range(full_lo, full_hi):
        dq = _dq_add(q, dout, lse, delta, k_ptr, v_ptr, ids_ptr, b, j, t, ids_t, T, dq, C, False, P)
    if RIGHT:
        for j in range(full_hi, hi):
            dq = _dq_add(
                q, dout, lse, delta, k_ptr, v_ptr, ids_ptr, b, j, t, ids_t, T, dq, C, True, P
            )
    _store(_row(dq_ptr, b, n, T, N, P), i * R, T, dq * P.scale, R, N, P)


@kernel
def _dkv_add(
    k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, ids_ptr, b, i, s, ids_s, T, dk, dv,
    R: tl.constexpr, MASKED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add query block i to dk and dv; scores are transposed, [C, R]."""
    N: tl.constexpr = P.N
    q = _load(q_ptr, i * R, T, R, N, MASKED, P)
    dout = _load(dout_ptr, i * R, T, R, N, MASKED, P)
    t = i * R + tl.arange(0, R)
    if MASKED:
        # Queries beyond T: q, dout and delta of 0 give no gradient.
        lse, delta = tl.load(lse_ptr + t, t < T, 0.0), tl.load(delta_ptr + t, t < T, 0.0)
    else:
        lse, delta = tl.load(lse_ptr + t), tl.load(delta_ptr + t)
    x = _capped(tl.dot(k, tl.trans(q)), P)
    dx = tl.dot(v, tl.trans(dout)) - delta[None, :]
    if P.softcap is not None:
        dx *= 1.0 - x * x
    if MASKED:
        ids_t = _ids(ids_ptr, b, t, T, P)
        x = _masked(x, t[None, :], s[:, None], T, ids_t[None, :], ids_s[:, None], P)
    p = tl.exp2(x * P.factor - lse[None, :])
    dv = tl.dot(p.to(dout.dtype), dout, dv)
    dk = tl.dot((p * dx).to(q.dtype), q, dk)
    return dk, dv


@kernel
def backward_dkv(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, ids_ptr, ranges_ptr, T, dk_ptr, dv_ptr,
    R: tl.constexpr, C: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write dk and dv [B, T, K, H], summed over each KV head's queries; grid (key blocks, K, B)."""
    N: tl.constexpr = P.N
    K: tl.constexpr = P.K
    G: tl.constexpr = P.G
    HP: tl.constexpr = P.HP
    j, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k = _load(_row(k_ptr, b, head, T, K, P), j * C, T, C, K, True, P)
    v = _load(_row(v_ptr, b, head, T, K, P), j * C, T, C, K, True, P)
    s = j * C + tl.arange(0, C)
    ids_s = _ids(ids_ptr, b, s, T, P)
    lo, full_lo, full_hi, hi = _range(ranges_ptr, b, j, P)
    dk = tl.zeros([C, HP], tl.float32)
    dv = tl.zeros([C, HP], tl.float32)
    for g in range(G):
        n = head * G + g
        q_row, dout_row = _row(q_ptr, b, n, T, N, P), _row(dout_ptr, b, n, T, N, P)
        lse_row, delta_row = lse_ptr + (b * N + n) * T, delta_ptr + (b * N + n) * T
        if LEFT:
            for i in range(lo, full_lo):
                dk, dv = _dkv_add(
                    k, v, q_row, dout_row, lse_row, delta_row, ids_ptr, b, i, s, ids_s, T, dk, dv,
                    R, True, P,
                )  # fmt: skip
        for i in range(full_lo, full_hi):
            dk, dv = _dkv_add(
                k, v, q_row, dout_row, lse_row, delta_row, ids_ptr, b, i, s, ids_s, T, dk, dv,
                R, False, P,
            )  # fmt: skip
        if RIGHT:
            for i in range(full_hi, hi):
                dk, dv = _dkv_add(
                    k, v, q_row, dout_row, lse_row, delta_row, ids_ptr, b, i, s, ids_s, T, dk, dv,
                    R, True, P,
                )  # fmt: skip
    _store(_row(dk_ptr, b, head, T, K, P), j * C, T, dk * P.scale, C, K, P)
    _store(_row(dv_ptr, b, head, T, K, P), j * C, T, dv, C, K, P)
