"""What every attention backend is asked for."""

from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

RESULT = "attention_result"


class Call(NamedTuple):
    """The arguments of the public `attention` besides the arrays, as a backend gets them.

    Then scale is a number, a window that covers the whole sequence is None, and the tiling is of
    the backend's own kind. With key_segment_ids_BS there are segment_ids_BT.
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
    """A forward kernel's results under the name RESULT, by which `jax.checkpoint` can keep them."""
    return checkpoint_name(out, RESULT), checkpoint_name(lse, RESULT)
