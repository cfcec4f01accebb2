"""Fine-tuning: trainable and frozen parameters, and how a step joins them."""

from collections.abc import Callable

import jax.numpy as jnp

from jaxtrain.finetune.config import (
    ADDED_MODULES,
    PEFT,
    PRETRAINING,
    FinetuneConfig,
    LoRAConfig,
    PrefixConfig,
    PromptLearningConfig,
    ReLoRAConfig,
    adapter_folder,
    adapter_settings,
    apply_finetune_defaults,
)
from jaxtrain.finetune.ia3 import ia3
from jaxtrain.finetune.lora import apply_lora_plus, lora, lora_scale
from jaxtrain.finetune.partition import (
    EXTRAS,
    Partition,
    added_modules,
    flatten,
    full,
    join_full,
    select_by_name,
    trainable_by_matrix,
    unflatten,
)
from jaxtrain.finetune.prefix_tuning import prefix_keys_values, prompt_learning
from jaxtrain.finetune.qalora import qalora
from jaxtrain.finetune.relora import merge_adapters, relora
from jaxtrain.weights.params import Specs

METHODS: dict[str, Callable[..., Partition]] = {
    "full": full, "lora": lora, "freeze": select_by_name, "bitfit": select_by_name, "ia3": ia3,
    "adapter": added_modules, "prompt": prompt_learning, "prefix": prompt_learning,
    "qalora": qalora, "relora": relora,
}  # fmt: skip


def make_partition(c: FinetuneConfig, specs: Specs, dtype: jnp.dtype) -> Partition:
    """Divide a model's declared parameters into trainable and frozen. dtype: of the compute."""
    return METHODS[c.name](c, specs, dtype)


__all__ = [
    "ADDED_MODULES", "EXTRAS", "PEFT", "PRETRAINING", "FinetuneConfig", "LoRAConfig", "Partition",
    "PrefixConfig", "PromptLearningConfig", "ReLoRAConfig", "adapter_folder", "adapter_settings",
    "apply_finetune_defaults", "apply_lora_plus", "flatten", "full", "join_full", "lora_scale",
    "make_partition", "merge_adapters", "prefix_keys_values", "trainable_by_matrix", "unflatten",
]  # fmt: skip
