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
    our_file_layout,
)
from jaxtrain.interop.peft import check_adapter, read_adapter, write_adapter
from jaxtrain.interop.peft_prompt import read_prompt_adapter, write_prompt_adapter
from jaxtrain.interop.pretrained import copy_aux_files, has_params, inherit_config, load_init_params

__all__ = [
    "FAMILIES",
    "Family",
    "Prompting",
    "Source",
    "chat_template",
    "check_adapter",
    "copy_aux_files",
    "export_weights",
    "find_folder",
    "fitting_family",
    "has_params",
    "inherit_config",
    "is_checkpoint",
    "load",
    "load_init_params",
    "model_fields",
    "open_checkpoint",
    "origin",
    "our_file_layout",
    "prompting",
    "read_adapter",
    "read_prompt_adapter",
    "special_tokens",
    "to_config",
    "write_adapter",
    "write_prompt_adapter",
]  # fmt: skip
