"""Attention of new tokens, one or many per sequence, over a paged KV cache.

`hopper` (one token) and `triton` (a few) read the pages in place. `xla` (any number of tokens) and
`reduce` (one token) first gather the pages into a copy.
"""

from jaxtyping import Array, Float, Int

from jaxtrain_kernels.attention import reference
from jaxtrain_kernels.attention.decode import Quantized
from jaxtrain_kernels.attention.paged import hopper, triton
from jaxtrain_kernels.attention.paged.xla import Pages, reduce, xla
from jaxtrain_kernels.dispatch import choose_backend, target

# Fastest first.
BACKENDS = {
    "hopper": hopper.paged_attention,
    "triton": triton.paged_attention,
    "xla": xla,
    "reduce": reduce,
}


def paged_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_PpKH: Pages,
    v_PpKH: Pages,
    table_BW: Int[Array, "B W"],
    starts_B: Int[Array, "B"],
    counts_B: Int[Array, "B"],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention of queries at positions starts_B + t over the pages of their sequence.

    k_PpKH, v_PpKH: P pages of p tokens, in the inputs' dtype or in 8 bits (`quantize`). table_BW:
    page table, the pages of each sequence in order; entries after its last page are any valid page.
    starts_B: number of tokens before the new ones. counts_B: number of new tokens, whose keys are
    already in the pages. Other entries of the pages are masked, but must be finite. window, softcap
    and scale as in `attention`. Queries from counts_B on (padding, an idle slot) give 0.

    implementation: `hopper`, `triton`, `xla`, `reduce` or `reference`; None = `hopper` where it can
    serve and was measured to be faster (`hopper.slower`), else `triton` where it can, else `xla`.
    """
    values = k_PpKH.values_BSKH if isinstance(k_PpKH, Quantized) else k_PpKH
    W, H = table_BW.shape[1], q_BTNH.shape[-1]
    signature = f"{q_BTNH.dtype}{list(q_BTNH.shape)} pages={values.dtype}{list(values.shape)} W={W}"
    why_not = reasons(q_BTNH, k_PpKH, softcap)
    if implementation is None and why_not["hopper"] is None:
        why_not["hopper"] = hopper.slower(values, table_BW.size * values.shape[1])
    name = choose_backend("paged_attention", why_not, implementation, signature)
    backend = reference.paged_attention if name == "reference" else BACKENDS[name]
    return backend(
        q_BTNH, k_PpKH, v_PpKH, table_BW, starts_B, counts_B, window=window, softcap=softcap,
        scale=H**-0.5 if scale is None else scale,
    )  # fmt: skip


def reasons(
    q_BTNH: Float[Array, "B T N H"], k_PpKH: Pages, softcap: float | None = None
) -> dict[str, str | None]:
    """Reasons why each backend cannot serve such queries and pages; None = it can."""
    values = k_PpKH.values_BSKH if isinstance(k_PpKH, Quantized) else k_PpKH
    return {
        "hopper": hopper.supports(target(), q_BTNH, values, softcap),
        "triton": triton.supports(target(), q_BTNH, values),
        "xla": None,
        "reduce": None if q_BTNH.shape[1] == 1 else "takes one token a row",
        "reference": None,
    }
