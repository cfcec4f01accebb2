"""Hugging Face checkpoints in and out; `jaxtrain import` is the command."""

from jaxtrain.interop.companions import Prompting, chat_template, prompting, special_tokens
from jaxtrain.interop.configs import fitting_family, model_fields, to_config
from jaxtrain.interop.export import export_weights
from jaxtrain.interop.families import FAMILIES, Family
from jaxtrain.interop.load import (
    Source,
    find_folder,
    is_checkpoint,
    load,
    open_checkpoint,
    origin,
    stored_form,
)
from jaxtrain.interop.peft import check_adapter, read_adapter, write_adapter
from jaxtrain.interop.peft_virtual import read_virtual, write_virtual
from jaxtrain.interop.pretrained import carry_on, holds, load_start, take_over

__all__ = [
    "FAMILIES", "Family", "Prompting", "Source", "carry_on", "chat_template", "check_adapter",
    "export_weights", "find_folder", "fitting_family", "holds", "is_checkpoint", "load",
    "load_start", "model_fields", "open_checkpoint", "origin", "prompting", "read_adapter",
    "read_virtual", "special_tokens", "stored_form", "take_over", "to_config", "write_adapter",
    "write_virtual",
]  # fmt: skip
