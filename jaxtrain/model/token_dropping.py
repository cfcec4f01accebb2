"""Random token dropping (Random-LTD, Yao et al. 2022, arXiv:2211.11586).

In a training step each layer except the first and last keeps a share of a row's tokens, drawn per
layer and row; the others skip the layer. The kept tokens are gathered into a shorter row, so that
dropped tokens cost no time. They stay in order and keep their positions and segment ids; a window
counts kept tokens. Evaluation and decoding use all tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Int

from jaxtrain.model.attention import LayerInputs
from jaxtrain.model.config import round_up
from jaxtrain.model.fused_ops import Stream


def kept_tokens(length: int, rate: float) -> int:
    """Number of tokens of a row that a layer keeps: a multiple of a sixteenth of the row."""
    return min(length, round_up(round((1 - rate) * length), max(1, length // 16)))


def draw_tokens(key: Array, index: ArrayLike, rows: int, length: int, rate: float) -> Array:
    """Draw the indices of the tokens that layer `index` keeps, in order, int32 [B, K]."""
    order_BT = jax.random.uniform(jax.random.fold_in(key, index), (rows, length))
    return jnp.sort(jnp.argsort(order_BT, axis=1)[:, : kept_tokens(length, rate)], axis=1)


def gather(x: Array, places_BK: Int[Array, "B K"]) -> Array:
    """Gather the tokens at these indices of x [B or 1, T, ...]: [B, K, ...]."""
    x = jnp.broadcast_to(x, (len(places_BK), *x.shape[1:]))
    return jax.vmap(lambda row, at: row.at[at].get(unique_indices=True, indices_are_sorted=True))(
        x, places_BK
    )


def shorter(
    stream: Stream, inputs: LayerInputs, places_BK: Int[Array, "B K"]
) -> tuple[Stream, LayerInputs]:
    """A layer's inputs with only the tokens at these indices."""
    take = lambda tree: jax.tree.map(lambda x: gather(x, places_BK), tree)
    names = ("x0_BTD", "tokens_BT", "positions_BT", "rope", "short_rope", "segments_BT")
    inputs = inputs._replace(**{name: take(getattr(inputs, name)) for name in names})
    return stream._replace(x_BTD=take(stream.x_BTD)), inputs


def put_back(stream: Stream, layer: Stream, places_BK: Int[Array, "B K"]) -> Stream:
    """Scatter the layer's results back into the stream."""
    put = lambda row, at, new: row.at[at].set(new, unique_indices=True, indices_are_sorted=True)
    return layer._replace(x_BTD=jax.vmap(put)(stream.x_BTD, places_BK, layer.x_BTD))
