"""Reference implementation in plain jnp: one sequence, bfloat16 between steps, sums in float32.

Matmuls have float32 precision on a GPU, too, where XLA would use TF32 by default.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain_kernels.decode_layers.hopper.order import from_stream, slot_shape
from jaxtrain_kernels.decode_layers.packing import LayersShape, PackedLayers, unpack_weights
from jaxtrain_kernels.dispatch import Target

Pages = tuple[Array, Array]


def supports(target: Target, shape, x0_D, pages) -> None:
    return None


class TokenPlace(NamedTuple):
    """Rotary angles, page table, position and count of the new token: the public function's
    arguments."""

    cos_h: Array
    sin_h: Array
    table_W: Array
    start: Array
    count: Array


def wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def packed_matmul(packed_Oi: Array, x_I: Array) -> Array:
    """Multiply a packed matrix by a vector: [O], in float32."""
    return exact_matmul(unpack_weights(packed_Oi), x_I)


def exact_matmul(w_OI: Array, x_I: Array) -> Array:
    return jnp.matmul(wide(w_OI), wide(x_I), precision=jax.lax.Precision.HIGHEST)


def rms_normed(s: LayersShape, x: Array) -> Array:
    y = wide(x)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + s.eps)).astype(x.dtype)


def rotated(s: LayersShape, x_NH: Array, token: TokenPlace) -> Array:
    """Rotate, then divide by the root mean square."""
    x = wide(x_NH)
    a, b = jnp.split(x, 2, axis=-1)
    cos_1h, sin_1h = token.cos_h[None], token.sin_h[None]
    y = jnp.concatenate([a * cos_1h - b * sin_1h, b * cos_1h + a * sin_1h], axis=-1)
    return (y * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + s.eps)).astype(x_NH.dtype)


def add_scaled(scales_2: Array, x_D: Array, x0_D: Array) -> Array:
    """Residual stream at the start of a layer: a x + b x0."""
    a, b = scales_2
    return (a * wide(x_D) + b * wide(x0_D)).astype(x0_D.dtype)


def attend_token(
    s: LayersShape, y_R: Array, values_C: Array, token: TokenPlace, pages: Pages,
    window: Array | int,
) -> tuple[Float[Array, "C"], Pages]:  # fmt: skip
    """Return the heads' outputs in float32, and the layer's pages with the new token. y_R: result
    of the layer's first matmul. pages: of one layer."""
    N, K, H = s.heads, s.kv_heads, s.head_dim
    q_C, k_C, v_C, gate_k = jnp.split(y_R, [N * H, (N + K) * H, (N + 2 * K) * H])
    gate_K = 3 * jax.nn.sigmoid(gate_k[:K])
    v_KH = v_C.reshape(K, H) + gate_K[:, None] * values_C.reshape(K, H)
    q_NH, k_KH = rotated(s, q_C.reshape(N, H), token), rotated(s, k_C.reshape(K, H), token)
    size = pages[0].shape[1]
    page, slot = token.table_W[token.start // size], token.start % size
    page = jnp.where(token.count > 0, page, len(pages[0]))  # out of range: dropped
    kept = [x.at[page, slot].set(new, mode="drop") for x, new in zip(pages, (k_KH, v_KH))]
    k_SKH, v_SKH = (wide(x[token.table_W].reshape(-1, K, H)) for x in kept)
    place_S = jnp.arange(len(k_SKH))
    seen_S = (place_S <= token.start) & (place_S >= token.start - window)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("kgh,skh->kgs", wide(q_NH.reshape(K, -1, H)), k_SKH, precision=exact)
    p_KGS = jax.nn.softmax(jnp.where(seen_S[None, None], scores * s.scale, -jnp.inf), axis=-1)
    return jnp.einsum("kgs,skh->kgh", p_KGS, v_SKH, precision=exact).reshape(-1), (kept[0], kept[1])


def squared_relu(h_F: Array) -> Array:
    """Squared ReLU, in float32, of a rounded matmul result."""
    return jnp.where(h_F > 0, wide(h_F) * wide(h_F), 0)


def decode_layers(shape, weights, x0_D, cos_h, sin_h, values_LC, pages, table_W, start, count):
    """Backend of the public function."""
    dtype, s = x0_D.dtype, shape
    token = TokenPlace(cos_h, sin_h, table_W, start, count)
    x_D, middle_D, branch_D, kept = x0_D, x0_D, jnp.zeros_like(x0_D), []
    is_packed, slot = isinstance(weights, PackedLayers), slot_shape(s)
    rows = unpack_weights if is_packed else functools.partial(from_stream, slot)
    for layer, window in enumerate(s.windows):
        qkv, out, up, down = (rows(w[layer]) for w in weights[:4])
        x_D = add_scaled(weights.scales_L2[layer], x_D + branch_D, x0_D)
        y_R = exact_matmul(qkv, rms_normed(s, x_D)).astype(dtype)
        own = pages[0][layer], pages[1][layer]
        y_C, own = attend_token(s, y_R, values_LC[layer], token, own, window)
        kept.append(own)
        x_D = x_D + exact_matmul(out, y_C.astype(dtype)).astype(dtype)
        h_F = squared_relu(exact_matmul(up, rms_normed(s, x_D)).astype(dtype)).astype(dtype)
        branch_D = exact_matmul(down, h_F).astype(dtype)
        if layer == s.middle:
            middle_D = x_D + branch_D
    pages = tuple(jnp.stack(x) for x in zip(*kept))
    return x_D + branch_D, middle_D, pages, jnp.bool_(False)
