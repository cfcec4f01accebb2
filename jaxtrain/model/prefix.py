"""Virtual tokens: learned tokens before every sequence (prompt tuning and prefix tuning).

Prompt tuning (Lester et al. 2021, arXiv:2104.08691) learns their embeddings, prefix tuning (Li &
Liang 2021, arXiv:2101.00190) the keys and values of every layer. In both cases they attend only to
each other, so their keys and values are the same for every sequence. They are computed once per
microbatch, in a separate row, and every sequence attends to them. With segment ids, a sequence is
one segment of a row, else the whole row. So a packed document gets exactly the same result as
alone, and virtual tokens take no positions in the rows of the data.

They have the positions 0 .. P-1, and the sequence starts at P: rotary angles, learned positions and
windows count them, as in peft. The smear does not mix them into the sequence's first token.
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

FLOOR = -1e30  # finite, so that a query whose window has no virtual token gives no NaN
KeysValues = tuple[Array, Array]


class Prefix(nnx.Module):
    """Keys and values of P virtual tokens in every layer, after RoPE.

    They start near zero, so at first they only take attention weight from the sequence.
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
    """Stack keys and values [1, P, K, H] of each layer into k_LPKH, v_LPKH."""
    k, v = zip(*kv, strict=True)
    return jnp.concatenate(k), jnp.concatenate(v)


def prepend_kv(virtual: KeysValues, kv: list[Any]) -> list[Any]:
    """Prepend the virtual tokens' keys and values to each layer's [B, T, K, H]."""

    def prepend(own_PKH: Array, x_BTKH: Array) -> Array:
        rows = jnp.broadcast_to(own_PKH.astype(x_BTKH.dtype), (len(x_BTKH), *own_PKH.shape))
        return jnp.concatenate([rows, x_BTKH], axis=1)

    layers = zip(*virtual, kv, strict=True)
    return [(prepend(k, pair[0]), prepend(v, pair[1])) for k, v, pair in layers]


def self_attention_only(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, options: AttentionOptions, **more: Any
) -> Any:
    """`attend_rows` for the virtual tokens' own row, which is too short for most kernels."""
    return attend_rows(q_BTNH, k_BTKH, v_BTKH, options._replace(implementation="xla"), **more)


def offset_positions(positions_BT: Array | None, T: int, count: int) -> Array:
    """Positions of T tokens, shifted by `count` virtual tokens; positions_BT None: 0 .. T-1."""
    if positions_BT is None:
        positions_BT = jnp.arange(T, dtype=jnp.int32)[None]
    return positions_BT + count


def with_prefix_kv(own: KeysValues | None, attend: Attend, positions_BT: Array) -> Attend:
    """`attend` with a layer's virtual tokens, if there are any, before every sequence."""
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
    """`attend` over the sequence and the virtual tokens: two softmaxes, merged by log-sum-exp.

    virtual: k_PKH, v_PKH. positions_BT: of the queries, including virtual tokens.
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
    # Padding attends to no token of the sequence: its log-sum-exp is -inf and the share 0.
    share_BTN1 = jax.nn.sigmoid(lse_BNT.swapaxes(1, 2) - own_BTN)[..., None]
    return (own_BTNH + share_BTN1 * (y_BTNH - own_BTNH)).astype(q_BTNH.dtype)
