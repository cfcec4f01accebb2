"""Megakernel: one launch runs all layers (nanochat's) of a decode step of one sequence.

A layer is x = a (x + branch) + b x0; then attention of norm(x), with QK norm after RoPE and gated
value embeddings added to the values; then a squared-ReLU network, whose result is the next layer's
branch. The bfloat16 roundings are the same as when the layers run one by one.

An engine with one slot uses it by default (`EngineOptions.megakernel`).
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from jaxtrain_kernels.decode_layers import hopper, reference, triton
from jaxtrain_kernels.decode_layers.packing import (
    LayersShape,
    LayersWeights,
    PackedLayers,
    StreamedLayers,
    pack_weights,
)
from jaxtrain_kernels.dispatch import choose_backend, target

# The first backend that can serve the call, with weights packed for it, is the default.
BACKENDS = {"hopper": hopper, "triton": triton, "reference": reference}
WEIGHTS = {
    "hopper": StreamedLayers,
    "triton": PackedLayers,
}  # of each kernel; the reference has both

__all__ = [
    "BACKENDS",
    "LayersShape",
    "LayersWeights",
    "PackedLayers",
    "StreamedLayers",
    "choose_kernel",
    "decode_layers",
    "pack_matrices",
    "pack_weights",
]


def choose_kernel(shape: LayersShape, x0_D: Any, pages: Any) -> tuple[str, str | None]:
    """Name of the fastest kernel that can serve such calls, and None; or of one that cannot, and
    the reason. x0_D and pages may be abstract."""
    name, reason = "", None
    for name in WEIGHTS:
        if not (reason := BACKENDS[name].supports(target(), shape, x0_D, pages)):
            break
    return name, reason


def pack_matrices(
    kernel: str, shape: LayersShape, matrices: Sequence[Sequence[Array]],
    scales_L2: Float[Array, "L 2"],
) -> LayersWeights:  # fmt: skip
    """Copy matrices into the layout of a kernel. matrices: of each layer [inputs, outputs], for
    queries, keys, values and gates; for attention's output; for the network's two products."""
    if kernel == "hopper":
        return hopper.pack_matrices(shape, matrices, scales_L2)
    qkv, out, up, down = map(pack_weights, matrices)
    return PackedLayers(qkv, out, up, down, scales_L2)


def decode_layers(
    shape: LayersShape,
    weights: LayersWeights,
    x0_D: Float[Array, "D"],
    cos_h: Float[Array, "h"],
    sin_h: Float[Array, "h"],
    values_LC: Float[Array, "L C"],
    pages: tuple[Float[Array, "L P p K H"], Float[Array, "L P p K H"]],
    table_W: Int[Array, "W"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "D"], Float[Array, "D"], tuple[Array, Array], Bool[Array, ""]]:
    """Return the residual stream after the last and the middle layer, the updated pages, and
    whether the kernel timed out: its programs wait for each other, and stop after some seconds.

    x0_D: the token's embedding. cos_h, sin_h: of its rotary angles, float32, h = H / 2. values_LC:
    the token's value embeddings, zeros in layers without them. pages: keys and values of all
    layers; table_W lists the sequence's pages. start: position of the token; the pages hold `start`
    earlier tokens. count: 1, or 0 for an idle slot, whose pages stay unchanged.
    Raises ValueError for an unknown implementation, NotImplementedError for one that cannot serve.
    """
    on, reasons = target(), {}
    for name, one in BACKENDS.items():
        reasons[name] = one.supports(on, shape, x0_D, pages)
        if not isinstance(weights, WEIGHTS.get(name, type(weights))):
            reasons[name] = "needs weights that are packed for it"
    signature = f"{x0_D.dtype}[{shape.depth}, {shape.width}] pages={list(pages[0].shape)}"
    name = choose_backend("decode_layers", reasons, implementation, signature)
    arrays = weights, x0_D, cos_h, sin_h, values_LC, pages, table_W, start, count
    return BACKENDS[name].decode_layers(shape, *arrays)
