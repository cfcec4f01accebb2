"""Random token dropping (Random-LTD, Yao et al. 2022, arXiv:2211.11586).

In a training step each layer but the first and the last takes a share of a row's tokens, drawn anew
for each layer and row; the others skip it. What a layer takes is gathered into a shorter row, so
that the others cost no time: tokens stay in order and keep their positions and documents, and a
window counts the tokens that the layer has. Evaluation and decoding use all tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Int

from jaxtrain.model.attention import LayerInputs
from jaxtrain.model.config import round_up
from jaxtrain.model.fused_ops import Stream


def kept_tokens(length: int, rate: float) -> int:
    """Tokens of a row that a layer takes: a multiple of a sixteenth of the row."""
    return min(length, round_up(round((1 - rate) * length), max(1, length // 16)))


def draw_tokens(key: Array, index: ArrayLike, rows: int, length: int, rate: float) -> Array:
    """int32 [B, K]: places of the tokens that layer `index` takes, in order."""
    order_BT = jax.random.uniform(jax.random.fold_in(key, index), (rows, length))
    return jnp.sort(jnp.argsort(order_BT, axis=1)[:, : kept_tokens(length, rate)], axis=1)


def gather(x: Array, places_BK: Int[Array, "B K"]) -> Array:
    """The tokens at these places of x [B or 1, T, ...]: [B, K, ...]."""
    x = jnp.broadcast_to(x, (len(places_BK), *x.shape[1:]))
    return jax.vmap(lambda row, at: row.at[at].get(unique_indices=True, indices_are_sorted=True))(
        x, places_BK
    )


def shorter(
    stream: Stream, inputs: LayerInputs, places_BK: Int[Array, "B K"]
) -> tuple[Stream, LayerInputs]:
    """What a layer reads, of the tokens at these places alone."""
    take = lambda tree: jax.tree.map(lambda x: gather(x, places_BK), tree)
    names = ("x0_BTD", "tokens_BT", "positions_BT", "rope", "short_rope", "segments_BT")
    inputs = inputs._replace(**{name: take(getattr(inputs, name)) for name in names})
    return stream._replace(x_BTD=take(stream.x_BTD)), inputs


def put_back(stream: Stream, layer: Stream, places_BK: Int[Array, "B K"]) -> Stream:
    """The stream with the layer's results in their places."""
    put = lambda row, at, new: row.at[at].set(new, unique_indices=True, indices_are_sorted=True)
    return layer._replace(x_BTD=jax.vmap(put)(stream.x_BTD, places_BK, layer.x_BTD))
