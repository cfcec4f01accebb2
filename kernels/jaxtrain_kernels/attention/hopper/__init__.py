"""Flash attention kernels for Hopper (H100, H200), written in Pallas Mosaic GPU."""

from typing import Any

from jaxtrain_kernels import hopper
from jaxtrain_kernels.attention.call import Call
from jaxtrain_kernels.dispatch import Target
from jaxtrain_kernels.shapes import AttentionShape

HEAD_DIMS = (64, 96, 128, 256)
# Changes to the default tilings that are worth measuring.
FORWARD_CHANGES: tuple[dict[str, Any], ...] = (
    {}, {"k_stages": 2}, {"turns": True}, {"halves": False}, {"lazy": 0.0}, {"ahead": False},
)  # fmt: skip
FORWARD_CHANGES_64: tuple[dict[str, Any], ...] = (
    {}, {"warpgroups": 3}, {"polynomial": 4}, {"halves": False}, {"ahead": False},
)  # fmt: skip
BACKWARD_CHANGES: tuple[dict[str, Any], ...] = (
    {}, {"dq_by": "apart"}, {"blocks": 0}, {"dynamic": False}, {"l2_bytes": 50 << 20},
)  # fmt: skip


def supports(target: Target, q_BTNH, call: Call) -> str | None:
    H = q_BTNH.shape[-1]
    if reason := hopper.unsupported_reason(target, q_BTNH):
        return reason
    if H not in HEAD_DIMS:
        return f"needs a head dim of {', '.join(map(str, HEAD_DIMS))}, got {H}"
    if call.key_segment_ids_BS is not None:
        return "takes one array of segment ids for queries and keys"
    return None


def candidates(shape: AttentionShape) -> list[dict[str, Any]]:
    """Tilings to measure, in the format of attention's `tiling`."""
    from jaxtrain_kernels.attention.hopper.backward import default_tiling as default_backward
    from jaxtrain_kernels.attention.hopper.forward import default_tiling as default_forward

    forward = default_forward(shape.H, bool(shape.documents))
    backward = default_backward(shape.H)
    changes = FORWARD_CHANGES_64 if shape.H <= 64 else FORWARD_CHANGES
    return [
        *({"forward": forward._replace(**change)._asdict()} for change in changes),
        *({"backward": backward._replace(**change)._asdict()} for change in BACKWARD_CHANGES),
    ]


def attention(q_BTNH, k_BSKH, v_BSKH, call: Call):
    """Backend of the public function; returns (out_BTNH, lse_BNT).

    tiling: {"forward": fields of ForwardTiling, "backward": fields of BackwardTiling}.
    """
    if call.scale == 0:
        raise ValueError("attention: scale must not be 0")
    from jaxtrain_kernels.attention.hopper import flash  # takes a second to import

    arrays = q_BTNH, k_BSKH, v_BSKH, call.segment_ids_BT
    return flash.flash(flash.options(call), *arrays)


def gradients(q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, dout_BTNH, call: Call):
    """Backend of the public `attention_gradients`."""
    from jaxtrain_kernels.attention.hopper import flash

    arrays = q_BTNH, k_BSKH, v_BSKH, call.segment_ids_BT, out_BTNH, lse_BNT
    return flash.gradients(flash.options(call), *arrays, dout_BTNH)
