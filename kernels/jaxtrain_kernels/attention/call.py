"""What every attention backend is asked for."""

from typing import Any, NamedTuple


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
