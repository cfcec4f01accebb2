"""What the backward pass computes again instead of keeping it (Chen et al. 2016), by name.

`none` keeps everything. `attention` and `ffn` compute that half of a layer again, the others the
whole layer but for what their policy keeps.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jaxtrain_kernels.attention import RESULT
from jaxtrain_kernels.dispatch import target

from jaxtrain.model.saved_activations import COMPRESSIONS, save_compressed
from jaxtrain.parallel import constrain, num_shards
from jaxtrain.settings import UserError

INPUT = "block_input"


def matmuls(primitive: Primitive, *arrays: object, **options: object) -> bool:
    """A policy of jax.checkpoint: keep what a matmul gives, and attention with its LSE."""
    # cuDNN's is a primitive of JAX's own, ours are named.
    return (
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *arrays, **options)
        or primitive.name.startswith("dot_product_attention_fwd")
        or options.get("name") == RESULT
    )


def all_but_slices(primitive: Primitive, *_: object, **__: object) -> bool:
    """A policy of jax.checkpoint: nothing is computed again, but weights are cut out again."""
    return primitive.name not in ("slice", "squeeze", "split")


# Value of `remat` -> the policy of jax.checkpoint; it says which values of the layer are kept.
POLICIES: dict[str, Any] = {
    "block": None,
    **dict.fromkeys(COMPRESSIONS),
    "dots": matmuls,
    # The layer's input is named, not its output: of a scan's output nothing would be moved.
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
    """`run(stream, ...)` of a whole layer, recomputed as `remat` says.

    key: of a training step and a layer, for what is compressed with stochastic rounding.

    scanned: forward and backward are loops of their own, so that nothing need keep XLA from taking
    the one's results for the other's. What does (a barrier in front of the backward pass) copies
    all that was kept, and lets no collective start before.

    Raises UserError for an offload that the device has no host memory for.
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
    """A layer's half of this name, recomputed if `remat` names it."""
    return jax.checkpoint(run) if remat == name else run


def tiled(run: Callable[[jax.Array], jax.Array], x_BTD: jax.Array, tiles: int) -> jax.Array:
    """`run`, which takes each token by itself, over parts of the rows, one after another.

    Only one part's intermediate values exist at a time, in the backward pass as well. Rows that do
    not divide (prompts) are taken whole. A part has tokens of each device that holds some of the
    row: parts of neighbours would lie on one device, and be sent to all.
    """
    B, T, D = x_BTD.shape
    if tiles == 1 or T % tiles:
        return run(x_BTD)
    shards = num_shards("sequence", T // tiles)
    parts = jnp.moveaxis(x_BTD.reshape(B, shards, tiles, -1, D), 2, 0).reshape(tiles, B, -1, D)
    parts = jax.lax.map(jax.checkpoint(run), constrain(parts, None, "batch", "sequence", None))
    parts = constrain(parts, None, "batch", "sequence", None).reshape(tiles, B, shards, -1, D)
    return jnp.moveaxis(parts, 0, 2).reshape(B, T, D)
