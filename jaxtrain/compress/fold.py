"""Folding of input scales into the preceding operation, as in AWQ and SmoothQuant
(arXiv:2306.00978, arXiv:2211.10438). The function stays the same, and the quantized matrices need
no input scales.

Matrices that read the same inputs share their scales. Q, K and V read a norm with a gain, gate and
up another one: the gain is divided by the scales. The output projection reads sums of values: the
columns of the value projection are divided, and query heads of one value head share its scales. In
a gated FFN the down projection reads a product with up: up's columns are divided.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxtrain.compress.calibrate import Inputs
from jaxtrain.model import ResolvedModel
from jaxtrain.model.layers import GATED

Reduce = Callable[..., Array]  # jnp.mean or jnp.max


class Fold(NamedTuple):
    """`readers` share their inputs, which are the last dim of `makers`.

    heads: (value heads, query heads per value head), if a maker's channel is read several times.
    """

    readers: tuple[str, ...]
    makers: tuple[str, ...]
    heads: tuple[int, int] = (1, 1)

    def pooled(self, x_K: Float[Array, " K"], reduce: Reduce) -> Float[Array, " K"]:
        """x reduced over the inputs that come from one maker channel, and broadcast back."""
        x = x_K.reshape(*self.heads, -1)
        return jnp.broadcast_to(reduce(x, axis=1, keepdims=True), x.shape).reshape(-1)


# (concatenated readers [K, N], statistics of their inputs, the fold) -> scales [K]
Scales = Callable[[Array, Inputs, Fold], Array]


def folds_of(c: ResolvedModel) -> tuple[Fold, ...]:
    """The folds of each layer. None for norms without gains, MoE, shared KV, MLA or value
    embeddings."""
    changed_values = c.share_kv or c.mla or c.value_embeddings
    if not (c.norm_gain and c.block_norm) or c.moe or changed_values:
        return ()
    attention = lambda *names: tuple(f"blocks/attention/{name}" for name in names)
    ffn = lambda *names: tuple(f"blocks/ffn/{name}" for name in names)
    gated = c.ffn in GATED
    found = (
        Fold(attention("q", "k", "v"), ("blocks/attention_gain", "blocks/attention_shift")),
        Fold(attention("out"), attention("v", "v_bias"), (c.kv_heads, c.heads // c.kv_heads)),
        Fold(ffn("gate", "up") if gated else ffn("up"), ("blocks/ffn_gain", "blocks/ffn_shift")),
    )
    return (*found, Fold(ffn("down"), ffn("up", "up_bias"))) if gated else found


def fold_layer(
    folds: tuple[Fold, ...],
    arrays: Mapping[str, np.ndarray],
    inputs: Mapping[str, Inputs],
    scales_of: Scales,
) -> dict[str, np.ndarray]:
    """The float32 arrays of one layer with all scales folded; arrays outside of folds are omitted.

    arrays: matrices [K, N] and vectors by name. inputs: statistics of the matrices' inputs.
    """
    found = {
        name: np.asarray(arrays[name], np.float32)
        for fold in folds
        for name in (*fold.readers, *fold.makers)
        if name in arrays
    }
    for fold in folds:
        side_by_side = jnp.concatenate(
            [jnp.asarray(arrays[n], jnp.float32) for n in fold.readers], 1
        )
        seen = inputs[fold.readers[0]]
        seen = seen._replace(
            magnitude_K=fold.pooled(jnp.asarray(seen.magnitude_K), jnp.mean),
            amax_K=fold.pooled(jnp.asarray(seen.amax_K), jnp.max),
        )
        scales_K = np.asarray(scales_of(side_by_side, seen, fold), np.float32)
        for name in fold.readers:
            found[name] = found[name] * scales_K[:, None]
        of_maker = scales_K.reshape(*fold.heads, -1)[:, 0].reshape(-1)
        for name in fold.makers:
            if name in found:
                found[name] = found[name] / of_maker
    return found
