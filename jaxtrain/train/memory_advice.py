"""Advice for a step that does not fit the device's memory."""

from jaxtrain.config.resolve import Resolved
from jaxtrain.finetune.config import FrozenBaseConfig
from jaxtrain.runs.metrics import format_bytes


def memory_advice(c: Resolved, needed: int, limit: int | None) -> str:
    """Return one line: the bytes that a step needs, the device's bytes, and ways to need fewer."""
    has = f", the device has {format_bytes(limit)}" if limit else ""
    rows = c.train.device_batch_size
    ways = [f"lower train.device_batch_size (now {rows})"] * (rows > 1)
    ways += ["set model.remat=block"] * (c.model.remat not in ("block", "offload"))
    if (
        len(ways) < 2
        and isinstance(c.finetune, FrozenBaseConfig)
        and not c.finetune.base_quantization
    ):
        ways.append("set finetune.base_quantization=nf4")
    if len(ways) < 2 and not c.optim.offload:
        ways.append("set optim.offload.name=host")
    if len(ways) < 2:
        ways.append(
            "shorten train.sequence_length, or take more devices (mesh.data=1 mesh.fsdp=auto)"
        )
    return f"out of device memory: a step needs {format_bytes(needed)}{has}; {' or '.join(ways)}"
