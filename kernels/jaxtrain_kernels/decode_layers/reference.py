"""The specification in plain jnp: one row, bfloat16 between the steps, sums in float32."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.decode_layers.packing import unpack_weights
from jaxtrain_kernels.dispatch import Target


def supports(target: Target, shape, x0_D, pages) -> None:
    return None


def decode_layers(shape, weights, x0_D, cos_h, sin_h, values_LC, pages, table_W, start, count):
    """As the public function."""
    dtype, s = x0_D.dtype, shape
    N, K, H = s.heads, s.kv_heads, s.head_dim
    wide = lambda x: x.astype(jnp.float32)
    matrices = [wide(unpack_weights(w)) for w in weights[:4]]
    product = lambda w_OI, x_I: (w_OI @ wide(x_I)).astype(dtype)

    def normed(x):
        x = wide(x)
        return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + s.eps)).astype(dtype)

    def turned(x_NH):
        """Rotated, then over the root mean square."""
        x = wide(x_NH)
        a, b = jnp.split(x, 2, axis=-1)
        cos_1h, sin_1h = cos_h[None], sin_h[None]
        y = jnp.concatenate([a * cos_1h - b * sin_1h, b * cos_1h + a * sin_1h], axis=-1)
        return (y * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + s.eps)).astype(dtype)

    x_D, middle_D, branch_D, kept = x0_D, x0_D, jnp.zeros_like(x0_D), []
    for layer, window in enumerate(s.windows):
        qkv, out, up, down = (w[layer] for w in matrices)
        a, b = weights.scales_L2[layer]
        x_D = (a * wide((x_D + branch_D).astype(dtype)) + b * wide(x0_D)).astype(dtype)
        y_R = product(qkv, normed(x_D))
        q_C, k_C, v_C, gate_k = jnp.split(y_R, [N * H, (N + K) * H, (N + 2 * K) * H])
        gate_K = 3 * jax.nn.sigmoid(gate_k[:K])
        v_KH = v_C.reshape(K, H) + gate_K[:, None] * values_LC[layer].reshape(K, H)
        q_NH, k_KH = turned(q_C.reshape(N, H)), turned(k_C.reshape(K, H))
        k_pages, v_pages = (x[layer] for x in pages)
        size = k_pages.shape[1]
        page, place = table_W[start // size], start % size
        page = jnp.where(count > 0, page, len(k_pages))  # beyond the last: dropped
        k_pages = k_pages.at[page, place].set(k_KH, mode="drop")
        v_pages = v_pages.at[page, place].set(v_KH, mode="drop")
        kept.append((k_pages, v_pages))
        k_SKH, v_SKH = (p[table_W].reshape(-1, K, H) for p in (k_pages, v_pages))
        place_S = jnp.arange(len(k_SKH))
        seen_S = (place_S <= start) & (place_S >= start - window)
        scores = jnp.einsum("kgh,skh->kgs", wide(q_NH.reshape(K, -1, H)), wide(k_SKH)) * s.scale
        p_KGS = jax.nn.softmax(jnp.where(seen_S[None, None], scores, -jnp.inf), axis=-1)
        y_C = jnp.einsum("kgs,skh->kgh", p_KGS, wide(v_SKH)).astype(dtype).reshape(-1)
        x_D = x_D + product(out, y_C)
        h_F = wide(product(up, normed(x_D)))
        branch_D = product(down, jnp.where(h_F > 0, h_F * h_F, 0).astype(dtype))
        if layer == s.middle:
            middle_D = x_D + branch_D
    return x_D + branch_D, middle_D, tuple(jnp.stack(x) for x in zip(*kept))
