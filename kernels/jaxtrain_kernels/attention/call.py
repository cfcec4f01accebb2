"""Arguments and named results that all attention backends share."""

from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

RESULT = "attention_result"


class Call(NamedTuple):
    """Arguments of the public `attention` other than q, k and v, as a backend receives them.

    For a backend, scale is never None, a window that covers the whole sequence is None, and tiling
    has the backend's own keys. key_segment_ids_BS is given only together with segment_ids_BT.
    """

    causal: bool = True
    window: int | None = None
    segment_ids_BT: Any = None
    key_segment_ids_BS: Any = None
    softcap: float | None = None
    scale: Any = 1.0
    return_lse: bool = False
    deterministic: bool = False
    tiling: dict[str, Any] | None = None


def kept(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Name a forward kernel's results RESULT, so that a `jax.checkpoint` policy can save them."""
    return checkpoint_name(out, RESULT), checkpoint_name(lse, RESULT)
