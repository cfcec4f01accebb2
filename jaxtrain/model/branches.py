"""Branched rows: several continuations of one prompt, which is computed once.

A row is a trunk of packed prompts followed by R branch tokens. A branch token attends to its own
branch up to itself and to the trunk prompt that it continues; the trunk does not attend to the
branches. So the answers of a multiple-choice question cost only their own tokens, and each has the
same results as question and answer read as one sequence.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.model.attention import AttentionOptions, attend_rows

FLOOR = -1e30  # finite, so that padding, which attends to nothing, gives no NaN


class Branches(NamedTuple):
    """The prompts that the last R tokens of each row continue."""

    parents_BR: Array  # segment id of the trunk prompt that the branch continues; 0 is padding
    before_BR: Array  # index in the row of the previous token
    positions_BT: Array  # of the whole row: a branch's positions continue its parent's


def branched_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    options: AttentionOptions,
    *,
    branches: Branches,
    return_lse: bool = False,
) -> Any:
    """Attention as `attend_rows`: its kernel for the trunk, plain matmuls for the branches."""
    window, segments_BT, softcap, scale, *_ = options
    assert segments_BT is not None, "what is a branch's parent without segments"
    split = q_BTNH.shape[1] - branches.parents_BR.shape[1]
    trunk = attend_rows(
        q_BTNH[:, :split], k_BTKH[:, :split], v_BTKH[:, :split],
        options._replace(segments_BT=segments_BT[:, :split]), return_lse=return_lse,
    )  # fmt: skip
    seen_BRT = visible(branches, segments_BT, window)
    B, R, (K, H) = len(q_BTNH), seen_BRT.shape[1], k_BTKH.shape[2:]
    q_BRKGH = q_BTNH[:, split:].reshape(B, R, K, -1, H)
    s_BKGRT = jnp.einsum("brkgh,btkh->bkgrt", q_BRKGH, k_BTKH, preferred_element_type=jnp.float32)
    s_BKGRT = s_BKGRT * scale
    if softcap is not None:
        s_BKGRT = softcap * jnp.tanh(s_BKGRT / softcap)
    s_BKGRT = jnp.where(seen_BRT[:, None, None], s_BKGRT, FLOOR)
    p_BKGRT = jax.nn.softmax(s_BKGRT, axis=-1)
    y_BRKGH = jnp.einsum("bkgrt,btkh->brkgh", p_BKGRT.astype(v_BTKH.dtype), v_BTKH)
    y_BRNH = y_BRKGH.reshape(B, R, -1, H)
    if not return_lse:
        return jnp.concatenate([trunk, y_BRNH], axis=1)
    lse_BNR = jax.nn.logsumexp(s_BKGRT, axis=-1).reshape(B, -1, R)
    ends = zip(trunk, (y_BRNH, lse_BNR), (1, 2), strict=True)
    return tuple(jnp.concatenate([a, b], axis=axis) for a, b, axis in ends)


def visible(branches: Branches, segments_BT: Int[Array, "B T"], window: int | None) -> Array:
    """Attention mask of the branch tokens over their row, bool [B, R, T]."""
    R, T = branches.parents_BR.shape[1], segments_BT.shape[1]
    own_BRT = segments_BT[:, -R:, None] == segments_BT[:, None, :]
    earlier_RT = jnp.arange(T)[None, :] <= jnp.arange(T - R, T)[:, None]
    parent_BRT = branches.parents_BR[..., None] == segments_BT[:, None, :]
    seen_BRT = (own_BRT & earlier_RT[None]) | parent_BRT
    if window is None:
        return seen_BRT
    positions_BT = branches.positions_BT
    return seen_BRT & (positions_BT[:, -R:, None] - positions_BT[:, None, :] <= window)


def take_before(
    before_BTD: Float[Array, "B T D"], plain_BTD: Float[Array, "B T D"], branches: Branches
) -> Float[Array, "B T D"]:
    """`before_BTD` with, for branch tokens, the embedding of the token that they really follow."""
    R = branches.before_BR.shape[1]
    taken_BRD = jnp.take_along_axis(plain_BTD, branches.before_BR[..., None], axis=1)
    return jnp.concatenate([before_BTD[:, :-R], taken_BRD], axis=1)
