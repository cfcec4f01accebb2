"""RoPE and RMS norm of queries and keys, forward and backward in one pass each."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels import hopper
from jaxtrain_kernels.rows.hopper.launch import broadcast_lanes, lanes_layout, launch, like, load


class RopeOptions(NamedTuple):
    eps: float
    interpret: hopper.Interpret


def tokens_of_block(head_dim: int) -> int:
    """Number of tokens per block: the rows of half a head that one warpgroup holds."""
    return 128 // (head_dim // 16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rope_norm(options, q_BTNH, k_BTKH, cos_BTH, sin_BTH):
    """Backend of the public function."""
    return _turned(options, _forward, cos_BTH, sin_BTH, (q_BTNH, k_BTKH))


def _rope_fwd(options, q_BTNH, k_BTKH, cos_BTH, sin_BTH):
    out = rope_norm(options, q_BTNH, k_BTKH, cos_BTH, sin_BTH)
    return out, (q_BTNH, k_BTKH, cos_BTH, sin_BTH)


def _rope_bwd(options, saved, cotangents):
    q_BTNH, k_BTKH, cos_BTH, sin_BTH = saved
    dq, dk = _turned(options, _backward, cos_BTH, sin_BTH, (q_BTNH, k_BTKH), cotangents)
    # The angles are functions of the positions, so they need no gradient.
    return dq, dk, jnp.zeros_like(cos_BTH), jnp.zeros_like(sin_BTH)


rope_norm.defvjp(_rope_fwd, _rope_bwd)


def _forward(eps: float, turn: Any, layout: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Return both halves of x, rotated and divided by the root mean square of x."""
    cos, sin = turn
    scale = broadcast_lanes(_scale(eps, first, second), first, layout)
    return (first * cos - second * sin) * scale, (second * cos + first * sin) * scale


def _backward(
    eps: float, turn: Any, layout: Any, first: Any, second: Any, d_first: Any, d_second: Any
) -> tuple[Any, Any]:
    """Gradient of both halves of x: the cotangent rotated back, plus the scale's part."""
    cos, sin = turn
    back = d_first * cos + d_second * sin, d_second * cos - d_first * sin
    scale_R = _scale(eps, first, second)
    along_R = jnp.sum(first * back[0] + second * back[1], 1) * (-0.5 / first.shape[1])
    along = broadcast_lanes(along_R * scale_R * scale_R * scale_R, first, layout)
    scale = broadcast_lanes(scale_R, first, layout)
    return back[0] * scale + first * along, back[1] * scale + second * along


def _scale(eps: float, first: Any, second: Any) -> Any:
    square_R = jnp.sum(first * first + second * second, 1) * (0.5 / first.shape[1])
    return lax.rsqrt(square_R + eps)


@hopper.jit_kernel("options", "turn_heads")
def _turned(options, turn_heads, cos_BTH, sin_BTH, *pairs):
    """Apply turn_heads to each head, read from every (q, k) pair; return the results as a pair."""
    B, T, _, H = pairs[0][0].shape
    half, tokens = H // 2, tokens_of_block(H)
    layout, halves = lanes_layout(half), (pl.ds(0, half), pl.ds(half, half))
    periodic = len(cos_BTH) == 1  # every row of the batch has the same positions

    def rope(block, cos_ref, sin_ref, *refs):
        here = pl.ds(block * tokens, tokens)
        at = lax.rem(block, T // tokens) if periodic else block
        angles = pl.ds(at * tokens, tokens)
        turn = tuple(load(ref.at[angles, halves[1]], layout) for ref in (cos_ref, sin_ref))
        inputs, outputs = refs[:-2], refs[-2:]
        heads = [(i, n) for i, out in enumerate(outputs) for n in range(out.shape[1])]
        read = lambda i, n: [load(r.at[here, n, h], layout) for r in inputs[i::2] for h in halves]
        ahead = read(*heads[0])
        for (i, n), after in zip(heads, [*heads[1:], None]):
            # Start to load the next head before this one's results are written.
            x, ahead = ahead, read(*after) if after else []
            for h, value in zip(halves, turn_heads(options.eps, turn, layout, *x)):
                outputs[i][here, n, h] = value.astype(outputs[i].dtype)

    rope.__name__ = f"rope_norm{turn_heads.__name__}"
    arrays = [x.reshape(B * T, x.shape[2], H) for pair in pairs for x in pair]
    angles = [x.astype(jnp.float32).reshape(-1, H) for x in (cos_BTH, sin_BTH)]
    out_types = [like(x) for x in arrays[:2]]
    out = launch(rope, out_types, B * T // tokens, *angles, *arrays, interpret=options.interpret)
    return tuple(x.reshape(like_x.shape) for x, like_x in zip(out, pairs[0]))
