"""Attention over pages in XLA.

`xla` gathers a sequence's pages, without those that its window hides, into a contiguous copy, to
which two matmuls attend. `reduce`, for one token per sequence, multiplies and adds without matmuls,
so that XLA can fuse the gather.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtrain_kernels.attention import reference
from jaxtrain_kernels.attention.decode import Cache, Quantized, decode_attention

Pages = Float[Array, "P p K H"] | Quantized


def gather_pages(pages: Pages, table_BW: Array) -> tuple[Any, Any]:
    """Gather keys or values [B, S, K, H] in sequence order and, if they are 8-bit, their scales."""
    values, scales = pages if isinstance(pages, Quantized) else (pages, None)
    take = lambda x: x[table_BW].reshape(len(table_BW), -1, *x.shape[2:])
    return take(values), None if scales is None else take(scales)


def in_window(table_BW: Any, starts_B: Any, size: int, T: int, window: int | None) -> Any:
    """Pages that T queries of each sequence can see, and the position where the first begins."""
    W = table_BW.shape[1]
    seen = W if window is None else (window + T - 2) // size + 2
    if window is None or seen >= W:
        return table_BW, jnp.zeros_like(starts_B)
    first_B = jnp.clip((starts_B - window) // size, 0, W - seen)
    places_BW = first_B[:, None] + jnp.arange(seen)[None]
    return jnp.take_along_axis(table_BW, places_BW, axis=1), first_B * size


def xla(
    q_BTNH: Any, k_PpKH: Any, v_PpKH: Any, table_BW: Any, starts_B: Any, counts_B: Any,
    *, window: int | None, softcap: float | None, scale: float,
) -> Any:  # fmt: skip
    """Gather the pages in their own dtype; multiply scores and probabilities by the scales."""
    (B, T, N, H), size = q_BTNH.shape, jax.tree.leaves(k_PpKH)[0].shape[1]
    table_BW, begin_B = in_window(table_BW, starts_B, size, T, window)
    (k_BSKH, k_scale_BSK), (v_BSKH, v_scale_BSK) = (
        gather_pages(x, table_BW) for x in (k_PpKH, v_PpKH)
    )
    S, K = k_BSKH.shape[1:3]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH.astype(q_BTNH.dtype), preferred_element_type=wide
    )
    s_BKGTS *= scale if k_scale_BSK is None else by_head(k_scale_BSK) * scale
    if softcap is not None:
        s_BKGTS = softcap * jnp.tanh(s_BKGTS / softcap)
    position_BS = begin_B[:, None] + jnp.arange(S)[None]
    visible = reference.visible_pages(position_BS, T, starts_B, counts_B, window)
    s_BKGTS = jnp.where(visible, s_BKGTS, -jnp.inf)
    peak_BKGT1 = jnp.maximum(s_BKGTS.max(-1, keepdims=True), -1e30)
    p_BKGTS = jnp.exp(s_BKGTS - peak_BKGT1)
    total_BKGT1 = p_BKGTS.sum(-1, keepdims=True)
    p_BKGTS /= jnp.where(total_BKGT1 == 0, 1, total_BKGT1)
    dtype = q_BTNH.dtype
    if v_scale_BSK is not None:
        p_BKGTS *= by_head(v_scale_BSK)
        # Probabilities times scales are below float16's range.
        dtype = jnp.dtype(jnp.bfloat16) if dtype == jnp.float16 else dtype
    out_BTKGH = jnp.einsum(
        "BKGTS,BSKH->BTKGH", p_BKGTS.astype(dtype), v_BSKH.astype(dtype),
        preferred_element_type=wide,
    )  # fmt: skip
    return out_BTKGH.reshape(B, T, N, -1).astype(q_BTNH.dtype)


def reduce(
    q_B1NH: Any, k_PpKH: Any, v_PpKH: Any, table_BW: Any, starts_B: Any, counts_B: Any,
    *, window: int | None, softcap: float | None, scale: float,
) -> Any:  # fmt: skip
    """Attend with one token per sequence: `decode_attention` over the gathered pages."""
    size = jax.tree.leaves(k_PpKH)[0].shape[1]
    table_BW, begin_B = in_window(table_BW, starts_B, size, 1, window)
    lengths_B = jnp.where(counts_B > 0, starts_B + 1 - begin_B, 0)

    def rows(pages: Pages) -> Cache:
        values, scales = gather_pages(pages, table_BW)
        return values if scales is None else Quantized(values, scales)

    out_BNH = decode_attention(
        q_B1NH[:, 0], rows(k_PpKH), rows(v_PpKH), lengths_B, window=window, softcap=softcap,
        scale=scale, splits=1, implementation="reduce",
    )  # fmt: skip
    return out_BNH[:, None]


def by_head(scale_BSK: Any) -> Any:
    return scale_BSK.transpose(0, 2, 1)[:, :, None, None]
