"""Fine-tuning: what trains, what is frozen, and how a step joins the two."""

from typing import Any

import jax.numpy as jnp

from jaxtrain.finetune.config import (
    INSERTED,
    PEFT,
    FinetuneConfig,
    LoRAConfig,
    PrefixConfig,
    VirtualConfig,
    adapter_folder,
    fill_in,
)
from jaxtrain.finetune.ia3 import ia3
from jaxtrain.finetune.lora import lora, plus
from jaxtrain.finetune.partition import (
    Parts,
    everything,
    flatten,
    inserted,
    join_all,
    nested,
    some,
    trained_by_matrix,
)
from jaxtrain.finetune.virtual import keys_values, virtual

METHODS = {
    "full": everything, "lora": lora, "freeze": some, "bitfit": some, "ia3": ia3,
    "adapter": inserted, "prompt": virtual, "prefix": virtual,
}  # fmt: skip


def make_parts(c: Any, specs: Any, dtype: jnp.dtype) -> Parts:
    """The parts of a model that is declared so; the compute is in `dtype`."""
    return METHODS[c.name](c, specs, dtype)


__all__ = [
    "INSERTED", "PEFT", "FinetuneConfig", "LoRAConfig", "Parts", "PrefixConfig", "VirtualConfig",
    "adapter_folder", "everything", "fill_in", "flatten",
    "join_all", "keys_values", "make_parts", "nested", "plus", "trained_by_matrix",
]  # fmt: skip
