"""Append new tokens to KV pages. `triton` writes keys and values in one launch, in place; `xla`
scatters each array.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxtrain_kernels.dispatch import Target, choose_backend, target, triton_unsupported
from jaxtrain_kernels.matmul.few_rows import are_fused

MOST_TOKENS = 256  # per call; one program writes one head of a token


def paged_append(
    pages: tuple[Array, ...],
    new: tuple[Array, ...],
    table_BW: Int[Array, "B W"],
    starts_B: Int[Array, "B"],
    counts_B: Int[Array, "B"],
    *,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Write new tokens [B, T, ..] into arrays of pages [P, p, ..] and return those arrays.

    Token t of sequence b goes to position starts_B[b] + t of its pages table_BW[b]; tokens from
    counts_B[b] on are dropped. implementation: `triton` or `xla`; None = the first that can serve,
    or `xla` where `few_rows.preferring` leaves the operations between matmuls to XLA.
    """
    reasons = {"triton": supports(target(), new), "xla": None}
    if implementation is None and not are_fused():
        implementation = "xla"
    signature = f"{new[0].dtype}{list(new[0].shape)} pages={list(pages[0].shape)}"
    name = choose_backend("paged_append", reasons, implementation, signature)
    return BACKENDS[name](pages, new, table_BW, starts_B, counts_B)


def supports(on: Target, new: tuple[Any, ...]) -> str | None:
    """The reason why `triton` cannot serve a call; None = it can."""
    x, *others = new
    if reason := triton_unsupported(on):
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {x.dtype}"
    if x.ndim != 4 or any(other.shape != x.shape for other in others):
        return "needs heads of one size"
    if (tokens := x.shape[0] * x.shape[1]) > MOST_TOKENS:
        return f"needs at most {MOST_TOKENS} tokens, got {tokens}"
    return None


def xla(pages, new, table_BW, starts_B, counts_B):
    """Backend of the public function: one scatter per array."""
    T, (count, size) = new[0].shape[1], pages[0].shape[:2]
    positions_BT = starts_B[:, None] + jnp.arange(T)[None]
    real_BT = jnp.arange(T)[None] < counts_B[:, None]
    page_BT = jnp.take_along_axis(table_BW, positions_BT // size, 1, mode="clip")
    page_BT = jnp.where(real_BT, page_BT, count)  # out of range: dropped
    put = lambda old, x: old.at[page_BT, positions_BT % size].set(x, mode="drop")
    return tuple(map(put, pages, new))


def triton(pages, new, table_BW, starts_B, counts_B, *, interpret=False):
    """Backend of the public function: one kernel for all arrays."""
    numbers = table_BW, starts_B, counts_B
    return tuple(_append(interpret, tuple(pages), tuple(new), *numbers))


@functools.partial(jax.jit, static_argnums=0)
def _append(interpret: bool, pages, new, table_BW, starts_B, counts_B):
    """One program per token and head. All calls of a shape share one trace and one kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (B, T, K, H), size, n = new[0].shape, pages[0].shape[1], len(new)

    def kernel(*refs):
        new_refs, (table_ref, starts_ref, counts_ref) = refs[:n], refs[n : n + 3]
        k, t, b = (pl.program_id(i) for i in range(3))
        position = starts_ref[b] + t
        index = jnp.minimum(jax.lax.div(position, size), table_BW.shape[1] - 1)
        page, slot = table_ref[b, index], jax.lax.rem(position, size)
        h_H = jnp.arange(pl.next_power_of_2(H))
        inside = h_H < H
        kept = inside & (t < counts_ref[b])
        for new_ref, out_ref in zip(new_refs, refs[-n:]):
            x_H = plgpu.load(new_ref.at[b, t, k, h_H], mask=inside, other=0.0)
            plgpu.store(out_ref.at[page, slot, k, h_H], x_H.astype(out_ref.dtype), mask=kept)

    return pl.pallas_call(
        kernel,
        grid=(K, T, B),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        input_output_aliases={n + 3 + i: i for i in range(n)},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_append",
    )(*new, table_BW, starts_B, counts_B, *pages)


BACKENDS = {"triton": triton, "xla": xla}
