"""Hopper backend: queries and keys are rotated in place, and attention reads the one array.

Attention's backward writes dk and dv into the array of the gradient. One pass then rotates dk back
in place, and dq from the float32 sums of attention's kernel.
"""

import functools
from typing import Any, NamedTuple

import jax

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.call import Call, kept
from jaxtrain_kernels.attention.hopper.common import Heads
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.matmul.fp8.gradients import GradientCast, cotangent
from jaxtrain_kernels.rows.hopper.rope import tokens_of_block

HEAD_DIMS = (64, 128)  # only for these attention's backward has one kernel for dq, dk and dv
TOKENS = 128  # per block of queries; sequence lengths are multiples of it


class RopeAttentionOptions(NamedTuple):
    """Static parameters of one call. tilings: attention's, forward and backward."""

    N: int
    K: int
    eps: float
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    tilings: tuple[Any, Any] = None, None
    interpret: hopper.Interpret = False

    def heads(self, with_value: bool) -> Heads:
        v = self.N + self.K
        return Heads(self.N, self.K, 0, self.N, 0 if with_value else v, v)

    @property
    def attention(self) -> dict[str, Any]:
        return dict(
            causal=self.causal, window=self.window, softcap=self.softcap, scale=self.scale,
            interpret=self.interpret,
        )  # fmt: skip


def supports(target: Target, qkv_BTCH, call: Call) -> str | None:
    if reason := hopper.unsupported_reason(target, qkv_BTCH):
        return reason
    _, T, _, H = qkv_BTCH.shape
    if H not in HEAD_DIMS:
        return f"needs a head dim of {' or '.join(map(str, HEAD_DIMS))}, got {H}"
    if T % TOKENS or T % tokens_of_block(H):
        return f"needs a length in multiples of {TOKENS}, got {T}"
    return None if call.scale > 0 else f"needs a scale above 0, got {call.scale}"


def casts_unsupported(qkv_BTCH) -> str | None:
    """Return why the pass that turns gradients back cannot cast them; None = it can."""
    from jaxtrain_kernels.rows.hopper import rope_cast

    B, T, _, H = qkv_BTCH.shape
    return rope_cast.unsupported_reason(B, T, H)


def rope_attention(
    qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, heads, eps, call: Call,
    *, gradient: GradientCast | None = None, tilings: tuple[Any, Any] = (None, None),
    interpret: hopper.Interpret = False,
):  # fmt: skip
    """Backend of the public function. interpret: plgpu.InterpretGPUParams, to run on a CPU."""
    K = (qkv_BTCH.shape[2] - heads) // 2
    same = call.scale, call.causal, call.window, call.softcap
    options = RopeAttentionOptions(heads, K, eps, *same, tilings, interpret)
    return _attend(options, qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, call.segment_ids_BT, gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(o: RopeAttentionOptions, qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, ids_BT, gradient):
    return _forward(o, qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, ids_BT, gradient)[0]


def _forward(o: RopeAttentionOptions, qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, ids_BT, gradient):
    from jaxtrain_kernels.attention.hopper.flash import folding  # takes a second to import

    run = folding(functools.partial(_forward_rows, o), last_out=3)
    *out, qkv_BTCH, r_NR, v_BTKH = run(qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, ids_BT)
    out_BTNH, lse_BNT = kept(*out)
    saved = qkv_BTCH, r_NR, v_BTKH, cos_BTH, sin_BTH, ids_BT, out_BTNH, lse_BNT
    given = None if gradient is None else (gradient.scale, gradient.seen)
    return out_BTNH, (saved, given)


def _forward_rows(o: RopeAttentionOptions, qkv_BTCH, cos_BTH, sin_BTH, value_BTKH, ids_BT):
    from jaxtrain_kernels.attention.hopper.forward import forward
    from jaxtrain_kernels.rows.hopper import rope_in_place

    options = rope_in_place.TurnOptions((o.N, o.K), o.eps, o.interpret)
    cos_BTH, sin_BTH = (of_rows(x, len(qkv_BTCH)) for x in (cos_BTH, sin_BTH))
    (qkv_BTCH,), r_NR = rope_in_place.turn(options, (qkv_BTCH,), cos_BTH, sin_BTH)
    v_BTKH = None
    if value_BTKH is not None:
        # From the rotated array: a second use before the rotation would prevent the overwrite.
        v_BTKH = qkv_BTCH[:, :, o.N + o.K :] + value_BTKH
    arrays = qkv_BTCH, qkv_BTCH, qkv_BTCH if v_BTKH is None else v_BTKH
    heads = o.heads(v_BTKH is not None)
    out = forward(*arrays, ids_BT, heads=heads, tiling=o.tilings[0], **o.attention)
    return *out, qkv_BTCH, r_NR, v_BTKH


def of_rows(x_bTH: jax.Array, rows: int) -> jax.Array:
    """Angles for `rows` batch rows. One set serves all; if vmap folded an axis into the batch, each
    set is repeated for its rows."""
    parts = len(x_bTH)
    return x_bTH if parts in (1, rows) else jax.numpy.repeat(x_bTH, rows // parts, axis=0)


def _backward(o: RopeAttentionOptions, residuals, dout_BTNH):
    from jaxtrain_kernels.attention.hopper.flash import folding

    saved, given = residuals
    # The angles are functions of the positions, so they need no gradient.
    of_angles = map(jax.numpy.zeros_like, saved[3:5])
    if given is not None:
        d_BTCH, dvalue, cast = _backward_cast(o, saved, dout_BTNH, *given)
        return d_BTCH, *of_angles, dvalue, None, cast
    run = folding(functools.partial(_backward_rows, o), last_in=1)
    d_BTCH, dvalue = run(*saved, dout_BTNH)
    return d_BTCH, *of_angles, dvalue, None, None


def _backward_rows(
    o: RopeAttentionOptions, qkv_BTCH, r_NR, v_BTKH, cos_BTH, sin_BTH, ids_BT, out_BTNH, lse_BNT,
    dout_BTNH,
):  # fmt: skip
    from jaxtrain_kernels.rows.hopper import rope_in_place

    results = out_BTNH, lse_BNT, dout_BTNH
    dq_BTNH, d_BTCH = _of_attention(o, qkv_BTCH, v_BTKH, ids_BT, results)
    options = rope_in_place.TurnOptions((o.N, o.K), o.eps, o.interpret)
    cos_BTH, sin_BTH = (of_rows(x, len(qkv_BTCH)) for x in (cos_BTH, sin_BTH))
    (d_BTCH,) = rope_in_place.turn_back(
        options, o.scale, (qkv_BTCH,), r_NR, dq_BTNH, (d_BTCH,), cos_BTH, sin_BTH
    )
    return d_BTCH, None if v_BTKH is None else d_BTCH[:, :, o.N + o.K :]


def _backward_cast(o: RopeAttentionOptions, saved, dout_BTNH, scale, like_seen):
    """(an unread gradient of qkv, gradient of value, the gradient of qkv in float8)."""
    from jaxtrain_kernels.rows.hopper import rope_cast, rope_in_place

    qkv_BTCH, r_NR, v_BTKH, cos_BTH, sin_BTH, ids_BT, out_BTNH, lse_BNT = saved
    results = out_BTNH, lse_BNT, dout_BTNH
    dq_BTNH, d_BTCH = _of_attention(o, qkv_BTCH, v_BTKH, ids_BT, results)
    options = rope_in_place.TurnOptions((o.N, o.K), o.eps, o.interpret)
    cos_BTH, sin_BTH = (of_rows(x, len(qkv_BTCH)) for x in (cos_BTH, sin_BTH))
    q_MN, q_NM, most = rope_cast.turn_back_cast(
        options, o.scale, qkv_BTCH, r_NR, dq_BTNH, d_BTCH, cos_BTH, sin_BTH, 1 / scale
    )
    dvalue = None if v_BTKH is None else d_BTCH[:, :, o.N + o.K :]
    return d_BTCH, dvalue, cotangent(q_MN, q_NM, most, like_seen.shape)


def _of_attention(o: RopeAttentionOptions, qkv_BTCH, v_BTKH, ids_BT, results):
    """Attention's backward: dq in float32, and dk and dv in an array like qkv. results: the output,
    the LSE and the output's gradient."""
    from jaxtrain_kernels.attention.hopper.backward import backward_sums

    arrays = qkv_BTCH, qkv_BTCH, qkv_BTCH if v_BTKH is None else v_BTKH
    heads = o.heads(v_BTKH is not None)
    return backward_sums(
        *arrays, ids_BT, *results, None, heads=heads, tiling=o.tilings[1], **o.attention
    )


_attend.defvjp(_forward, _backward)
