"""RoPE of new queries and keys, and new keys and values appended to KV pages, in one Triton kernel.

XLA makes a kernel of the rotation of queries, one of that of keys, and `paged_append` a third; a
launch takes most of the time of each.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention.paged import append
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.matmul.few_rows import MANY, are_fused

MOST_TOKENS = MANY - 1  # of a decode step of few rows; more were not timed


class Rotation(NamedTuple):
    """RoPE of new queries and keys, and their norm. cos, sin: repeated in both halves, sin negated
    in the first; b is B or 1. eps: of the RMS norm of each head, None without. gains: of queries
    and of keys in that norm, [H], None without."""

    cos_bTH: Float[Array, "b T H"]
    sin_bTH: Float[Array, "b T H"]
    eps: float | None = None
    gains: tuple[Float[Array, "H"], Float[Array, "H"]] | None = None


def supports_rope_append(q_BTNH: Array, new: tuple[Array, ...], pages: tuple[Any, ...]) -> bool:
    """Whether `rope_append` serves such queries, new keys and values, and their pages."""
    few = math.prod(q_BTNH.shape[:2]) <= MOST_TOKENS and q_BTNH.shape[-1] == new[0].shape[-1]
    plain = len(pages) == 2 and all(isinstance(x, Array) for x in pages)
    return few and plain and are_fused() and append.supports(target(), new) is None


def rope_append(
    q_BTNH: Float[Array, "B T N H"],
    new: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]],
    rotation: Rotation,
    pages: tuple[Array, ...],
    table_BW: Int[Array, "B W"],
    starts_B: Int[Array, "B"],
    counts_B: Int[Array, "B"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], tuple[Array, ...]]:
    """Rotate queries and keys, and write keys and values into their pages, in one Triton kernel.

    Returns the queries and the pages. new: keys and values. Other arguments as in `paged_append`.
    A norm with gains precedes the rotation; one without scales its result, as the rotation keeps
    the norm. Both round as the separate operations do. Needs `supports_rope_append`.
    """
    cos_bTH, sin_bTH, eps, gains = rotation
    arrays = (q_BTNH, *new), (cos_bTH, sin_bTH), gains, (table_BW, starts_B, counts_B), pages
    turned_BTNH, *filled = _rope_append(interpret, eps, *arrays)
    return turned_BTNH, tuple(filled)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rope_append(interpret: bool, eps: float | None, heads, tables, gains, numbers, pages):
    """One program per head of a token: of a query, a key or a value."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (B, T, N, H), K, size = heads[0].shape, heads[1].shape[2], pages[0].shape[1]
    W, shared = numbers[0].shape[1], len(tables[0]) == 1
    arrays, form = jax.tree.flatten((heads, tables, gains, numbers))
    half = H // 2

    def kernel(*refs):
        heads_refs, table_refs, gain_refs, numbers_refs = form.unflatten(refs[: len(arrays)])
        q_out, *page_refs = refs[-3:]
        n, t, b = (pl.program_id(i) for i in range(3))
        h_H = jnp.arange(pl.next_power_of_2(H))
        other_H, inside = jnp.where(h_H < half, h_H + half, h_H - half), h_H < H

        def read(ref, *index):
            return plgpu.load(ref.at[index], mask=inside, other=0.0).astype(jnp.float32)

        def turned(ref, head, gain_ref):
            x_H, other = read(ref, b, t, head, h_H), read(ref, b, t, head, other_H)
            scale = 1.0 if eps is None else jax.lax.rsqrt((x_H * x_H).sum(0) / H + eps)
            if gain_ref is not None:
                normed = lambda x, h: (x * scale * read(gain_ref, h)).astype(ref.dtype)
                x_H, other = (
                    normed(*of).astype(jnp.float32) for of in ((x_H, h_H), (other, other_H))
                )
            row = 0 if shared else b
            cos_H, sin_H = (read(table, row, t, h_H) for table in table_refs)
            y_H = x_H * cos_H + other * sin_H
            return (y_H if eps is None or gain_ref is not None else y_H * scale).astype(ref.dtype)

        def put(page_ref, head, x_H):
            table_ref, starts_ref, counts_ref = numbers_refs
            position = starts_ref[b] + t
            page = table_ref[b, jnp.minimum(jax.lax.div(position, size), W - 1)]
            at = page_ref.at[page, jax.lax.rem(position, size), head, h_H]
            plgpu.store(at, x_H.astype(page_ref.dtype), mask=inside & (t < counts_ref[b]))

        q_ref, k_ref, v_ref = heads_refs
        q_gain, k_gain = gain_refs or (None, None)

        @pl.when(n < N)
        def _():
            plgpu.store(q_out.at[b, t, n, h_H], turned(q_ref, n, q_gain), mask=inside)

        @pl.when((n >= N) & (n < N + K))
        def _():
            put(page_refs[0], n - N, turned(k_ref, n - N, k_gain))

        @pl.when(n >= N + K)
        def _():
            put(page_refs[1], n - N - K, read(v_ref, b, t, n - N - K, h_H))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (heads[0], *pages)]
    return pl.pallas_call(
        kernel,
        grid=(N + 2 * K, T, B),
        out_shape=shapes,
        input_output_aliases={len(arrays) + i: 1 + i for i in range(2)},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rope_append",
    )(*arrays, *pages)
