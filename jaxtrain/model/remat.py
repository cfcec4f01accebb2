"""Activation checkpointing: policies for recomputing in the backward pass (Chen et al. 2016).

`none` saves everything. `attention` and `ffn` recompute that half of a layer. The others recompute
the whole layer except for the values that their policy saves (compressed ones:
`saved_activations.py`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jaxtrain_kernels.attention import RESULT
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.matmul import fp8

from jaxtrain.model.saved_activations import COMPRESSIONS, save_compressed
from jaxtrain.parallel import constrain, num_shards
from jaxtrain.settings import UserError

INPUT = "block_input"


def matmuls(primitive: Primitive, *arrays: object, **options: object) -> bool:
    """jax.checkpoint policy: save the results of matmuls, and of attention with its LSE."""
    # cuDNN's and fa4-jax's attention are primitives; the results of our own kernels are named.
    return (
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *arrays, **options)
        or primitive.name.startswith(("dot_product_attention_fwd", "fa4_fwd"))
        or options.get("name") == RESULT
    )


def matmuls_and_casts(primitive: Primitive, *arrays: object, **options: object) -> bool:
    """jax.checkpoint policy: as `matmuls`, and save the float8 inputs of matmuls."""
    return matmuls(primitive, *arrays, **options) or options.get("name") == fp8.INPUT


def all_but_slices(primitive: Primitive, *_: object, **__: object) -> bool:
    """jax.checkpoint policy: recompute nothing but the slices of stacked weights."""
    return primitive.name not in ("slice", "squeeze", "split")


# Value of `remat` -> policy of jax.checkpoint, which selects the values of the layer to save.
POLICIES: dict[str, Any] = {
    "block": None,
    **dict.fromkeys(COMPRESSIONS),
    "dots": matmuls,
    "dots_fp8": matmuls_and_casts,
    # The layer's input is named, not its output: a scan's output would not be offloaded.
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def layer(
    run: Callable[..., Any], remat: str, scanned: bool = False, key: jax.Array | None = None
) -> Callable[..., Any]:
    """`run(stream, ...)` of a whole layer, with recomputation as `remat` specifies.

    key: PRNG key of a step and layer, for compression with stochastic rounding.

    scanned: forward and backward pass are separate loops, so XLA cannot merge recomputed values
    with the forward pass's (CSE), and no barrier is needed. Such a barrier before the backward pass
    copies all saved values, and no collective starts before it.

    Raises UserError for `offload` on a device without separate host memory.
    """
    if remat == "none" and scanned:
        return jax.checkpoint(run, policy=all_but_slices, prevent_cse=False)
    if remat not in POLICIES:
        return run
    if remat in COMPRESSIONS:
        return save_compressed(run, COMPRESSIONS[remat], scanned, key, all_but_slices)
    if remat != "offload":
        return jax.checkpoint(run, policy=POLICIES[remat], prevent_cse=not scanned)
    if target().platform not in ("cuda", "tpu"):
        raise UserError(
            f"model.remat=offload: a {target().platform} has no memory besides the host's; "
            "model.remat=block keeps as little"
        )

    def named(stream: Any, *rest: Any) -> Any:
        return run(jax.tree.map(lambda x: checkpoint_name(x, INPUT), stream), *rest)

    return jax.checkpoint(named, policy=POLICIES[remat], prevent_cse=not scanned)


def checkpoint_sublayer(name: str, run: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`run`, the half of a layer called `name`, recomputed if `remat` is that name."""
    return jax.checkpoint(run) if remat == name else run


def tiled(run: Callable[[jax.Array], jax.Array], x_BTD: jax.Array, tiles: int) -> jax.Array:
    """Apply the token-wise function `run` to tiles of the sequences, one tile after another.

    Only one tile's intermediate values exist at a time, in the backward pass as well. Sequences
    that do not divide (prompts) are one tile. A tile has tokens of every device that holds part of
    the sequence: a tile of adjacent tokens would be on one device, and be sent to all.
    """
    B, T, D = x_BTD.shape
    if tiles == 1 or T % tiles:
        return run(x_BTD)
    shards = num_shards("sequence", T // tiles)
    parts = jnp.moveaxis(x_BTD.reshape(B, shards, tiles, -1, D), 2, 0).reshape(tiles, B, -1, D)
    parts = jax.lax.map(jax.checkpoint(run), constrain(parts, None, "batch", "sequence", None))
    parts = constrain(parts, None, "batch", "sequence", None).reshape(tiles, B, shards, -1, D)
    return jnp.moveaxis(parts, 0, 2).reshape(B, T, D)
