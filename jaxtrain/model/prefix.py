"""Virtual tokens: what every text begins with that is no text, but learned.

Prompt tuning (Lester et al. 2021, arXiv:2104.08691) learns their embeddings, prefix tuning (Li &
Liang 2021, arXiv:2101.00190) the keys and values of every layer. Either way they see nothing but
each other, so their keys and values are the same before every text: they are computed once a
microbatch, in a row of their own, and every text attends to them. With segments a text is one
segment of a row, without it is the row; so a packed document gets exactly what it gets alone, and
a prompt takes no place in the rows of the data.

They stand at the positions 0 .. P-1 and the text from P on: rotary angles, learned positions and
windows count them, as in peft. The text's first token takes nothing from them through the smear.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain.model.attention import Attend, AttentionOptions, attend_rows
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.init import normal
from jaxtrain.weights.params import declare

FLOOR = -1e30  # finite, so that a query out of reach of all virtual tokens gives no NaN
KeysValues = tuple[Array, Array]


class Prefix(nnx.Module):
    """Keys and values of P virtual tokens in every layer, as attention sees them (after the rope).

    They start near zero: at first they but take weight from the text's.
    """

    def __init__(self, c: ResolvedModel):
        shape = (c.depth, c.prefix or 0, c.kv_heads * c.head_dim)
        table = lambda: declare(
            shape, ("layers", None, "kv_heads"), normal(0.02), "embedding", group="prefix"
        )
        self.k, self.v = table(), table()

    def heads(self, head_dim: int) -> KeysValues:
        """k_LPKH, v_LPKH."""
        split = lambda x: x.reshape(*x.shape[:2], -1, head_dim)
        return split(self.k[...]), split(self.v[...])


def stacked(kv: list[Any]) -> KeysValues:
    """Keys and values [1, P, K, H] of each layer as k_LPKH, v_LPKH."""
    k, v = zip(*kv, strict=True)
    return jnp.concatenate(k), jnp.concatenate(v)


def prepend_kv(virtual: KeysValues, kv: list[Any]) -> list[Any]:
    """The virtual tokens' keys and values in front of each layer's [B, T, K, H]."""

    def prepend(own_PKH: Array, x_BTKH: Array) -> Array:
        rows = jnp.broadcast_to(own_PKH.astype(x_BTKH.dtype), (len(x_BTKH), *own_PKH.shape))
        return jnp.concatenate([rows, x_BTKH], axis=1)

    layers = zip(*virtual, kv, strict=True)
    return [(prepend(k, pair[0]), prepend(v, pair[1])) for k, v, pair in layers]


def self_attention_only(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, options: AttentionOptions, **more: Any
) -> Any:
    """`attend_rows` of the virtual tokens' own row, which is too short for most kernels."""
    return attend_rows(q_BTNH, k_BTKH, v_BTKH, options._replace(implementation="xla"), **more)


def offset_positions(positions_BT: Array | None, T: int, count: int) -> Array:
    """The positions of a text of T tokens behind so many virtual ones; None: from 0."""
    if positions_BT is None:
        positions_BT = jnp.arange(T, dtype=jnp.int32)[None]
    return positions_BT + count


def with_prefix_kv(own: KeysValues | None, attend: Attend, positions_BT: Array) -> Attend:
    """`attend` with a layer's virtual tokens, if there are any, in front of every text."""
    if own is None:
        return attend
    return functools.partial(attention, attend=attend, virtual=own, positions_BT=positions_BT)


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    options: AttentionOptions,
    *,
    attend: Attend,
    virtual: KeysValues,
    positions_BT: Int[Array, "b T"],
) -> Float[Array, "B T N H"]:
    """`attend` over the text and the virtual tokens: two softmaxes, joined by what they sum to.

    virtual: k_PKH, v_PKH. positions_BT: of the queries, virtual tokens counted.
    """
    y_BTNH, lse_BNT = attend(q_BTNH, k_BTKH, v_BTKH, options, return_lse=True)
    window, _, softcap, scale, *_ = options
    k_PKH, v_PKH = (x.astype(q_BTNH.dtype) for x in virtual)
    (B, T, N, H), (P, K, _) = q_BTNH.shape, k_PKH.shape
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    s_BTKGP = product("btkgh,pkh->btkgp", q_BTKGH, k_PKH) * scale
    if softcap is not None:
        s_BTKGP = softcap * jnp.tanh(s_BTKGP / softcap)
    if window is not None:
        seen_BTP = positions_BT[:, :, None] - jnp.arange(P).reshape(1, 1, P) <= window
        s_BTKGP = jnp.where(seen_BTP[:, :, None, None], s_BTKGP, FLOOR)
    p_BTKGP = jax.nn.softmax(s_BTKGP, axis=-1).astype(q_BTNH.dtype)
    own_BTNH = product("btkgp,pkh->btkgh", p_BTKGP, v_PKH).reshape(B, T, N, H)
    own_BTN = jax.nn.logsumexp(s_BTKGP, axis=-1).reshape(B, T, N)
    # Of padding, which sees no text, the log-sum-exp is -inf and the share 0.
    share_BTN1 = jax.nn.sigmoid(lse_BNT.swapaxes(1, 2) - own_BTN)[..., None]
    return (own_BTNH + share_BTN1 * (y_BTNH - own_BTNH)).astype(q_BTNH.dtype)
