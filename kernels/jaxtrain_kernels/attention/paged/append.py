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

TILE = 16  # tokens of a sequence, of which one program writes one head


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
    """One program per tile of tokens and head. Calls of a shape share one trace and one kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (B, T, K, H), size, n = new[0].shape, pages[0].shape[1], len(new)
    tile = min(TILE, pl.next_power_of_2(T))

    def kernel(*refs):
        new_refs, (table_ref, starts_ref, counts_ref) = refs[:n], refs[n : n + 3]
        k, b = pl.program_id(0), pl.program_id(2)
        t_T1 = (pl.program_id(1) * tile + jnp.arange(tile))[:, None]
        position_T1 = starts_ref[b] + t_T1
        index_T1 = jnp.minimum(jax.lax.div(position_T1, size), table_BW.shape[1] - 1)
        page_T1, slot_T1 = table_ref[b, index_T1], jax.lax.rem(position_T1, size)
        h_1H = jnp.arange(pl.next_power_of_2(H))[None]
        read_TH, kept_TH = ((h_1H < H) & (t_T1 < most) for most in (T, counts_ref[b]))
        for new_ref, out_ref in zip(new_refs, refs[-n:]):
            x_TH = plgpu.load(new_ref.at[b, t_T1, k, h_1H], mask=read_TH, other=0.0)
            target_TH = out_ref.at[page_T1, slot_T1, k, h_1H]
            plgpu.store(target_TH, x_TH.astype(out_ref.dtype), mask=kept_TH)

    return pl.pallas_call(
        kernel,
        grid=(K, pl.cdiv(T, tile), B),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        input_output_aliases={n + 3 + i: i for i in range(n)},
        compiler_params=plgpu.CompilerParams(num_warps=4 if tile > 1 else 1, num_stages=1),
        interpret=interpret,
        name="paged_append",
    )(*new, table_BW, starts_B, counts_B, *pages)


BACKENDS = {"triton": triton, "xla": xla}
